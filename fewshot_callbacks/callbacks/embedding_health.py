"""What an embedding shows without a ranking, while a model trains; with labels or without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from fewshot_callbacks.callbacks._conduct import without_digits
from fewshot_callbacks.callbacks._embedder import Embed
from fewshot_callbacks.callbacks._evaluation import BatchMonitor, Loaders, step_of
from fewshot_callbacks.callbacks._watched_keys import Better
from fewshot_callbacks.callbacks.embeddings import STEP_KEYS, EmbeddingSource, LabelSource, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes, gather_objects
from fewshot_callbacks.functional import EmbeddingHealth, Moments, Share, embedding_health
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional._reading import non_finite_rows, refuse_non_finite
from fewshot_callbacks.functional.health import better_values, collapse_of, names_of
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore


class EmbeddingHealthMonitor(BatchMonitor):
    """Logs whether an embedding collapses and how many directions it uses, and of classes and hubs; labels are optional.

    At the end of a validation or test the whole set is measured by `embedding_health`, over all ranks, and logged as
    `val/rankme`, `val/effective_rank`, `val/spectral_decay` and `val/uniformity` (`test/...` in a test); where items have
    labels also as `val/nc1`, `val/cdnv` and `val/alignment`; with `k` as `val/hubness`, `val/antihubs` and
    `val/intrinsic_dimension`. Embeddings are those that the step gave, kept on the CPU until the end. In training
    `train/rankme` and `train/effective_rank` are those of every n-th batch, of rank 0 with several ranks; neither can be
    larger than the number of items of the batch. A collapse is said once in a run, with the number that shows it.

    Args:
        source: See `DiscriminantRatioMonitor`.
        labels: Where the labels are in the batch, if the step does not return them: a key, a position, or a function of
            the batch. By default those that the step returned, else the second part of the batch, if it is no second
            view; where there are none, nothing is computed that needs them. `lambda batch: None` reads none.
        embed: For steps that give no embeddings, how each batch is embedded a second time, after the step: the name of a
            submodule that is called with the batch's inputs, or a function of (module, batch) that returns embeddings or
            (embeddings, labels), such as `lambda module, batch: module.backbone(batch[0][0]).flatten(1)` for the first view
            of each item. The module is then in evaluation mode, also for training batches, and random states are restored.
        every_n_steps: Measure one training batch in this number, at least 1, which waits for the device. None measures
            validation and test alone.
        k: Neighbours of the hubness, at least 2, such as 10. The search takes longer than a `RetrievalMonitor` does, and
            with several ranks all embeddings in each. None leaves out what needs neighbours.
        normalize: Scale each embedding to length 1 first; neighbours are then those of the cosine.
        loaders: Index or name of the loader that is measured, or several, such as `("retrieval",)` where the steps of
            another loader give no embeddings. By default all are measured. The keys of a single one have no ending.
        strict: Which errors end the run, see `DiscriminantRatioMonitor`. A collapse ends it with True alone.

    Attributes:
        reports: The latest `EmbeddingHealth` of each set, by the suffix of its keys (`""` for a single loader).

    Raises:
        ValueError: If `every_n_steps` is below 1, k is below 2, or the source is of no known form.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> monitor = EmbeddingHealthMonitor(source="backbone")
        >>> trainer = Trainer(callbacks=[monitor], logger=False, accelerator="cpu")
    """

    _training_keys = "train/rankme", "train/effective_rank"
    _better: Mapping[str, Better] = better_values()

    def __init__(
        self,
        *,
        source: Source | EmbeddingSource = STEP_KEYS,
        labels: LabelSource | None = None,
        embed: Embed | None = None,
        every_n_steps: int | None = 50,
        k: int | None = None,
        normalize: bool = False,
        loaders: Loaders | None = None,
        strict: bool | None = None,
    ) -> None:
        if k is not None and k < 2:
            raise ValueError(
                f"EmbeddingHealthMonitor(k={k}) must be at least 2; None leaves out what needs neighbours."
            )
        super().__init__(source, labels, embed, strict, every_n_steps, loaders)
        self._reader.needs_labels = False
        self.k = k
        self.normalize = normalize
        self.reports: dict[str, EmbeddingHealth] = {}

    def _measure_batch(self, embeddings: Tensor, labels: Labels) -> tuple[float, float]:
        """Return RankMe and the effective rank of a training batch; waits for the device."""
        embeddings = embeddings.cpu().double()
        refuse_non_finite(non_finite_rows(embeddings), len(embeddings), "embeddings", self._policy.owner)
        moments = Moments.of(embeddings)
        rankme = moments.rankme()
        effective_rank = moments.effective_rank()
        items, dim = embeddings.shape
        classes = len(labels.distinct()[0]) or None
        collapse = collapse_of(items, dim, classes, rankme, effective_rank, moments.spread)
        self._report_collapse(collapse, "a training batch")
        return rankme, effective_rank

    def _collect(self, trainer: Trainer, loader: int, first: int, outputs: Any, batch: Any) -> int:
        """Append a batch to the store of its loader; without labels all items have the label 0, which is never used."""
        embeddings, labels = self._read(trainer, outputs, batch, step_of(trainer))
        has_labels = len(labels) == len(embeddings)
        if self._has_labels.setdefault(loader, has_labels) != has_labels:
            raise ValueError("Some batches have labels, others have none. Give labels in every batch, or in none.")
        self._stores[loader].append(embeddings, labels if has_labels else [0] * len(embeddings))
        return len(embeddings)

    def _items_have_labels(self, loader: int) -> bool | None:
        """Return whether the items of a loader have labels in all processes; None without items. *Collective*."""
        by_rank = gather_objects(self._has_labels.get(loader))
        answers = [has_labels for has_labels in by_rank if has_labels is not None]
        return all(answers) if answers else None

    def _names(self, loader: int | None = None) -> list[str]:
        has_labels = loader is None or bool(self._items_have_labels(loader))
        return names_of(labels=has_labels, k=self.k)

    def _measure_loader(self, trainer: Trainer, loader: int, stage: str, suffix: str) -> dict[str, float]:
        """Measure the items of all processes, and return name -> value. *Collective*."""
        has_labels = self._items_have_labels(loader)
        processes = all_processes()
        with processes.together():
            if has_labels is None:
                raise ValueError("The set is empty: no step gave an embedding.")
            shard = self._stores[loader].shard(self._unpadded_length(trainer, loader))
            health = embedding_health(
                shard.embeddings,
                shard.labels if has_labels else None,
                k=self.k,
                normalize=self.normalize,
                share=Share(processes, shard.places),
            )
        self.reports[suffix] = health
        for note in health.notes:
            self._policy.warn(f"{stage}{suffix}: {note} (Shown once.)", kind=without_digits(note))
        self._report_collapse(health.collapse, f"{stage}{suffix}")
        return health.metrics()

    def _report_collapse(self, collapse: str | None, set_name: str) -> None:
        """Warn once in a run that the embedding has collapsed; with `strict=True` raise each time."""
        if collapse is not None and (self._policy.strict or self._policy.is_new("collapse")):
            self._policy.handle(ValueError(collapse), f"In {set_name}:")

    def _forget(self) -> None:
        # one store for each loader
        self._stores: dict[int, EmbeddingStore] = defaultdict(EmbeddingStore)
        # whether the items of each loader have labels in this process
        self._has_labels: dict[int, bool] = {}
