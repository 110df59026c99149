"""The Lightning names that this package uses, from one of the two packages `lightning` and `pytorch_lightning`.

Both packages have classes with the same names, but Python treats them as different classes. No other module of
`callbacks`, `protonet`, `data` and `trainer` imports Lightning. The command `fewshot` always uses `lightning`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# Name of a package -> the module of its Trainer. The default package comes first.
MODULES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def imported_packages() -> list[str]:
    """Return which of the two packages this process has imported so far."""
    return [package for package, module in MODULES.items() if sys.modules.get(module) is not None]


def _choose_package() -> str:
    """Return the package whose classes this process uses.

    An imported package comes before an installed one, and `lightning` before `pytorch_lightning`.
    """
    installed = [package for package in MODULES if find_spec(package) is not None]
    return [*imported_packages(), *installed, "lightning"][0]


# Whether the user chose a package by importing it first.
IS_CHOSEN_BY_USER = bool(imported_packages())
PACKAGE = _choose_package()

if TYPE_CHECKING or PACKAGE == "lightning":
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_only
    from pytorch_lightning.utilities.seed import isolate_rng

__all__ = [
    "IS_CHOSEN_BY_USER",
    "PACKAGE",
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "get_filesystem",
    "imported_packages",
    "is_of_class",
    "isolate_rng",
    "rank_zero_info",
    "rank_zero_only",
]


def is_of_class(value: Any, name: str) -> bool:
    """Return whether a value is an instance of the class with this name in either package."""
    packages = ("lightning", "lightning_fabric", "pytorch_lightning")
    return any(base.__name__ == name and base.__module__.partition(".")[0] in packages for base in type(value).__mro__)
