"""Embedding statistics that need no ranking: collapse, rank, uniformity and movement."""

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
    """Logs whether an embedding has collapsed, how many directions it uses, and whether training has moved it.

    By default it logs these keys after each validation. A test logs them with `test/`, without the last three.

    - `val/rankme`, `val/effective_rank`: number of directions in use, with and without the mean (higher is better)
    - `val/spectral_decay`: how fast the eigenvalues of the covariance fall
    - `val/uniformity`: how evenly items are spread over the sphere (lower is better)
    - `val/nc1`, `val/cdnv`, `val/alignment`: spread within classes (lower is better); only if items have labels
    - `val/cosine_to_first`, `val/cosine_to_previous`: mean cosine of each item to itself at an earlier validation
    - `val/cka_to_first`: similarity of the arrangement to the first validation

    `train/rankme` and `train/effective_rank` measure every 50th training batch, on the first process; neither can
    exceed the number of items in the batch. With `k`, the monitor also logs `val/hubness`, `val/antihubs` and
    `val/intrinsic_dimension`.

    A collapse is reported once in a run. The embeddings of a set stay on the CPU until the end of the epoch.

    The three comparisons appear from the second validation on. They use a fixed sample of at most 1,024 items, and they
    are missing if the loader shuffles. `trainer.validate(...)` before the fit counts as the first validation. A warning
    reports that nothing has moved, for instance because an adapter was not loaded, or that the first arrangement is
    lost.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.cat([torch.eye(6), -torch.eye(6)])  # six directions
        >>> loader = DataLoader(TensorDataset(items, torch.arange(12) // 6), batch_size=4)
        >>> monitor = EmbeddingHealthMonitor(source="encoder")
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> {key: round(trainer.callback_metrics[key].item(), 4) for key in ("val/rankme", "val/effective_rank")}
        {'val/rankme': 6.0, 'val/effective_rank': 6.0}

    Args:
        source: Where embeddings come from: the name of a submodule, such as `"encoder"`, whose output is the embedding;
            two keys of the mapping that the step returns (default `("embeddings", "labels")`); a function of (outputs,
            batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also names labels and ids. Monitors
            with equal sources share one copy of the embeddings. Labels are optional. `EmbeddingSource(labels=lambda
            batch: None)` reads none.
        every_n_steps: Measure one training batch in this number, at least 1. Each measurement waits for the device.
            None measures only validation and test.
        k: Number of neighbours for the hubness, at least 2, such as 10. The search takes longer than a
            `RetrievalMonitor`, and every process holds all embeddings. None computes nothing that needs neighbours.
        normalize: Scale each embedding to length 1 first. Neighbours are then found by the cosine.
        loaders: Index or name of the loader that is measured, or several of them, such as `("retrieval",)` if the steps
            of another loader give no embeddings. By default all loaders are measured. With only one measured loader,
            its name is not part of the keys.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, if
            possible in the sanity check. Any other error, such as NaN in one batch, becomes a warning, and the values
            are NaN. True: every error ends the run. False: none does. A collapse ends the run only with True.

    Attributes:
        reports: The latest `EmbeddingHealth` of each set. The key is `""` for a single loader, otherwise the end of its
            logged keys.

    Raises:
        ValueError: If `every_n_steps` is below 1, `k` is below 2, or the source has an unknown form.
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
                f"EmbeddingHealthMonitor(k={k}) must be at least 2. Pass None to compute nothing that needs neighbours."
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
        # end of the keys of a set -> its earlier samples; only on the first process
        self._movements: dict[str, MovementOfSet] = {}
        self.reports: dict[str, EmbeddingHealth] = {}

    def _measure_batch(self, embeddings: Tensor, labels: Labels) -> tuple[float, float]:
        """Return RankMe and the effective rank of a training batch. Waits for the device."""
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
        """Return name -> value for the items of all processes. *Collective*."""
        [side] = measured_set.sides
        has_labels = self._collection.have_classes(side.loader)
        if has_labels is None:
            raise InputError(
                f"{self._policy.owner}: the set is empty because no step gave an embedding. Check the loader."
            )
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
                f"{set_name}: {', '.join(awaited)} are NaN, because there is nothing to compare with yet. They need an "
                "earlier validation of the same items in the same order, and an optimiser step since then. (Shown once.)"
            )
        return health.metrics() | awaited | values

    def _movement_of(
        self, trainer: Trainer, measured_set: MeasuredSet, shard: Shard
    ) -> tuple[dict[str, float], str | None]:
        """Return how far the sample has moved since earlier validations, and a note. *Collective*."""
        if trainer.testing:
            return {}, None
        sample = sample_of(shard, trainer.global_step, all_processes())
        values: dict[str, float] = {}
        note = None
        if not has_fixed_order(trainer, measured_set.sides[0].loader):
            note = (
                f"{', '.join(MOVEMENTS)} are not logged, because the loader shuffles its items. Pass shuffle=False to "
                "the loader."
            )
        elif sample is not None:
            movement = self._movements.setdefault(measured_set.suffix, MovementOfSet())
            values, note = movement.compare(sample, trainer.lightning_module)
        movement_of_first = broadcast_object((values, note))
        assert movement_of_first is not None
        return movement_of_first

    def _report_collapse(self, collapse: str | None, set_name: str) -> None:
        """Warn once in a run that the embedding has collapsed. With `strict=True`, raise an error each time."""
        if collapse is not None and (self._policy.strict or self._policy.is_new("collapse")):
            # The warning adds the set and the monitor.
            fact = f"{self._policy.owner}, {set_name}: {collapse}" if self._policy.strict else collapse
            self._policy.handle(ValueError(fact), f"In {set_name}:")
