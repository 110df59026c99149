"""The icons, which are an example, where the studies beside this file find them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from icons import IconThemes
from icons.augmentation import on_white

__all__ = ["IconThemes", "on_white"]
