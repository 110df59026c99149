"""`fewshot fit`, `validate` and `test`: run a ProtoNet or any other module from a configuration file, with the monitors."""

from __future__ import annotations

import itertools
import logging
import posixpath
import sys
import textwrap
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fewshot_callbacks.cli.fit_help import configurations
from fewshot_callbacks.cli.fit_mistakes import mistake_of_training
from fewshot_callbacks.cli.mistakes import MistypedError, did_you_mean, reason
from fewshot_callbacks.cli.run_files import CONFIGURATION, RECORD, TrainingRecord, best_checkpoint, checkpoints_below
from fewshot_callbacks.cli.signals import Terminated
from fewshot_callbacks.data import FewShotDataModule
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import (
    Location,
    as_location,
    is_address,
    is_file,
    join_location,
    times_at_address,
)
from fewshot_callbacks.files.remote_cache import local_copy
from fewshot_callbacks.protonet import EpisodeProtocol, ProtoNet
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.trainer.logs import run_folder

# Adds the monitors, a checkpoint of the best mAP, and TensorBoard logs in `runs/`.
DEFAULTS = Path(__file__).with_name("defaults.yaml")
# `--ckpt_path none` evaluates the initial weights.
UNTRAINED = "none"
# Values of `--ckpt_path` that Lightning resolves.
CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")

# ProtoNet argument -> its value from the data. A user's data module may not have it.
LINKS: dict[str, Callable[[Any], Any]] = {
    "in_channels": lambda data: getattr(getattr(data, "dataset", data), "in_channels", 3),
    "shots": lambda data: getattr(getattr(data, "train", data), "shots", 1),
    "episodes_per_batch": lambda data: getattr(getattr(data, "train", data), "episodes_per_batch", 1),
    "evaluation": lambda data: asdict(getattr(data, "evaluation", EpisodeProtocol())),
    "val_episodes": lambda data: getattr(data, "val_episodes", None),
    "evaluation_batches": lambda data: "episodes" if getattr(data, "episodic_evaluation", False) else "images",
}


class FewshotParser(LightningArgumentParser):
    """LightningCLI's parser without abbreviated options. It can read the model that Lightning 2.5 writes to a checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a configuration. Lightning 2.5 puts the class of a checkpoint's model among its arguments."""
        for settings in obj.values():
            model = settings.get("model") if isinstance(settings, dict) else None
            if model and "_class_path" in model:
                settings["model"] = {"class_path": model.pop("_class_path"), "dict_kwargs": model}
        return super().parse_object(obj, *args, **kwargs)


class FewshotCLI(LightningCLI):
    """LightningCLI for any module. A `ProtoNet` takes the shared settings from the data."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link settings of the data to a ProtoNet: channels, shots, episodes per batch, sizes of the test episodes."""
        for name, of_data in {} if self.subclass_mode_model else LINKS.items():
            # The data module is created first, and its values are read from the object.
            parser.link_arguments("data", f"model.{name}", compute_fn=of_data, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Check the checkpoint, and store the configuration before LightningCLI replaces its hyperparameters."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            words = sys.argv[1:]
            options = self._subcommand_parsers[words[0]].get_defaults().keys()
            raise MistypedError(mistake_of_training(words, options) or reason(error)) from error
        settings = self._settings
        check_checkpoint(self.config.subcommand, settings.get("ckpt_path"), settings.get("config") or ())
        if settings.get("ckpt_path") == UNTRAINED:
            settings.ckpt_path = None
        self._configured = _arguments_of(settings.model)

    def before_instantiate_classes(self) -> None:
        """Print which hyperparameters the checkpoint overrides. Log a validation or test only if requested."""
        settings = self._settings
        say_what_is_overruled(self._configured, _arguments_of(settings.model))
        # The settings always contain the default logger, so only the words show what was requested.
        is_requested = any(word.startswith("--trainer.logger") for word in sys.argv)
        if self.config.subcommand != "fit" and not is_requested:
            settings.trainer.logger = False  # a logger would create the folder of another run
            self.save_config_callback = None  # it would write into the working directory

    @property
    def _settings(self) -> Any:
        return self.config[self.config.subcommand]

    def before_fit(self) -> None:
        """Report errors before training that would otherwise come after it."""
        # A CSVLogger deletes the metrics of an earlier run as soon as it is used. Other loggers choose their folder later.
        if self.trainer.loggers and isinstance(self.trainer.loggers[0], CSVLogger | TensorBoardLogger):
            check_folder(run_folder(self.trainer), goes_on=_goes_on(self.trainer, self._settings))
        if isinstance(self.datamodule, FewShotDataModule):
            in_episodes = isinstance(self.model, ProtoNet) or self.datamodule.episodic_evaluation
            self.datamodule.check("train", *(("val", "test") if in_episodes else ()))


def _arguments_of(model: Any) -> dict[str, Any]:
    """Return the settings of a model, which are nested if its class is given."""
    settings: dict[str, Any] = model.as_dict()
    if "class_path" not in settings:
        return settings
    return {**settings.get("init_args", {}), **settings.get("dict_kwargs", {})}


@rank_zero_only
def say_what_is_overruled(configured: Mapping[str, Any], used: Mapping[str, Any]) -> None:
    """Print the hyperparameters that a checkpoint overrides."""
    names = [name for name in configured if name in used and used[name] != configured[name]]
    if names:
        values = printable(", ".join(f"{name} = {used[name]} (configured: {configured[name]})" for name in names))
        print(f"Using the hyperparameters of the checkpoint, which differ: {values}.", file=sys.stderr)


def check_checkpoint(command: str, given: Any, configuration_files: Sequence[Any]) -> None:
    """Check `--ckpt_path`."""
    suggested: object = "runs/version_0/checkpoints/best.ckpt"
    if given is None and command != "fit":
        of_runs = [best_checkpoint(Path(str(file)).parent / "checkpoints") for file in configuration_files]
        suggested = next((file for file in of_runs if file), suggested)
        raise InputError(
            f"there are no weights to {command}. Pass --ckpt_path {suggested}, or --ckpt_path {UNTRAINED} for the "
            "untrained network."
        )
    if given is None or (given == UNTRAINED and command != "fit"):
        return
    # Lightning resolves these words, and reads addresses of remote file systems.
    if str(given).partition(":")[0] in CHECKPOINT_WORDS or "://" in str(given):
        return
    path = Path(given)
    if not path.is_file():
        folder = path if path.is_dir() else path.parent
        checkpoints = ", ".join(file.name for file in checkpoints_below(folder) if file.parent == folder)
        fix = f"Pass a file, such as {best_checkpoint(folder) or suggested}"
        if checkpoints:
            fix = f"{folder} contains {checkpoints}"
        raise InputError(f"There is no checkpoint {path}. {fix}.")
    try:
        # A mistake is reported before data and network are created, which may take long.
        torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except PermissionError:
        raise
    except Exception as error:  # torch.load documents no error class; a truncated file may raise an OSError
        raise InputError(
            f"{path} is not a checkpoint of 'fewshot fit', or it is damaged ({type(error).__name__}). Pass another "
            "checkpoint, such as best.ckpt or last.ckpt of the same run."
        ) from error


def _goes_on(trainer: Trainer, settings: Any) -> bool:
    """Return whether a fit resumes from `--ckpt_path` or from the checkpoint of a requeued job."""
    return settings.get("ckpt_path") is not None or _holds_checkpoint_of_queue(trainer.default_root_dir)


def _holds_checkpoint_of_queue(folder: str) -> bool:
    if is_address(folder):
        return bool(times_at_address(posixpath.join(folder, "hpc_ckpt_*.ckpt")))
    return any(Path(folder).glob("hpc_ckpt_*.ckpt"))


def check_folder(folder: str, *, goes_on: bool) -> None:
    """Check that a fit does not replace files of another run.

    `goes_on` is true if the fit resumes the run in this folder.
    """
    files = get_filesystem(folder)
    is_of_a_run = {CONFIGURATION: _is_written_configuration, RECORD: TrainingRecord.is_one}
    refused = []
    for name, is_written in is_of_a_run.items():
        path = str(join_location(folder, name))
        if files.exists(path) and not (goes_on and is_written(files.cat_file(path))):
            refused.append(name)
    if refused:
        raise InputError(
            f"{folder.rstrip('/')} already contains {' and '.join(refused)}, and a new run would replace "
            f"{'it' if len(refused) == 1 else 'them'}. Give the run another folder (name and version of its logger), or "
            "resume the earlier run with --ckpt_path."
        )


def _is_written_configuration(content: bytes) -> bool:
    # Lightning's parser writes this first line.
    return content.startswith(b"# lightning.pytorch==")


class ConfigKeeper(SaveConfigCallback):
    """Writes the configuration of a run to its folder, without replacing another configuration.

    Without a logger nothing is written. A test logged to the folder of a fit does not change its configuration. If a
    resumed fit has another configuration, the earlier one is renamed.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration if the run has a folder."""
        if self.already_saved or not trainer.loggers:
            return
        self.already_saved = True
        refusal = ""
        if trainer.is_global_zero:
            try:
                self._keep(trainer, stage)
            except ValueError as error:
                refusal = str(error)
        refusal = trainer.strategy.broadcast(refusal)
        if refusal:
            raise InputError(refusal)

    def _keep(self, trainer: Trainer, stage: str) -> None:
        # `Trainer.log_dir` is one folder for all runs with some loggers, but this folder is specific to the run.
        folder = run_folder(trainer)
        if stage == "fit":
            check_folder(folder, goes_on=_goes_on(trainer, self.config))
        files = get_filesystem(folder)
        path = str(join_location(folder, CONFIGURATION))
        content = self.parser.dump(self.config, skip_none=False).encode()
        if files.exists(path):
            if stage != "fit" or files.cat_file(path) == content:
                return
            numbered = (f"config-{number}.yaml" for number in itertools.count(1))
            free_name = next(name for name in numbered if not files.exists(str(join_location(folder, name))))
            files.mv(path, str(join_location(folder, free_name)))
            print(f"The earlier configuration was renamed to {free_name}.")
        files.makedirs(folder, exist_ok=True)
        files.pipe_file(path, content)


def keeps_a_run(trainer: Trainer) -> bool:
    """Return whether a run has a folder: it has a logger and is not a `fast_dev_run`."""
    return bool(trainer.loggers) and not trainer.fast_dev_run  # type: ignore[attr-defined]


class Recorder(Callback):
    """Writes the record of a fit, and stores the checkpoints of an interrupted fit."""

    # message about the checkpoints of an interrupted fit
    sentence = ""
    # the checkpoint that a failed run had loaded; None without a checkpoint
    checkpoint: str | PathLike[str] | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the progress of the run."""
        self._write(trainer, pl_module, trainer.current_epoch + 1, ended=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write that the run has ended."""
        self._write(trainer, pl_module, trainer.current_epoch, ended=True)

    def _write(self, trainer: Trainer, pl_module: LightningModule, epochs: int, *, ended: bool) -> None:
        head = pl_module.hparams.get("head")
        if trainer.is_global_zero and keeps_a_run(trainer):
            head_name = head if isinstance(head, str) else None
            record = TrainingRecord(epochs, trainer.global_step, trainer.max_epochs, ended, head_name)
            record.save(as_location(run_folder(trainer)))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Store the loaded checkpoint, and the checkpoints of an interrupted fit."""
        self.checkpoint = trainer.ckpt_path
        if trainer.state.fn != "fit":
            return
        files = [
            getattr(checkpoint, f"{which}_model_path", "")
            for checkpoint in trainer.checkpoint_callbacks
            for which in ("best", "last")
        ]
        checkpoints = list(dict.fromkeys(file for file in files if file and is_file(file)))
        self.sentence = "No checkpoint was saved: the first one is written after a validation."
        if checkpoints:
            self.sentence = f"Saved: {' and '.join(checkpoints)}. To resume, pass --ckpt_path {checkpoints[-1]}."


def run(arguments: Sequence[str]) -> None:
    """Run `fit`, `validate` or `test` with its options, and print where a fit is saved."""
    trainer = command(arguments).trainer
    if arguments[:1] == ["fit"] and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        print(where_it_is_kept(trainer))


def command(arguments: Sequence[str]) -> FewshotCLI:
    """Run `fit`, `validate` or `test`, and return the CLI.

    A KeyboardInterrupt, also after SIGTERM, names the checkpoints of a fit.
    """
    words = with_paths(["--help" if word == "--help=full" else word for word in arguments])
    earlier_words = sys.argv
    # LightningCLI reads `sys.argv`, and starts further processes with it.
    sys.argv = [sys.argv[0], *words]
    recorder = Recorder()
    has_own_model = names_a_model(words)
    try:
        if words[:1] != ["fit"]:
            # No checkpoint is saved. The filter is not removed, since the process ends with the command.
            warnings.filterwarnings("ignore", "The dirpath has changed")
        return FewshotCLI(
            LightningModule if has_own_model else ProtoNet,
            LightningDataModule,
            subclass_mode_model=has_own_model,
            subclass_mode_data=True,
            seed_everything_default=0,
            parser_class=FewshotParser,
            trainer_defaults={"callbacks": recorder},
            parser_kwargs={"prog": "fewshot", "exit_on_error": False}
            | {command: {"default_config_files": [str(DEFAULTS)]} for command in ("fit", "validate", "test")},
            save_config_callback=ConfigKeeper,
        )
    except MisconfigurationException as error:
        raise InputError(str(error)) from error
    except RuntimeError as error:
        # PyTorch's message for weights that do not fit. Any other RuntimeError is not a user error.
        if "loading state_dict" not in str(error):
            raise
        mismatch = textwrap.shorten(str(error).partition("\n")[2], 300, placeholder=" ...")
        fix = "Pass the config.yaml of its run with --config."
        subject = "The checkpoint" if recorder.checkpoint is None else f"The checkpoint {recorder.checkpoint}"
        raise InputError(f"{subject} contains the weights of another network: {mismatch} {fix}") from error
    except SystemExit as stop:
        raise signal_behind(stop, recorder.sentence) from None
    finally:
        sys.argv = earlier_words


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's messages about hardware and workers."""
    earlier_level = logging.root.manager.disable  # blocks may be nested
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        for words in ("does not have many workers", "Checkpoint directory", "LeafSpec", "GPU available but not used"):
            warnings.filterwarnings("ignore", f".*{words}")
        # `python -W` requests warnings.
        if not sys.warnoptions:
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
        try:
            yield
        finally:
            logging.disable(earlier_level)


def signal_behind(stop: SystemExit, text: str = "") -> BaseException:
    """Return the interrupt that made Lightning exit, with a text; without one, the exit.

    Lightning exits with 0 after SIGTERM, so Slurm and Kubernetes would consider the run complete.
    """
    if isinstance(stop, SIGTERMException):
        return Terminated(text)
    return KeyboardInterrupt(text) if isinstance(stop.__context__, KeyboardInterrupt) else stop


def with_paths(arguments: Sequence[str]) -> list[str]:
    """Return the words with paths instead of the names of bundled configurations and instead of addresses.

    `--config protonet_dr_folder` becomes the path of this configuration, and `--config s3://bucket/run/config.yaml` the path
    of a local copy.
    """
    joined = ("--config=", "-c=")
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith(joined) else [word])]
    # Code that explains mistakes only knows `--config`.
    words = ["--config" if word == "-c" else word for word in words]
    known = configurations()
    for place, word in _configured(words):
        if is_address(word):
            words[place] = str(local_copy(word))
            continue
        if not word or Path(word).suffix in (".yaml", ".yml", ".json") or Path(word).is_file():
            continue  # a missing file is reported with the other mistakes
        if word not in known:
            hint = did_you_mean(word, known) or f" Pass a file, or one of {', '.join(sorted(known))}."
            raise InputError(f"{word} is neither a file nor the name of a bundled configuration.{hint}")
        words[place] = str(known[word])
    return words


def _configured(words: Sequence[str]) -> list[tuple[int, str]]:
    """Return the index and the value of each `--config`."""
    return [(i, word) for i, word in enumerate(words) if i and words[i - 1] in ("-c", "--config")]


def names_a_model(words: Sequence[str]) -> bool:
    """Return whether a configuration or an option sets the class of the model."""
    models = [_model_of(Path(file)) for _, file in _configured(words)]
    return any(word.partition("=")[0] in ("--model", "--model.class_path") for word in words) or any(
        isinstance(model, Mapping) and "class_path" in model for model in models
    )


def _model_of(file: Path) -> Any:
    """Return the model of a configuration; None if the file does not exist."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError:  # a missing file is reported with the other mistakes
        return None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{file} is damaged: it is not valid YAML ({cause}). Pass another configuration.") from error
    if _holds_itself(content):
        raise InputError(
            f"{file} is damaged: it contains an alias, such as *name, inside the part that it refers to. Write out the part."
        )
    if not isinstance(content, Mapping):
        raise InputError(
            f"{file} is not a configuration. It must contain settings for model, data and trainer, by name."
        )
    return content.get("model")


def _holds_itself(content: Any, around: Sequence[int] = ()) -> bool:
    """Return whether a part is an alias of an enclosing part, which jsonargparse would read forever.

    `around` contains the ids of the enclosing parts.
    """
    if id(content) in around:
        return True
    parts = content.values() if isinstance(content, Mapping) else content if isinstance(content, list) else ()
    return any(_holds_itself(part, (*around, id(content))) for part in parts)


def where_it_is_kept(trainer: Trainer) -> str:
    """Return lines with the run's folder, its best checkpoint, and the command that tests it."""
    lines = []
    configuration: Location | None = None
    if keeps_a_run(trainer):
        folder = run_folder(trainer)
        configuration = join_location(folder, CONFIGURATION)
        lines.append(f"The run was saved to {folder}.")
    checkpoints: Any = trainer.checkpoint_callback
    best_path = getattr(checkpoints, "best_model_path", "")
    if not best_path:
        return "\n".join(lines)
    score = checkpoints.best_model_score
    value = "" if score is None else f" ({checkpoints.monitor} {float(score):.4f})"
    lines.append(f"Best checkpoint: {best_path}{value}")
    if configuration is not None and is_file(configuration):
        lines.append(f"Test it: fewshot test --config {configuration} --ckpt_path {best_path}")
    return "\n".join(lines)
