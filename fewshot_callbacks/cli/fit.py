"""`fewshot fit | validate | test`: a prototypical network from a configuration file, with the monitors attached."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from fewshot_callbacks.data._images import ImageDataModule
from fewshot_callbacks.protonet import ProtoNet

DEFAULTS = Path(__file__).with_name("defaults.yaml")
"""The monitors, the checkpoint of the best mAP, and TensorBoard logs in `runs/`."""


class FewshotCLI(LightningCLI):
    """LightningCLI for `ProtoNet`: what model and data must agree on is said once, in the data."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Tell the model what the data knows: channels, shots, episodes in a batch, and the sizes of the test episodes."""
        parser.link_arguments("data", "model.in_channels", compute_fn=_channels, apply_on="instantiate")
        parser.link_arguments("data", "model.shots", compute_fn=_shots, apply_on="instantiate")
        parser.link_arguments(
            "data", "model.episodes_per_batch", compute_fn=_episodes_per_batch, apply_on="instantiate"
        )
        parser.link_arguments("data", "model.evaluation", compute_fn=_protocol, apply_on="instantiate")
        parser.link_arguments(
            "data", "model.validation_episodes", compute_fn=_validation_episodes, apply_on="instantiate"
        )
        parser.link_arguments("data", "model.evaluation_batches", compute_fn=_batches, apply_on="instantiate")

    def before_fit(self) -> None:
        """Find now what would only show when the trained network is evaluated."""
        if isinstance(self.datamodule, ImageDataModule):
            self.datamodule.check_evaluation()


def _channels(data: LightningDataModule) -> int:
    return int(getattr(data, "in_channels", 3))


def _shots(data: LightningDataModule) -> int:
    return int(getattr(data, "shots", 1))


def _episodes_per_batch(data: LightningDataModule) -> int:
    return int(getattr(data, "episodes_per_batch", 1))


def _protocol(data: LightningDataModule) -> dict[str, int]:
    sizes = ("ways", "shots", "queries", "episodes", "seed")
    return {size: getattr(data, f"test_{size}") for size in sizes if hasattr(data, f"test_{size}")}


def _validation_episodes(data: LightningDataModule) -> int | None:
    return getattr(data, "val_episodes", None)


def _batches(data: LightningDataModule) -> str:
    return "episodes" if getattr(data, "episodic_evaluation", False) else "images"


def run(arguments: Sequence[str]) -> None:
    """Run `fit`, `validate` or `test` with the words that follow, and say where a training is kept."""
    cli = command(arguments)
    if arguments[:1] == ["fit"] and not cli.trainer.fast_dev_run:  # type: ignore[attr-defined]
        kept = where_it_is_kept(cli.trainer)  # asks all processes
        if cli.trainer.is_global_zero:
            print(kept)


def command(arguments: Sequence[str], *, keep_configuration: bool = True) -> FewshotCLI:
    """Run `fit`, `validate` or `test` with the words that follow.

    Args:
        arguments: the words.
        keep_configuration: write `config.yaml` into the folder of the logger; without one, into the working directory.

    Returns:
        What was run, with its trainer, model and datamodule.
    """
    before, sys.argv = (
        sys.argv,
        [sys.argv[0], *arguments],
    )  # LightningCLI reads these, and starts further processes by them
    try:
        return FewshotCLI(
            ProtoNet,
            LightningDataModule,
            subclass_mode_data=True,
            seed_everything_default=0,
            parser_kwargs={"prog": "fewshot"}
            | {command: {"default_config_files": [str(DEFAULTS)]} for command in ("fit", "validate", "test")},
            save_config_callback=SaveConfigCallback if keep_configuration else None,
            save_config_kwargs={"overwrite": True},
        )
    finally:
        sys.argv = before


def where_it_is_kept(trainer: Trainer) -> str:
    """Two or three lines: the folder of the run, its best checkpoint, and how to test that."""
    folder = trainer.log_dir if trainer.loggers else None
    lines = [] if folder is None else [f"The run is kept in {folder}."]
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if best:
        score, monitor = trainer.checkpoint_callback.best_model_score, trainer.checkpoint_callback.monitor  # type: ignore[union-attr]
        lines.append(f"Best checkpoint: {best}" + ("" if score is None else f" ({monitor} {float(score):.4f})"))
        if folder is not None and (Path(folder) / "config.yaml").exists():
            lines.append(f"Test it: fewshot test --config {Path(folder) / 'config.yaml'} --ckpt_path {best}")
    return "\n".join(lines)
