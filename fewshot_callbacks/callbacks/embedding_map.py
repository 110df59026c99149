"""A map of some classes of a validation set in each epoch, aligned with the previous one, in every logger."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Int
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from fewshot_callbacks._trainer import random_states_kept
from fewshot_callbacks.callbacks._item_images import Images, ItemReader, has_index, mixed
from fewshot_callbacks.callbacks._loggers import Drawing, log_embedding
from fewshot_callbacks.callbacks._pictures import Names, PictureCallback, class_name
from fewshot_callbacks.callbacks._retrieved import Label, labels_at, positions_of, vectors_at
from fewshot_callbacks.callbacks._viewers import EvaluatedSet
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.plots.embedding_map import MOST_CLASSES, embedding_map
from fewshot_callbacks.plots.pictures import Scale
from fewshot_callbacks.plots.projection import Method, Projection, project

# Pixels of the side of a picture in TensorBoard's projector.
THUMBNAIL = 32


class EmbeddingMap(PictureCallback):
    """Draws a fixed, seeded sample of classes in two dimensions, each map aligned with the one of the previous epoch.

    After each evaluation of a `RetrievalMonitor`, whose embeddings it uses, it sends a map of the queries to every
    logger of the Trainer as `val/embedding_map`, at the same step as the metrics. With `projector=True` it also sends
    the points to TensorBoard's projector, with their images if the data set has an index. Nothing is drawn in the
    sanity check, and an error never ends the run. A set with multi-label targets has no classes, and therefore no map.

    Args:
        classes: Number of classes, 1 to 12.
        per_class: Largest number of items of each class, at least 1.
        method: Projection: `pca`; `tsne`, which needs scikit-learn; or `umap`, which needs umap-learn.
        every_n_epochs: Draw at most once in this number of epochs, beginning with the first.
        projector: Also show the points in TensorBoard's projector.
        images: A function of (data set, index) that returns an image for the projector; see `RetrievalPanels`.
        mean: Mean of the images' normalisation; see `RetrievalPanels`.
        std: Standard deviation of that normalisation.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the data
            set's attribute `classes`, or the labels themselves.
        seed: Seed of the sample, of t-SNE and of UMAP.
        max_share: Skip epochs until all pictures together have taken at most this share of the run time, in (0, 1);
            None never skips an epoch.
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
        seed: int = 0,
        max_share: float | None = 0.05,
        prefix: str | None = None,
    ) -> None:
        super().__init__(every_n_epochs, max_share, prefix)
        if not 1 <= classes <= MOST_CLASSES:
            raise ValueError(
                f"EmbeddingMap(classes={classes}) must be 1 to {MOST_CLASSES}: more classes cannot be told apart."
            )
        if per_class < 1:
            raise ValueError(f"EmbeddingMap(per_class={per_class}) must be at least 1.")
        self.classes, self.per_class, self.method = classes, per_class, method
        self.projector, self.names, self.seed = projector, names, seed
        self._reader = ItemReader(images, mean, std)
        self._maps: dict[str, Projection] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run; a fit starts without an earlier map."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._maps = {}

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet, processes: Processes) -> Mapping[str, Drawing]:
        """Choose the items and gather their embeddings; the map is drawn when a logger wants it."""
        if evaluated.targets is not None:
            self._policy.warn(
                f"EmbeddingMap: the labels of {evaluated.prefix}{evaluated.suffix} are multi-label targets, which have no "
                "classes to colour by: no map is drawn. (Shown once.)",
                kind="targets",
            )
            return {}
        positions = positions_of(evaluated.queries, processes)
        places = self._chosen(evaluated, positions, processes)
        vectors = vectors_at(evaluated.queries, places, processes)
        labels = labels_at(evaluated.queries, None, places, processes)
        shown = [labels[place] for place in places.tolist()]
        key = evaluated.key("embedding_map")
        title = f"{evaluated.prefix}{evaluated.suffix}, epoch {trainer.current_epoch}: the same classes in every epoch"

        def draw() -> Figure:
            _, loader = self._loader_of(evaluated.queries)
            kinds = [class_name(label, self.names, loader) for label in shown]
            found = project(
                vectors, kinds, self._maps.get(key), self.method, ids=positions[places].numpy(), seed=self.seed
            )
            self._maps[key] = found
            if self.projector:
                self._project(trainer, evaluated, positions[places], vectors, kinds)
            return embedding_map(found, title=title)

        return {key: draw}

    def _chosen(
        self, evaluated: EvaluatedSet, positions: Int[Tensor, "queries"], processes: Processes
    ) -> Int[Tensor, "chosen"]:
        """Choose classes by a hash of their labels, and items of each by a hash of their positions. Collective."""
        shard = evaluated.queries.shard
        codes = processes.placed(shard.labels, shard.places, len(positions)).numpy()
        hashes = mixed(self.seed, positions.numpy())
        kinds, first = np.unique(codes, return_index=True)
        names = labels_at(evaluated.queries, None, torch.from_numpy(first), processes)
        order = sorted(range(len(kinds)), key=lambda kind: self._class_order(names[int(first[kind])]))
        chosen = []
        for kind in order[: self.classes]:
            own = np.flatnonzero(codes == kinds[kind])
            chosen.append(own[hashes[own].argsort()[: self.per_class]])
        return torch.from_numpy(np.sort(np.concatenate(chosen)))

    def _class_order(self, label: Label) -> tuple[int, str]:
        return zlib.crc32(f"{self.seed} {label}".encode()), str(label)

    def _project(
        self,
        trainer: Trainer,
        evaluated: EvaluatedSet,
        positions: Int[Tensor, "chosen"],
        vectors: Float[Tensor, "chosen dim"],
        kinds: list[str],
    ) -> None:
        """Show the points in TensorBoard's projector."""
        name, loader = self._loader_of(evaluated.queries)
        thumbnails = None
        if has_index(loader):
            with random_states_kept():
                pictures = [self._reader.from_data_set(loader, int(index), name) for index in positions]
            thumbnails = torch.stack([_thumbnail(picture) for picture in pictures])
            if len(self._reader.failures) == len(pictures):
                thumbnails = None
        columns = {"class": kinds, "item": positions.tolist()}
        log_embedding(trainer, evaluated.key("embedding"), vectors, columns, self._policy, thumbnails)
        self._reader.failures = []


def _thumbnail(picture: np.ndarray | str | None) -> Float[Tensor, "3 side side"]:
    """Fit a picture into a square of one size, in colour; anything but a picture is grey."""
    if picture is None or isinstance(picture, str):
        return torch.full((3, THUMBNAIL, THUMBNAIL), 0.85, device="cpu")
    image = torch.from_numpy(np.ascontiguousarray(picture)).movedim(-1, 0)[None]
    scale = THUMBNAIL / max(image.shape[-2:])
    size = [max(1, round(length * scale)) for length in image.shape[-2:]]
    small = torch.nn.functional.interpolate(image, size, mode="bilinear", antialias=True)[0].clamp(0, 1)
    side = torch.ones(3, THUMBNAIL, THUMBNAIL, device="cpu")
    side[:, : size[0], : size[1]] = small
    return side
