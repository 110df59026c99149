"""Warnings that point to the line of the user's code."""

from __future__ import annotations

import inspect
import warnings

from fewshot_callbacks.trainer.lightning import IS_CHOSEN_BY_USER, PACKAGE, imported_packages, rank_zero_only

# Packages whose frames may be between the user's line, such as `trainer.fit(...)`, and a warning.
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
    """Warn on the first rank at the line of the user's code, even if Python has shown the same text before.

    `warnings.warn` records in the calling module what it has shown, so a second fit in a notebook would not warn.
    `warn_explicit` without such a record does. Filters apply as usual.
    """
    # The number of Lightning's frames between here and the user's line is unknown, so `stacklevel` cannot be used. From
    # Python 3.12 on, `skip_file_prefixes` can.
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    line = inspect.getframeinfo(frame, context=0)
    warnings.warn_explicit(words, UserWarning, line.filename, line.lineno, module)


def warn_of_other_package(owner: str) -> None:
    """Warn that a class is not a class of `pytorch_lightning`, if that package was imported too late.

    Args:
        owner: Name of the class, a module or a data module.
    """
    if not IS_CHOSEN_BY_USER and imported_packages() != [PACKAGE]:
        warn(
            f"{owner} is a class of lightning.pytorch, because pytorch_lightning was imported after fewshot_callbacks. A "
            "Trainer of pytorch_lightning refuses it. If you use that Trainer, import pytorch_lightning before "
            "fewshot_callbacks, and write `# isort: split` between the two imports, so that isort and ruff keep the order. "
            "If you use the Trainer of lightning.pytorch, import lightning.pytorch before fewshot_callbacks."
        )
