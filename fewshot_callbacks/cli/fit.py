"""`fewshot fit | validate | test`: a ProtoNet or any other module from a configuration file, with the monitors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fewshot_callbacks._terminal import printable
from fewshot_callbacks.cli._checkpoint import Checkpoint, chosen_checkpoint
from fewshot_callbacks.cli._configuration import files_of, with_paths
from fewshot_callbacks.cli._options import OneLineErrors
from fewshot_callbacks.cli.main import Terminated
from fewshot_callbacks.data import FewShotDataModule
from fewshot_callbacks.protonet import EpisodeProtocol, ProtoNet

# The monitors, the checkpoint of the best mAP, and TensorBoard logs in `runs/`.
DEFAULTS = Path(__file__).with_name("defaults.yaml")


class FewshotParser(OneLineErrors, LightningArgumentParser):
    """LightningCLI's parser, which answers a mistake with one line."""

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a configuration; name the model's class, which Lightning 2.5 leaves among a checkpoint's arguments."""
        for settings in obj.values():
            model = settings.get("model") if isinstance(settings, dict) else None
            if model and "_class_path" in model:
                settings["model"] = {"class_path": model.pop("_class_path"), "dict_kwargs": model}
        return super().parse_object(obj, *args, **kwargs)


class FewshotCLI(LightningCLI):
    """LightningCLI for `ProtoNet`, where the data alone sets what model and data must agree on; or for any module."""

    checkpoint: Checkpoint | None = None

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the checkpoint, and remember the configuration before LightningCLI replaces hyperparameters by its own."""
        super().parse_arguments(parser, args)
        settings = self._settings
        self.checkpoint = chosen_checkpoint(
            self.config.subcommand,
            settings.get("ckpt_path"),
            [Path(str(file)) for file in settings.get("config") or ()],
        )
        if self.checkpoint is None and self.config.subcommand != "fit":
            settings.ckpt_path = None  # an untrained network, which was asked for
        self._configured = _arguments_of(settings.model)

    def before_instantiate_classes(self) -> None:
        """Say which hyperparameters the checkpoint overrules; log no validation or test unless requested."""
        settings = self._settings
        if self.checkpoint is not None:
            say_what_is_overruled(self._configured, _arguments_of(settings.model))
        asked = any(word.startswith("--trainer.logger") for word in sys.argv)
        if self.config.subcommand != "fit" and not asked:
            settings.trainer.logger = False  # a logger would make the folder of another run
            self.save_config_callback = None  # would write into the working directory

    @property
    def _settings(self) -> Any:
        return self.config[self.config.subcommand]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Copy settings of the data to a ProtoNet: channels, shots, episodes in a batch, sizes of the test episodes."""
        if self.subclass_mode_model:
            return
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
        if isinstance(self.datamodule, FewShotDataModule):
            in_episodes = isinstance(self.model, ProtoNet) or self.datamodule.episodic_evaluation
            self.datamodule.check("train", *(("val", "test") if in_episodes else ()))
        self._check_weights()

    def before_validate(self) -> None:
        """Refuse the weights of another network."""
        self._check_weights()

    def before_test(self) -> None:
        """Refuse the weights of another network."""
        self._check_weights()

    def _check_weights(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.check_weights(self.model)


def _arguments_of(model: Any) -> dict[str, Any]:
    """Find the settings of a model, which stand one level lower where its class is named."""
    settings: dict[str, Any] = model.as_dict()
    if "class_path" not in settings:
        return settings
    return {**settings.get("init_args", {}), **settings.get("dict_kwargs", {})}


@rank_zero_only
def say_what_is_overruled(configured: Mapping[str, Any], used: Mapping[str, Any]) -> None:
    """Print the hyperparameters in which a checkpoint differs from the configuration, and that its own are used."""
    different = [name for name in configured if name in used and used[name] != configured[name]]
    if different:
        words = printable(", ".join(f"{name} = {used[name]} (configured: {configured[name]})" for name in different))
        print(f"The checkpoint was trained with other hyperparameters, which are used: {words}.", file=sys.stderr)


class InterruptReport(Callback):
    """What an interrupted training has kept, in one line."""

    text = ""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note the checkpoints that are there."""
        files = [
            getattr(checkpoint, f"{which}_model_path", "")
            for checkpoint in trainer.checkpoint_callbacks
            for which in ("best", "last")
        ]
        kept = list(dict.fromkeys(file for file in files if file and Path(file).is_file()))
        if trainer.state.fn != "fit":
            return
        if kept:
            self.text = f"Kept: {' and '.join(kept)}; --ckpt_path {kept[-1]} continues from there."
        else:
            self.text = "No checkpoint was kept: the first is written when a validation ends."


# a data module of one's own may have attributes of the same names


def _channels(data: LightningDataModule) -> int:
    return int(getattr(getattr(data, "dataset", data), "in_channels", 3))


def _shots(data: LightningDataModule) -> int:
    return int(getattr(getattr(data, "train", data), "shots", 1))


def _episodes_per_batch(data: LightningDataModule) -> int:
    return int(getattr(getattr(data, "train", data), "episodes_per_batch", 1))


def _protocol(data: LightningDataModule) -> dict[str, int]:
    return asdict(getattr(data, "evaluation", EpisodeProtocol()))


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
        arguments: The words.
        keep_configuration: Write `config.yaml` into the folder of the logger; without one, into the working directory.

    Returns:
        What was run, with its trainer, model and datamodule.

    Raises:
        ValueError: The settings, the checkpoint or the data cannot be used; Lightning's own refusals included.
        KeyboardInterrupt: The run was interrupted, or ended by SIGTERM; says what a training has kept.
    """
    arguments = with_paths(arguments)
    # LightningCLI reads these, and starts further processes by them
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    interrupt = InterruptReport()
    named = names_a_model(arguments)
    try:
        if arguments[:1] != ["fit"]:
            warnings.filterwarnings("ignore", "The dirpath has changed")  # nothing is saved
        return FewshotCLI(
            LightningModule if named else ProtoNet,
            LightningDataModule,
            subclass_mode_model=named,
            subclass_mode_data=True,
            seed_everything_default=0,
            parser_class=FewshotParser,
            trainer_defaults={"callbacks": interrupt},
            parser_kwargs={"prog": "fewshot"}
            | {command: {"default_config_files": [str(DEFAULTS)]} for command in ("fit", "validate", "test")},
            save_config_callback=SaveConfigCallback if keep_configuration else None,
            save_config_kwargs={"overwrite": True},
        )
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    except SystemExit as stop:
        raise signal_behind(stop, interrupt.text) from None
    finally:
        sys.argv = before


def signal_behind(stop: SystemExit, text: str = "") -> BaseException:
    """Return the interrupt behind an exit of Lightning, with a text; without one, the exit itself.

    SIGTERM would end a run with status 0, by which Slurm, Kubernetes and `timeout` take it for complete.
    """
    if isinstance(stop, SIGTERMException):
        return Terminated(text)
    return KeyboardInterrupt(text) if isinstance(stop.__context__, KeyboardInterrupt) else stop


def names_a_model(arguments: Sequence[str]) -> bool:
    """Check whether a configuration or a word names the class of the model (`class_path`), not settings of ProtoNet."""
    if any(word.partition("=")[0] in ("--model", "--model.class_path") for word in arguments):
        return True
    return any("class_path" in _model_in(file) for file in files_of(arguments))


def _model_in(file: Path) -> Mapping[str, Any]:
    """Read the model of a configuration; nothing where it cannot be read, of which the parser informs."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    model = content.get("model") if isinstance(content, Mapping) else None
    return model if isinstance(model, Mapping) else {}


def where_it_is_kept(trainer: Trainer) -> str:
    """Write two or three lines: the folder of the run, its best checkpoint, and how to test that."""
    folder = trainer.log_dir if trainer.loggers else None
    lines = [] if folder is None else [f"The run is kept in {folder}."]
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if best:
        score, monitor = trainer.checkpoint_callback.best_model_score, trainer.checkpoint_callback.monitor  # type: ignore[union-attr]
        lines.append(f"Best checkpoint: {best}" + ("" if score is None else f" ({monitor} {float(score):.4f})"))
        if folder is not None and (Path(folder) / "config.yaml").exists():
            lines.append(f"Test it: fewshot test --config {Path(folder) / 'config.yaml'} --ckpt_path {best}")
    return "\n".join(lines)
