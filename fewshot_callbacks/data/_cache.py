"""Keeps drawn data sets in files of the user's cache folder."""

import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import torch


def cache_folder() -> Path:
    """The folder that the environment variable FEWSHOT_CALLBACKS_CACHE names, else the user's cache folder."""
    return Path(os.environ.get("FEWSHOT_CALLBACKS_CACHE") or platformdirs.user_cache_dir("fewshot_callbacks"))


AnyDrawing = TypeVar("AnyDrawing")


def load_or_draw(file: Path, drawing: type[AnyDrawing], noun: str, draw: Callable[[], AnyDrawing]) -> AnyDrawing:
    """Load a drawing from its file; where that is missing or damaged, draw it and write the file.

    Args:
        file: File of the drawing, in the cache folder.
        drawing: A class whose attributes are tensors, numbers, words, and tuples of them.
        noun: One item, for the warnings about a file that cannot be read or written.
        draw: Makes the drawing.
    """
    try:
        return drawing(**torch.load(file, weights_only=True))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as error:  # torch.load promises no class of error for a damaged file
        warnings.warn(f"The {noun} cache {file} cannot be read ({error!r:.200}). Drawing it again.", stacklevel=3)
    drawn = draw()
    try:
        _save_whole(dict(vars(drawn)), file)
    except OSError as error:
        warnings.warn(
            f"The {noun}s cannot be kept in {file.parent} ({error}), so they are drawn each time, which takes a while. "
            "Name a folder that can be written in the environment variable FEWSHOT_CALLBACKS_CACHE.",
            stacklevel=3,
        )
    return drawn


def _save_whole(content: dict[str, Any], file: Path) -> None:
    """Write to a temporary file beside the target, then rename it, so that no other process reads half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        torch.save(content, unfinished)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
