"""Shows figures in every logger of the Trainer, and points and texts in TensorBoard."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer, loggers
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from fewshot_callbacks.callbacks._conduct import FailurePolicy
from fewshot_callbacks.files.outputs import SEARCHED_BYTES, WRITER, is_picture_content
from fewshot_callbacks.trainer.logs import run_folder
from fewshot_callbacks.trainer.side_effects import preserved_random_states

# A figure, or what draws it when it is needed.
Drawing = Figure | Callable[[], Figure]


def log_figures(trainer: Trainer, figures: Mapping[str, Drawing], policy: FailurePolicy) -> None:
    """Show figures in every logger of a Trainer; the first rank alone draws them.

    Where a logger has no pictures (`CSVLogger`, no logger, one that is not Lightning's own), or does not take one, it is
    written to `pictures/<name>/step=<step>.png` in the folder of the run, where it replaces no file that this package has
    not written. A figure that cannot be drawn or shown never ends the run.

    Args:
        trainer: The Trainer that runs.
        figures: Name -> figure, or a function that draws it. Of a name, letters, digits, `_`, `-`, `.`, spaces and
            slashes stay, which every logger takes; each other character becomes `_`.
        policy: Warns of failures, once for each logger and kind of error.
    """
    if not trainer.is_global_zero:
        return
    with preserved_random_states():
        for key, drawing in figures.items():
            name = _accepted(key)
            with policy.going_on("drawing", f"The picture {name!r} could not be drawn"):
                image = _pixels(drawing)
                for logger in _destinations(trainer):
                    _show(trainer, logger, name, image, policy)


def log_embedding(
    trainer: Trainer,
    name: str,
    vectors: Float[Tensor, "item dim"],
    columns: Mapping[str, Sequence[object]],
    policy: FailurePolicy,
    images: Float[Tensor, "item 3 side side"] | None = None,
) -> None:
    """Show points in TensorBoard's projector; other loggers have none and receive nothing.

    Args:
        trainer: The Trainer that runs.
        name: Name of the set of points.
        vectors: The points.
        columns: Heading -> a value for each point. The projector colours by columns of at most 50 words.
        policy: Warns of failures, once for each kind of error.
        images: A square picture of each point, in [0, 1].
    """
    headings = list(columns)
    # TensorBoard keeps them in a table where a tab ends a column and a line break a row.
    rows = [[re.sub(r"\s", " ", str(word)) for word in row] for row in zip(*columns.values(), strict=True)]
    # a table of one column has no heading in TensorBoard
    metadata = [row[0] for row in rows] if len(headings) == 1 else rows

    for logger in _destinations(trainer) if trainer.is_global_zero else ():
        if not _is(logger, "TensorBoardLogger"):
            continue
        owner = type(logger).__name__
        with policy.going_on(f"{owner}, points", f"{owner} did not take the points {name!r}"):
            points, header = vectors.detach().cpu().float(), headings if len(headings) > 1 else None
            logger.experiment.add_embedding(points, metadata or None, images, _step(trainer), _accepted(name), header)


# ------------------------------------------------------------------------------------------------------------- adapters


def _litlogger(logger: Any, name: str, image: Image.Image, step: int) -> None:
    from litlogger import Image as LitImage  # noqa: PLC0415 - only who uses the logger has the package

    logger.experiment[name].append(LitImage(image), step=step)


# Logger of `lightning.pytorch.loggers` -> how it takes a picture. No package is imported before its logger is in use.
ADAPTERS: dict[str, Callable[[Any, str, Image.Image, int], None]] = {
    "TensorBoardLogger": lambda logger, name, image, step: logger.experiment.add_image(
        name, np.asarray(image), step, dataformats="HWC"
    ),
    "WandbLogger": lambda logger, name, image, step: logger.log_image(name, [image], step=step),
    "MLFlowLogger": lambda logger, name, image, step: logger.experiment.log_image(
        logger.run_id, image, key=name, step=step
    ),
    "CometLogger": lambda logger, name, image, step: logger.experiment.log_image(image, name=name, step=step),
    "LitLogger": _litlogger,
}

# ------------------------------------------------------------------------------------------------------ private helpers


def _show(trainer: Trainer, logger: Any, name: str, image: Image.Image, policy: FailurePolicy) -> None:
    """Show a picture in one logger, or else write it to a file."""
    step = _step(trainer)
    adapter = next((show for kind, show in ADAPTERS.items() if _is(logger, kind)), None)
    owner, file = type(logger).__name__, os.path.join("pictures", name, f"step={step:06d}.png")
    if adapter is not None:
        fact, remedy = f"{owner} did not take the picture {name!r}", f"See {file} in the folder of the run instead."
        with policy.going_on(f"{owner}, pictures", fact, remedy):
            adapter(logger, name, image, step)
            return
    # Also reached where the logger has raised: that was made a warning, and the picture is not lost.
    remedy = "Make room there, or choose another folder, such as Trainer(default_root_dir='runs')."
    with policy.going_on(f"{owner}, files", f"The picture {file} could not be written", remedy):
        path = os.path.join(run_folder(trainer, logger), file)
        # The folder of a run may be in a bucket as well as on a disk.
        files = get_filesystem(path)
        files.makedirs(os.path.dirname(path), exist_ok=True)
        if files.exists(path) and not is_picture_content(files.read_block(path, 0, SEARCHED_BYTES)):
            raise FileExistsError(f"{path} is a file that this package has not written")
        mark = PngInfo()
        mark.add_text("Software", WRITER)
        with files.open(path, "wb") as opened:
            image.save(opened, "PNG", pnginfo=mark)


def _destinations(trainer: Trainer) -> list[Any]:
    """The loggers of a Trainer, or a None that stands for a file; nothing in a `fast_dev_run`, which leaves no trace."""
    fast: Any = trainer.fast_dev_run  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    return [] if fast else list(trainer.loggers) or [None]


def _is(logger: Any, kind: str) -> bool:
    """Whether a logger is of a class that Lightning may or may not have: `LitLogger` is new in 2.6."""
    return isinstance(logger, getattr(loggers, kind, ()))


def _step(trainer: Trainer) -> int:
    # what Lightning takes, so that a picture stands at the step of its metrics
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _accepted(name: str) -> str:
    """A name that every logger takes for a picture, and every file system for a path."""
    parts = re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII).split("/")
    # A part of dots alone, such as `..`, would lead out of the folder.
    return "/".join(part for part in parts if part.strip(". "))


def _pixels(drawing: Drawing) -> Image.Image:
    figure = drawing() if callable(drawing) else drawing
    # Drawn once for all loggers, of which each would draw the figure again.
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")
