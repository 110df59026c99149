"""Words of the command line that tests have in common: where the configurations lie, and a run of seconds."""

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"


ONE_EPOCH = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
TINY = [*ONE_EPOCH, "--data.train.episodes=2", "--data.evaluation.episodes=5"]
TINY_BALANCED = [*ONE_EPOCH, "--data.train.batches=2"]


QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
