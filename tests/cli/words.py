"""Words of the command line that tests have in common: where the configurations lie, and a run of seconds."""

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"


TINY = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--data.episodes=2", "--data.test_episodes=5"]


QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
