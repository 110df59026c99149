"""What an embedding shows without a ranking, while a model trains; with labels or without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from fewshot_callbacks.callbacks._evaluation import Loaders
from fewshot_callbacks.callbacks._movement import MOVEMENTS, MovementOfSet, has_fixed_order, notes_on_nan, sample_of
from fewshot_callbacks.callbacks._sides import MeasuredSet
from fewshot_callbacks.callbacks._training_batches import BatchMonitor
from fewshot_callbacks.callbacks._watched_keys import Better
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, EmbeddingSource, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes, broadcast_object
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import EmbeddingHealth, Moments, Share, embedding_health
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional._reading import named, non_finite_rows, refuse_non_finite
from fewshot_callbacks.functional.health import better_values, collapse_of, names_of
from fewshot_callbacks.metrics.embedding_store import Shard
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.system.words import counted
from fewshot_callbacks.trainer.lightning import Trainer, rank_zero_info


class EmbeddingHealthMonitor(BatchMonitor):
    """Logs whether an embedding collapses and how many directions it uses, and of classes and hubs; labels are optional.

    At the end of a validation or test the whole set is measured by `embedding_health`, over all ranks, and logged as
    `val/rankme`, `val/effective_rank`, `val/spectral_decay` and `val/uniformity` (`test/...` in a test); where items have
    labels also as `val/nc1`, `val/cdnv` and `val/alignment`; with `k` as `val/hubness`, `val/antihubs` and
    `val/intrinsic_dimension`. The embeddings are the outputs of the step. They stay on the CPU until the end. In
    training, `train/rankme` and `train/effective_rank` are measured on every n-th batch, with several ranks only on
    rank 0. Neither can be larger than the number of items of the batch. A collapse is reported once in a run, with the
    number that shows it.

    From the second validation of a run on, it also logs how far the embedding has moved: `val/cosine_to_first` and
    `val/cosine_to_previous`, the mean cosine of each item to itself at the first validation and at the one before, and
    `val/cka_to_first`, the similarity of the arrangement to the first arrangement (see `embedding_movement`). A warning
    reports it if nothing has moved, as with an adapter that was not loaded, or if the first arrangement is lost. A
    validation before training (`trainer.validate`) counts as the first. The items are a fixed sample of at most 1,024.
    The first process keeps two copies of it. Nothing is compared if the items come in another order.

    Args:
        source: See `DiscriminantRatioMonitor`. Where there are no labels, nothing is computed that needs them;
            `EmbeddingSource(labels=lambda batch: None)` reads none.
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
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        every_n_steps: int | None = 50,
        k: int | None = None,
        normalize: bool = False,
        loaders: Loaders | None = None,
        strict: bool | None = None,
    ) -> None:
        if k is not None and k < 2:
            raise InputError(
                f"EmbeddingHealthMonitor(k={k}) must be at least 2; None leaves out what needs neighbours."
            )
        super().__init__(
            source,
            every_n_steps=every_n_steps,
            loaders=loaders,
            strict=strict,
            needs_labels=False,
            keeps_items=True,
        )
        self.k = k
        self.normalize = normalize
        # end of the keys of a set -> its sample at earlier validations, on the first process
        self._movements: dict[str, MovementOfSet] = {}
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
        undefined = [
            key for key, value in zip(self._training_keys, (rankme, effective_rank), strict=True) if math.isnan(value)
        ]
        if undefined:
            reason = "it has a single item" if items == 1 else "all its embeddings are equal"
            self._policy.warn(
                f"{' and '.join(undefined)} of a training batch of {counted(items, 'item')} are NaN: {reason}. (Shown "
                "once.)",
                kind=f"undefined {undefined}",
            )
        return rankme, effective_rank

    def _names(self) -> Sequence[str]:
        return [*names_of(labels=True, k=self.k), *MOVEMENTS]

    def _names_of_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Sequence[str]:
        has_labels = all(self._collection.have_classes(side.loader) for side in measured_set.sides)
        return [*names_of(labels=has_labels, k=self.k), *self._awaited(trainer, measured_set, MOVEMENTS)]

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Measure the items of all processes, and return name -> value. *Collective*."""
        [side] = measured_set.sides
        has_labels = self._collection.have_classes(side.loader)
        if has_labels is None:
            raise InputError(f"{self._policy.owner}: the set is empty: no step gave an embedding.")
        shard = self._shard(side)
        with named(self._policy.owner, "embedding_health"):
            health = embedding_health(
                shard.embeddings,
                shard.labels if has_labels else None,
                k=self.k,
                normalize=self.normalize,
                share=Share(all_processes(), shard.places),
            )
        self.reports[measured_set.suffix] = health
        self._tell(health.notes, set_name)
        self._report_collapse(health.collapse, set_name)
        values, note = self._movement_of(trainer, measured_set, shard)
        # Collapsed embeddings may be unable to move.
        if note is not None and health.collapse is None:
            self._tell([note], set_name)
        self._tell(notes_on_nan(values), set_name)
        awaited = dict.fromkeys(self._awaited(trainer, measured_set, MOVEMENTS), math.nan)
        if awaited and not values and note is None and self._policy.is_new("nothing to compare with"):
            rank_zero_info(
                f"{set_name}: {', '.join(awaited)} are NaN: there is no earlier validation of the same items in the same "
                "order, and no optimiser step since, to compare with. (Shown once.)"
            )
        return health.metrics() | awaited | values

    def _movement_of(
        self, trainer: Trainer, measured_set: MeasuredSet, shard: Shard
    ) -> tuple[dict[str, float], str | None]:
        """Return how far a sample has moved since earlier validations, and a sentence; see `MovementOfSet.compare`.

        *Collective*.
        """
        if trainer.testing:
            return {}, None
        sample = sample_of(shard, trainer.global_step, all_processes())
        values: dict[str, float] = {}
        note = None
        if not has_fixed_order(trainer, measured_set.sides[0].loader):
            note = (
                f"{', '.join(MOVEMENTS)} are not logged, since the loader shuffles its items, so that those of two "
                "validations cannot be compared. Pass shuffle=False to the loader."
            )
        elif sample is not None:
            movement = self._movements.setdefault(measured_set.suffix, MovementOfSet())
            values, note = movement.compare(sample, trainer.lightning_module)
        movement_of_first = broadcast_object((values, note))
        assert movement_of_first is not None
        return movement_of_first

    def _report_collapse(self, collapse: str | None, set_name: str) -> None:
        """Warn once in a run that the embedding has collapsed; with `strict=True` raise each time."""
        if collapse is not None and (self._policy.strict or self._policy.is_new("collapse")):
            # A warning names the place and the monitor itself.
            fact = f"{self._policy.owner}, {set_name}: {collapse}" if self._policy.strict else collapse
            self._policy.handle(ValueError(fact), f"In {set_name}:")
