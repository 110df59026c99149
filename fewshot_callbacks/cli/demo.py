"""`fewshot demo`: two heads and soft AP trained on the glyphs, watched, and compared on unseen classes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from fewshot_callbacks import __version__
from fewshot_callbacks.cli._options import WHOLE, OneLineErrors

MARKER, UNFINISHED = "results.json", "unfinished.json"
Trained = Literal["softmax", "dr", "soft_ap"]
TRAINED: tuple[Trained, ...] = ("softmax", "dr", "soft_ap")
TITLES = {"random": "random", "softmax": "softmax", "dr": "DR", "soft_ap": "soft AP"}


def parser() -> ArgumentParser:
    """Make the options of `fewshot demo`."""
    options = OneLineErrors(
        prog="fewshot demo",
        description=(
            "Train two prototypical networks (softmax head, distance-ratio head) and a network with average precision "
            "as the loss, on characters drawn in many typefaces, and compare them with random weights on unseen "
            "classes. Writes curves, logs and checkpoints."
        ),
    )
    options.add_argument(
        "--output", type=Path, default=Path("demo"), help="folder to write; an earlier demo is replaced"
    )
    options.add_argument("--epochs", type=WHOLE, default=4, help="training epochs of each network")
    options.add_argument("--episodes", type=WHOLE, default=40, help="training episodes, or batches, in an epoch")
    options.add_argument("--test_episodes", type=WHOLE, default=600, help="episodes of the comparison")
    options.add_argument("--seed", type=WHOLE, default=0, help="seed of weights, episodes and augmentation")
    options.add_argument(
        "--accelerator",
        type=str,
        default="auto",
        help="device to train on, as Lightning's Trainer names it: auto, cpu, gpu or mps",
    )
    return options


def run(arguments: Sequence[str]) -> None:
    """Run the demo."""
    options = parser().parse_args(list(arguments))
    from fewshot_callbacks.cli._demo_run import train_and_compare  # noqa: PLC0415 - Lightning, which the help does not need

    settings = {name: value for name, value in options.as_dict().items() if name != "output"}
    with quiet_lightning(), replaced_folder(options.output, settings) as folder:
        compared = train_and_compare(options, folder)
    compared.show(options.output)


def trained_in(folder: Path) -> dict[str, str]:
    """Read which networks an interrupted demo has trained, and the file of the best weights of each."""
    try:
        trained: dict[str, str] = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return trained


def note_trained(folder: Path, name: str, weights: str) -> None:
    """Note that a network is trained."""
    (folder / UNFINISHED).write_text(json.dumps(trained_in(folder) | {name: weights}), encoding="utf-8")


@contextmanager
def replaced_folder(target: Path, settings: Mapping[str, Any]) -> Iterator[Path]:
    """Make a folder that replaces `target` on success.

    It is removed on failure. After an interrupt it stays if a network in it is trained, and the next demo with the same
    settings goes on in it.

    Raises:
        ValueError: If `target` holds something that no demo has written.
        KeyboardInterrupt: The demo was interrupted; says what is kept.
    """
    target = target.resolve()
    if target.exists() and not (target / MARKER).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} holds files that no demo has written. Choose another --output.")
    target.parent.mkdir(parents=True, exist_ok=True)
    what = json.dumps({"version": __version__, **settings}, sort_keys=True, default=str)
    kept = target.with_name(f"{target.name}.incomplete-{hashlib.sha256(what.encode()).hexdigest()[:12]}")
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.incomplete-", dir=target.parent))
    with suppress(OSError):  # one process alone can rename what is kept
        folder.rmdir()
        kept.rename(folder)
    folder.mkdir(exist_ok=True)
    try:
        yield folder
        (folder / UNFINISHED).unlink(missing_ok=True)
        if target.exists():
            shutil.rmtree(target)
        folder.chmod(0o755)
        os.replace(folder, target)
    except KeyboardInterrupt as stop:
        trained = [TITLES[name] for name in trained_in(folder)]
        if not trained:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
        raise type(stop)(
            f"Kept in {kept}: {', '.join(trained)}, trained. The same command goes on from there."
        ) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's remarks about hardware and workers off the screen of the demo."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for words in (
            ".*does not have many workers.*",
            ".*Checkpoint directory.*",
            ".*The dirpath has changed.*",  # of networks that an interrupted demo has trained
            ".*LeafSpec.*",
            ".*GPU available but not used.*",
        ):
            warnings.filterwarnings("ignore", words)
        if not sys.warnoptions:
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
