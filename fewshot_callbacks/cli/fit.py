"""`fewshot fit | validate | test`: a prototypical network from a configuration file, with the monitors attached."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from fewshot_callbacks.protonet import ProtoNet

TRAINER_DEFAULTS = {
    "log_every_n_steps": 10,
    "callbacks": [
        {"class_path": "fewshot_callbacks.callbacks.DiscriminantRatioMonitor"},
        {"class_path": "fewshot_callbacks.callbacks.RetrievalMonitor"},
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"monitor": "val/mAP", "mode": "max", "filename": "best", "save_last": True},
        },
    ],
    "logger": {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": "runs", "name": None},
    },
}
"""The monitors, the checkpoint of the best mAP, and TensorBoard logs in `runs/`."""


class FewshotCLI(LightningCLI):
    """LightningCLI for `ProtoNet`: what model and data must agree on is said once, in the data."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Tell the model what the data knows: channels, shots, and the sizes of the test episodes."""
        parser.link_arguments("data", "model.in_channels", compute_fn=_channels, apply_on="instantiate")
        parser.link_arguments("data", "model.shots", compute_fn=_shots, apply_on="instantiate")
        parser.link_arguments("data", "model.evaluation", compute_fn=_protocol, apply_on="instantiate")
        parser.link_arguments("data", "model.evaluation_batches", compute_fn=_batches, apply_on="instantiate")


def _channels(data: LightningDataModule) -> int:
    return int(getattr(data, "in_channels", 3))


def _shots(data: LightningDataModule) -> int:
    return int(getattr(data, "shots", 1))


def _protocol(data: LightningDataModule) -> dict[str, int]:
    sizes = ("ways", "shots", "queries", "episodes", "seed")
    return {size: getattr(data, f"test_{size}") for size in sizes if hasattr(data, f"test_{size}")}


def _batches(data: LightningDataModule) -> str:
    return "episodes" if getattr(data, "episodic_evaluation", False) else "images"


def run(arguments: Sequence[str]) -> None:
    """Run `fit`, `validate` or `test` with the words that follow."""
    FewshotCLI(
        ProtoNet,
        LightningDataModule,
        subclass_mode_data=True,
        seed_everything_default=0,
        trainer_defaults=TRAINER_DEFAULTS,
        parser_kwargs={"prog": "fewshot"},
        save_config_kwargs={"overwrite": True},
        args=list(arguments),
    )
