"""Warnings at the line of the user's own code."""

from __future__ import annotations

import sys
import warnings

from fewshot_callbacks.trainer.lightning import PACKAGE, PACKAGE_IN_SIGHT, rank_zero_only
from fewshot_callbacks.trainer.lightning_package import imported_packages

# Packages whose functions may stand between the line of a user, such as `trainer.fit(...)`, and a warning.
_BETWEEN = (
    "contextlib",
    "functools",
    "fewshot_callbacks",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
)


@rank_zero_only
def warn(words: str) -> None:
    """Warn on the first rank, whether or not Python has shown the same words before, at the line of the user's own code.

    `warnings.warn` notes in the calling module what it has shown, and does not show it again in the same process, so that
    a second fit in a notebook would say nothing. `warn_explicit` without such a record shows it. Filters apply as usual.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    warnings.warn_explicit(words, UserWarning, frame.f_code.co_filename, frame.f_lineno, module)


def warn_of_other_package(owner: str) -> None:
    """Warn that a class is not one of `pytorch_lightning`, if that was imported too late to be known here.

    Args:
        owner: Name of the class, a module or a data module.
    """
    if PACKAGE_IN_SIGHT is None and imported_packages() != [PACKAGE]:
        warn(
            f"{owner} is a class of {PACKAGE}, since pytorch_lightning was imported after fewshot_callbacks; a Trainer of "
            "pytorch_lightning does not take it. Import pytorch_lightning first, or use the Trainer of lightning.pytorch."
        )
