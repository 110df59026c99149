"""The names of Lightning that this package uses, of the one of its two packages that the user's process works with.

No other module of `callbacks`, `protonet`, `data` and `trainer` imports Lightning. The command `fewshot` always works with
`lightning`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fewshot_callbacks.trainer.lightning_package import MODULES, imported_packages, package_in_sight

PACKAGE_IN_SIGHT = package_in_sight()
# Without a sign, that of the documentation.
PACKAGE = PACKAGE_IN_SIGHT or "lightning"

if TYPE_CHECKING or PACKAGE == "lightning":
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.pytorch import Callback as LightningCallback
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from pytorch_lightning import Callback as LightningCallback
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_only
    from pytorch_lightning.utilities.seed import isolate_rng

__all__ = [
    "PACKAGE",
    "PACKAGE_IN_SIGHT",
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "get_filesystem",
    "is_of_class",
    "isolate_rng",
    "rank_zero_info",
    "rank_zero_only",
]


class Callback(LightningCallback):
    """A callback of both packages: also of the one that is imported after this module, but before the callback is made.

    A Trainer before 2.6 refuses callbacks that are not of its own package.
    """

    def __new__(cls, *arguments: Any, **settings: Any) -> Any:
        """Make the class a subclass of `Callback` of each package that the process has imported."""
        imported = [sys.modules[MODULES[package]] for package in imported_packages()]
        for package in imported:
            # Python looks for methods in the classes of `LightningCallback` first.
            if not issubclass(Callback, package.Callback):
                Callback.__bases__ += (package.Callback,)
        return super().__new__(cls)


def is_of_class(value: Any, name: str) -> bool:
    """Return whether a value is of the class of this name, of either package, or of a class derived from it."""
    packages = ("lightning", "lightning_fabric", "pytorch_lightning")
    return any(base.__name__ == name and base.__module__.partition(".")[0] in packages for base in type(value).__mro__)
