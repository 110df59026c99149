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
    """Show figures in every logger of a Trainer. Every rank may call it; the first rank alone draws.

    Where a logger has no pictures (`CSVLogger`, no logger, one that is not Lightning's own), or does not take one, it is
    written to `pictures/<name>/step=<step>.png` in the folder of the run, where it replaces no file that this package has
    not written. A figure that cannot be drawn or shown never ends the run.

    Args:
        trainer: The Trainer that runs.
        figures: Name -> figure, or a function that draws it. In names, each character that some logger refuses becomes `_`:
            all but letters, digits, `_`, `-`, `.`, spaces and slashes.
        policy: Warns of failures, once for each logger and kind of error.
    """
    if not trainer.is_global_zero:
        return
    with preserved_random_states():
        for key, drawing in figures.items():
            name = _valid_name(key)
            with policy.going_on("drawing", f"The picture {name!r} could not be drawn"):
                image = _draw(drawing)
                for logger in _loggers_or_file(trainer):
                    _show(trainer, logger, name, image, policy)


def log_embedding(
    trainer: Trainer,
    name: str,
    vectors: Float[Tensor, "item dim"],
    columns: Mapping[str, Sequence[object]],
    policy: FailurePolicy,
    images: Float[Tensor, "item 3 side side"] | None = None,
) -> None:
    """Show points in TensorBoard's projector. Other loggers have no such view and receive nothing.

    Args:
        trainer: The Trainer that runs.
        name: Name of the set of points.
        vectors: The points.
        columns: Heading -> a value for each point. The projector colours by columns of at most 50 words.
        policy: Warns of failures, once for each kind of error.
        images: A square picture of each point, in [0, 1].
    """
    if not trainer.is_global_zero:
        return
    # TensorBoard writes a table in which a tab ends a cell and a line break ends a row.
    rows = [[re.sub(r"\s", " ", str(word)) for word in row] for row in zip(*columns.values(), strict=True)]
    metadata: list[Any] = rows
    header: list[str] | None = list(columns)
    if len(columns) <= 1:
        # A table of one column has no heading in TensorBoard.
        metadata = [row[0] for row in rows]
        header = None
    for logger in _loggers_or_file(trainer):
        if not _is(logger, "TensorBoardLogger"):
            continue
        logger_name = type(logger).__name__
        with policy.going_on(f"{logger_name}, points", f"{logger_name} did not take the points {name!r}"):
            points = vectors.detach().cpu().float()
            logger.experiment.add_embedding(points, metadata or None, images, _step(trainer), _valid_name(name), header)


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
    """Show a picture in one logger. Write it to a file if the logger has no pictures, or raises."""
    step = _step(trainer)
    logger_name = type(logger).__name__
    file = os.path.join("pictures", name, f"step={step:06d}.png")
    adapter = next((show for class_name, show in ADAPTERS.items() if _is(logger, class_name)), None)
    if adapter is not None:
        fact = f"{logger_name} did not take the picture {name!r}"
        remedy = f"See {file} in the folder of the run instead."
        with policy.going_on(f"{logger_name}, pictures", fact, remedy):
            adapter(logger, name, image, step)
            return
    # After an error of the logger, which is now a warning, the code goes on here.
    remedy = "Make room there, or choose another folder, such as Trainer(default_root_dir='runs')."
    with policy.going_on(f"{logger_name}, files", f"The picture {file} could not be written", remedy):
        _write(image, os.path.join(run_folder(trainer, logger), file))


def _write(image: Image.Image, path: str) -> None:
    """Write a picture to a file, on a disk or in a bucket, unless it holds something else than a picture of this package.

    Raises:
        FileExistsError: If it does.
    """
    files = get_filesystem(path)
    files.makedirs(os.path.dirname(path), exist_ok=True)
    if files.exists(path) and not is_picture_content(files.read_block(path, 0, SEARCHED_BYTES)):
        raise FileExistsError(f"{path} is a file that this package has not written")
    mark = PngInfo()
    mark.add_text("Software", WRITER)
    with files.open(path, "wb") as stream:
        image.save(stream, "PNG", pnginfo=mark)


def _loggers_or_file(trainer: Trainer) -> list[Any]:
    """Return the loggers of a Trainer; without any a None, which means a file; in a `fast_dev_run` nothing."""
    fast_dev_run: Any = trainer.fast_dev_run  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    if fast_dev_run:
        return []
    return list(trainer.loggers) or [None]


def _is(logger: Any, class_name: str) -> bool:
    """Return whether a logger is of this class, which Lightning may not have: `LitLogger` is new in 2.6."""
    return isinstance(logger, getattr(loggers, class_name, ()))


def _step(trainer: Trainer) -> int:
    """Return the step at which Lightning logs the metrics of this validation, so that pictures stand beside them."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _valid_name(name: str) -> str:
    """Return a name that every logger accepts for a picture, and every file system for a path."""
    parts = re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII).split("/")
    # A part of dots alone, such as `..`, would lead out of the folder.
    return "/".join(part for part in parts if part.strip(". "))


def _draw(drawing: Drawing) -> Image.Image:
    """Return the pixels of a figure; drawn once for all loggers, each of which would draw the figure again."""
    figure = drawing() if callable(drawing) else drawing
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")
