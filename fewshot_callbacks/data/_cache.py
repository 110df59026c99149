"""Where prepared data sets are kept, and how a file is written there."""

import os
import secrets
from pathlib import Path
from typing import Any

import platformdirs
import torch


def cache_folder() -> Path:
    """The folder that the environment variable FEWSHOT_CALLBACKS_CACHE names, else the user's cache folder."""
    return Path(os.environ.get("FEWSHOT_CALLBACKS_CACHE") or platformdirs.user_cache_dir("fewshot_callbacks"))


def save_whole(content: dict[str, Any], file: Path) -> None:
    """Write to a file of our own beside the target, then rename: nobody ever reads half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        torch.save(content, unfinished)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
