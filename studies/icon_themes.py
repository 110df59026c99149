"""Makes the icons of examples/icons importable for the studies in this folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from icons import IconThemes
from icons.augmentation import on_white

__all__ = ["IconThemes", "on_white"]
