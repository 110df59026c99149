"""A map of a sample of classes in each epoch, aligned with the previous map, in every logger."""

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

# Side of an image in TensorBoard's projector, in pixels.
THUMBNAIL = 32


class EmbeddingMap(PictureCallback):
    """Draws a two-dimensional map of a fixed sample of classes at each validation.

    Each map is aligned with the map of the previous epoch. The callback needs a `RetrievalMonitor` in the same Trainer, and
    draws the queries of this monitor. It sends `val/embedding_map` to every logger, at the same step as the metrics. If
    there is no logger, the map is a file in `pictures/`. `projector=True` also sends the points to TensorBoard's projector,
    with their images if the data set has an index. Nothing is drawn in the sanity check. An error never ends the run. A set
    with several labels per item has no map, because it has no classes.

    Examples:
        >>> from pathlib import Path
        >>> import torch
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
        >>> loader = DataLoader(TensorDataset(items, torch.arange(12) // 3), batch_size=4)
        >>> callbacks = [RetrievalMonitor(source="encoder"), EmbeddingMap(classes=3)]
        >>> from tempfile import TemporaryDirectory
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> with TemporaryDirectory() as folder:
        ...     trainer = Trainer(callbacks=callbacks, accelerator="cpu", default_root_dir=folder, **options)
        ...     _ = trainer.validate(Model(), loader, verbose=False)
        ...     print([path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.png")])
        ['pictures/val/embedding_map/step=000000.png']
        >>> round(trainer.callback_metrics["val/mAP"].item(), 4)  # the metric of the same items
        0.3012

    Args:
        classes: Number of classes, 1 to 12.
        per_class: Largest number of items per class, at least 1.
        method: Projection: `pca`, `tsne` (needs scikit-learn) or `umap` (needs umap-learn).
        every_n_epochs: Draw in at most one of this number of epochs, beginning with the first.
        projector: Also show the points in TensorBoard's projector.
        images: A function of (data set, index) that returns an image for the projector. By default the first part of a
            sample, or its entry `image`.
        mean: Mean of the images' normalisation, which is undone: one value, or one for each channel.
        std: Standard deviation of that normalisation, in the same form.
        names: Names of the classes: a mapping from labels, or a list for the labels 0, 1, 2, ... By default the data
            set's attribute `classes`, or the labels themselves.
        max_share: Skip epochs until all pictures and reports together have taken at most this fraction of the run time,
            in (0, 1). The first second never counts. None skips no epoch. `pictures/share_of_time` logs the fraction.
        prefix: Draw only the sets whose keys begin with this prefix: `val`, `test`, or `val/t2i` for a
            `RetrievalMonitor` with a name. By default all sets.

    Raises:
        ValueError: If a setting is out of range.
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
                f"EmbeddingMap(classes={classes}) must be 1 to {MAX_CLASSES}. The colours of more classes look alike."
            )
        check_at_least(1, "EmbeddingMap", per_class=per_class)
        self.classes = classes
        self.per_class = per_class
        self.method = method
        self.projector = projector
        # latest map of each key, with which the next map is aligned
        self._maps: dict[str, Projection] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run; a fit starts without an earlier map."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._maps = {}

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Return name -> map. Items are chosen now; the map is drawn when a logger needs it."""
        queries = evaluated.queries
        if not evaluated.report.classes:
            self._policy.warn(
                f"EmbeddingMap: the labels of {evaluated.prefix}{evaluated.suffix} are multi-label targets, so there are no "
                "classes to colour, and no map is drawn. (Shown once.)",
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
    """Return images of one size, padded with white; grey for a text, or if `picture` raises an error."""
    thumbnails = []
    for item in items:
        thumbnail = Image.new("RGB", (THUMBNAIL, THUMBNAIL), "lightgrey")
        # Transforms of the data set may draw random numbers, and maps must not change the run.
        with suppress(Exception), preserved_random_states():
            pixels = picture(item)
            if not isinstance(pixels, str):
                rgb = pixels.repeat(3 // pixels.shape[2], 2)
                image = Image.fromarray((255 * rgb).round().astype(np.uint8))
                thumbnail = ImageOps.pad(image, thumbnail.size, color="white")
        thumbnails.append(np.asarray(thumbnail))
    return torch.from_numpy(np.stack(thumbnails)).movedim(-1, 1).float() / 255
