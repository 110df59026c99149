"""A map of a sample of classes of a validation set in each epoch, aligned with the previous map, in every logger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor

from fewshot_callbacks.callbacks._conduct import check_at_least
from fewshot_callbacks.callbacks._loggers import Drawing, log_embedding
from fewshot_callbacks.callbacks._pictures import ImageReader, Images, PictureCallback
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, Names
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.class_subset import class_subset
from fewshot_callbacks.plots.embedding_map import MAX_CLASSES, Method, Projection, embedding_map, project
from fewshot_callbacks.plots.panels import Scale
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer
from fewshot_callbacks.trainer.side_effects import preserved_random_states

# Pixels of the side of a picture in TensorBoard's projector.
THUMBNAIL = 32


class EmbeddingMap(PictureCallback):
    """Draws a fixed sample of classes in two dimensions, each map aligned with the map of the previous epoch.

    After each evaluation of a `RetrievalMonitor`, it uses the monitor's embeddings and sends a map of the queries to
    every logger of the Trainer as `val/embedding_map`, at the same step as the metrics. With `projector=True` it also
    sends the points to TensorBoard's projector, with their images if the data set has an index. Nothing is drawn in the
    sanity check, and an error never ends the run. A set with multi-label targets has no classes, and therefore no map.

    Args:
        classes: Number of classes, 1 to 12.
        per_class: Largest number of items of each class, at least 1.
        method: Projection: `pca`; `tsne`, which needs scikit-learn; or `umap`, which needs umap-learn.
        every_n_epochs: Draw at most in one of this number of epochs, beginning with the first.
        projector: Also show the points in TensorBoard's projector.
        images: A function of (data set, index) that returns an image for the projector; see `RetrievalPanels`.
        mean: Mean of the images' normalisation; see `RetrievalPanels`.
        std: Standard deviation of that normalisation.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the data
            set's attribute `classes`, or the labels themselves.
        max_share: Skip epochs until all pictures together have taken at most this share of the run time, in (0, 1);
            None never skips an epoch. None is skipped before they have taken a second.
        prefix: Draw only the sets whose keys begin with this prefix: `val`, `test`, or `val/t2i` for a `RetrievalMonitor`
            with a name; by default all.

    Raises:
        ValueError: If a setting is out of range.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> trainer = Trainer(callbacks=[RetrievalMonitor(), EmbeddingMap()], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        classes: int = 12,
        per_class: int = 50,
        method: Method = "pca",
        *,
        every_n_epochs: int = 1,
        projector: bool = False,
        images: Images | None = None,
        mean: Scale | None = None,
        std: Scale | None = None,
        names: Names | None = None,
        max_share: float | None = 0.05,
        prefix: str | None = None,
    ) -> None:
        super().__init__(every_n_epochs, max_share, prefix, names, ImageReader(images, mean, std))
        if not 1 <= classes <= MAX_CLASSES:
            raise InputError(
                f"EmbeddingMap(classes={classes}) must be 1 to {MAX_CLASSES}: more classes cannot be told apart."
            )
        check_at_least(1, "EmbeddingMap", per_class=per_class)
        self.classes = classes
        self.per_class = per_class
        self.method = method
        self.projector = projector
        # latest map of each key; the next map is aligned with it
        self._maps: dict[str, Projection] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run; a fit starts without an earlier map."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._maps = {}

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Choose the items; the map is drawn when a logger needs it."""
        queries = evaluated.queries
        if not evaluated.report.classes:
            self._policy.warn(
                f"EmbeddingMap: the labels of {evaluated.prefix}{evaluated.suffix} are multi-label targets, which have no "
                "classes to colour by: no map is drawn. (Shown once.)",
                kind="targets",
            )
            return {}
        sample = class_subset(queries.labels, self.classes, self.per_class)
        embeddings = queries.embeddings[sample]
        positions = queries.positions[sample]
        names = queries.class_names(self.names)
        classes = [names[queries.labels[index]] for index in sample.tolist()]
        picture = self._picture(evaluated, queries)
        key = evaluated.key("embedding_map")

        def draw() -> Figure:
            projection = project(embeddings, classes, self._maps.get(key), self.method, ids=positions.numpy())
            self._maps[key] = projection
            if self.projector:
                columns = {"class": classes, "item": positions.tolist()}
                thumbnails = None if picture is None else _thumbnails(picture, sample.tolist())
                log_embedding(trainer, evaluated.key("embedding"), embeddings, columns, self._policy, thumbnails)
            return embedding_map(projection, title=f"{evaluated.title}, the same classes in every epoch")

        return {key: draw}


def _thumbnails(picture: Callable[[int], Any], items: Sequence[int]) -> Float[Tensor, "chosen 3 side side"]:
    """Return pictures of one size, padded with white; grey for an item with a text, or if `picture` raises for its index."""
    thumbnails = []
    for item in items:
        thumbnail = Image.new("RGB", (THUMBNAIL, THUMBNAIL), "lightgrey")
        # Transforms of the data set may draw random numbers, and a run with maps must not differ from a run without.
        with suppress(Exception), preserved_random_states():
            pixels = picture(item)
            if not isinstance(pixels, str):
                rgb = pixels.repeat(3 // pixels.shape[2], 2)
                image = Image.fromarray((255 * rgb).round().astype(np.uint8))
                thumbnail = ImageOps.pad(image, thumbnail.size, color="white")
        thumbnails.append(np.asarray(thumbnail))
    return torch.from_numpy(np.stack(thumbnails)).movedim(-1, 1).float() / 255
