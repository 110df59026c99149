"""Sends figures to every logger of the Trainer, and points to TensorBoard's projector."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from fewshot_callbacks.callbacks._conduct import FailurePolicy
from fewshot_callbacks.files.outputs import SEARCHED_BYTES, WRITER, is_picture_content
from fewshot_callbacks.trainer.lightning import Trainer, get_filesystem, is_of_class, rank_zero_info
from fewshot_callbacks.trainer.logs import run_folder
from fewshot_callbacks.trainer.side_effects import preserved_random_states

# a figure, or a function that draws it when a logger needs it
Drawing = Figure | Callable[[], Figure]


def log_figures(trainer: Trainer, figures: Mapping[str, Drawing], policy: FailurePolicy) -> None:
    """Send figures to every logger of a Trainer. Only the first rank draws.

    A logger shows figures with `log_image(key, images, step)`, with a TensorBoard writer, or as Lightning's logger for
    MLflow, Comet or LitLogger. If it cannot (`CSVLogger`), fails, or does not exist, a figure is written to
    `pictures/<name>/step=<step>.png` in the folder of the run. It only replaces files that this package has written. An
    error never ends the run. All characters in names but letters, digits, `_`, `-`, `.`, spaces and slashes become `_`,
    because some logger refuses them.
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
    """Send points to TensorBoard's projector, for loggers with a TensorBoard writer. Other loggers receive nothing.

    The projector can colour by columns with at most 50 different values. `images` are in [0, 1].
    """
    if not trainer.is_global_zero:
        return
    # In TensorBoard's table a tab ends a cell, and a line break ends a row.
    rows = [[re.sub(r"\s", " ", str(word)) for word in row] for row in zip(*columns.values(), strict=True)]
    metadata: list[Any] = rows
    header: list[str] | None = list(columns)
    if len(columns) <= 1:
        # TensorBoard shows no heading for a table of one column.
        metadata = [row[0] for row in rows]
        header = None
    for logger in _loggers_or_file(trainer):
        writer = _writer_of(logger, "add_embedding")
        if writer is None:
            continue
        logger_name = type(logger).__name__
        with policy.going_on(f"{logger_name}, points", f"{logger_name} refused the points {name!r}"):
            points = vectors.detach().cpu().float()
            writer.add_embedding(points, metadata or None, images, _step(trainer), _valid_name(name), header)


def tell_of_files(trainer: Trainer) -> None:
    """Log which loggers cannot show pictures, and that pictures become files."""
    if not trainer.is_global_zero:
        return
    without_pictures = [logger for logger in _loggers_or_file(trainer) if _display_of(logger) is None]
    if not without_pictures:
        return
    names = [type(logger).__name__ for logger in without_pictures if logger is not None]
    reason = f"{' and '.join(names)} cannot show them" if names else "the Trainer has no logger"
    rank_zero_info(
        f"Pictures are written to pictures/<name>/step=<step>.png in the folder of the run: {reason}. TensorBoardLogger and "
        "WandbLogger show them, and so does every logger with a method log_image(key, images, step)."
    )


# ------------------------------------------------------------------------------------------------------------- displays

# A function of (logger, name, image, step) that shows a picture.
Display = Callable[[Any, str, Image.Image, int], None]


def _display_of(logger: Any) -> Display | None:
    """Return the function that shows a picture in a logger; None if there is none."""
    if _has_log_image(logger):
        return _show_by_log_image
    for class_name, display in DISPLAYS.items():
        if is_of_class(logger, class_name):
            return display
    return _show_in_tensorboard if _writer_of(logger, "add_image") is not None else None


def _has_log_image(logger: Any) -> bool:
    """Return whether a logger has a method `log_image(key, images, step)`, as the loggers of W&B and SwanLab do."""
    method = getattr(logger, "log_image", None)
    return callable(method) and {"key", "images", "step"} <= signature(method).parameters.keys()


def _writer_of(logger: Any, method: str) -> Any:
    """Return the TensorBoard writer of a logger; None if its `experiment` lacks the method, or raises an error."""
    try:
        experiment = getattr(logger, "experiment", None)
    except Exception:  # a property of the user's logger
        return None
    return experiment if hasattr(experiment, method) else None


def _show_by_log_image(logger: Any, name: str, image: Image.Image, step: int) -> None:
    logger.log_image(key=name, images=[image], step=step)


def _show_in_tensorboard(logger: Any, name: str, image: Image.Image, step: int) -> None:
    logger.experiment.add_image(name, np.asarray(image), step, dataformats="HWC")


def _show_in_mlflow(logger: Any, name: str, image: Image.Image, step: int) -> None:
    logger.experiment.log_image(logger.run_id, image, key=name, step=step)


def _show_in_comet(logger: Any, name: str, image: Image.Image, step: int) -> None:
    logger.experiment.log_image(image, name=name, step=step)


def _show_in_litlogger(logger: Any, name: str, image: Image.Image, step: int) -> None:
    from litlogger import Image as LitImage  # noqa: PLC0415 - only users of the logger have it

    logger.experiment[name].append(LitImage(image), step=step)


# Lightning logger without `log_image` -> how it shows a picture. Packages are imported only if their logger is used.
DISPLAYS: dict[str, Display] = {
    "TensorBoardLogger": _show_in_tensorboard,
    "MLFlowLogger": _show_in_mlflow,
    "CometLogger": _show_in_comet,
    "LitLogger": _show_in_litlogger,
}

# ------------------------------------------------------------------------------------------------------ private helpers


def _show(trainer: Trainer, logger: Any, name: str, image: Image.Image, policy: FailurePolicy) -> None:
    """Show a picture in a logger, or else write it to a file."""
    step = _step(trainer)
    logger_name = type(logger).__name__
    file = os.path.join("pictures", name, f"step={step:06d}.png")
    display = _display_of(logger)
    if display is not None:
        fact = f"{logger_name} refused the picture {name!r}"
        remedy = f"It is in {file} in the folder of the run instead."
        with policy.going_on(f"{logger_name}, pictures", fact, remedy):
            display(logger, name, image, step)
            return
    # This also runs after an error of the logger, which became a warning.
    remedy = "Free some space, or choose another folder, such as Trainer(default_root_dir='runs')."
    with policy.going_on(f"{logger_name}, files", f"The picture {file} could not be written", remedy):
        _write(image, os.path.join(run_folder(trainer, logger), file))


def _write(image: Image.Image, path: str) -> None:
    """Write a picture to a file, on a disk or in a bucket."""
    files = get_filesystem(path)
    files.makedirs(os.path.dirname(path), exist_ok=True)
    if files.exists(path) and not is_picture_content(files.read_block(path, 0, SEARCHED_BYTES)):
        raise FileExistsError(f"{path} was not written by this package. Move it elsewhere")
    mark = PngInfo()
    mark.add_text("Software", WRITER)
    with files.open(path, "wb") as stream:
        image.save(stream, "PNG", pnginfo=mark)


def _loggers_or_file(trainer: Trainer) -> list[Any]:
    """Return the loggers; a None means a file if there are none; empty in a `fast_dev_run`."""
    fast_dev_run: Any = trainer.fast_dev_run  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    if fast_dev_run:
        return []
    return list(trainer.loggers) or [None]


def _step(trainer: Trainer) -> int:
    """Return the step at which Lightning logs this validation."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _valid_name(name: str) -> str:
    """Return a name that every logger and every file system accepts."""
    parts = re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII).split("/")
    # A part such as `..` would lead out of the folder.
    return "/".join(part for part in parts if part.strip(". "))


def _draw(drawing: Drawing) -> Image.Image:
    """Return a figure as an image, which is drawn once for all loggers."""
    figure = drawing() if callable(drawing) else drawing
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")
