"""Overfitting, measured as a gap in recall that does not depend on the number of classes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from fewshot_callbacks.callbacks._bank_items import BankData, BankItems, ClassDraw, data_of_bank
from fewshot_callbacks.callbacks._collecting import CollectingMonitor
from fewshot_callbacks.callbacks._collection import Batch
from fewshot_callbacks.callbacks._conduct import Schedule, UsageError, check_at_least
from fewshot_callbacks.callbacks._evaluation import loader_index, no_such_loader
from fewshot_callbacks.callbacks._sides import MeasuredSet, Side
from fewshot_callbacks.callbacks._watched_keys import Better
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, EmbeddingSource, Source, hints_of_source
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import named
from fewshot_callbacks.functional.retrieval import (
    GeneralizationGap,
    RetrievalReport,
    Share,
    evaluate_retrieval,
    generalization_gap,
)
from fewshot_callbacks.functional.retrieval.compare import NO_GROUPS_REMEDY
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings, from_keywords, request_of
from fewshot_callbacks.metrics.embedding_store import Shard
from fewshot_callbacks.settings import GapOptions, NoFile, refuse_other_arguments, takes
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer, rank_zero_info
from fewshot_callbacks.trainer.loaders import evaluation_loaders

# If the numbers of items per class of the two sets differ by more than this factor, a warning reports it.
UNEVEN = 1.5

# Default of the setting `metrics`.
METRICS = ("grouped_recall@1", "recall@1")

# Sentence of `generalization_gap` -> the same words in the arguments of this monitor.
_REMEDIES = {
    NO_GROUPS_REMEDY: "Use a smaller label_groups, or more classes: bank=... and the validation set each need two groups.",
    "the training report has": "the training set, bank=..., has",
    "the validation report has": "the validation set has",
}


@takes(GapOptions, metrics=METRICS)
class GeneralizationGapMonitor(CollectingMonitor):
    """Logs overfitting: Grouped Recall@K of training classes minus Grouped Recall@K of validation classes.

    By default it logs these keys.

    - `gap/grouped_recall@1`: the gap, in [-1, 1] (lower is better); `_low` and `_high` are the ends of its 95 %
      interval
    - `gap/train_grouped_recall@1`, `gap/val_grouped_recall@1`: both recalls (higher is better)
    - `gap/recall@1` and so on: the same five values of plain recall
    - `gap/share_of_time`: fraction of the run that was spent on measuring

    Plain Recall@K falls with the number of classes, so its gap means little if the sets have different numbers of
    classes. Grouped Recall@K searches a fixed number of classes at a time, so you can compare the two sets.

    After the first batch of a validation, a fixed, seeded subset of the training classes is embedded, in evaluation
    mode and with the weights of the validation steps. The modes of the module and the random states are restored. If
    the gap cannot be measured, its values are NaN and a warning gives the reason. A message reports when the interval
    of the gap rises above zero, and when it no longer does.

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
        >>> labels = torch.arange(8) // 2
        >>> training_items = torch.tensor([[0.0], [1.0], [10.0], [11.0], [20.0], [21.0], [30.0], [31.0]])
        >>> items = torch.tensor([[0.0], [1.0], [10.0], [11.0], [20.0], [25.0], [26.0], [31.0]])  # 25 and 26 are confused
        >>> loader = DataLoader(TensorDataset(items, labels), batch_size=4)
        >>> options = {"classes": None, "label_groups": 2, "similarity": "euclidean"}
        >>> bank = TensorDataset(training_items, labels)
        >>> monitor = GeneralizationGapMonitor(bank=bank, source="encoder", **options)
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> keys = "gap/train_recall@1", "gap/val_recall@1", "gap/recall@1"
        >>> {key: round(trainer.callback_metrics[key].item(), 4) for key in keys}
        {'gap/train_recall@1': 1.0, 'gap/val_recall@1': 0.75, 'gap/recall@1': 0.25}

    The settings have these limits: `metrics` must be `grouped_recall@k` and `recall@k` for any k, and `label_groups` a
    number of classes or `auto`. `seed` also draws the training classes.

    Args:
        bank: The training set with evaluation transforms: a data set, a loader or a stream, or a function of the
            Trainer that returns one of them. `train` calls `training_data_for_evaluation()` of the Trainer's data
            module, which the data modules of this package have. To draw `classes` or `items_per_class`, the monitor
            needs the labels of the data set. It finds them in the attribute `labels` or `targets`, also through
            `Subset` and `ConcatDataset`; in the last tensor of a `TensorDataset`; or in the column `label` of a Hugging
            Face data set.
        source: Where embeddings come from: the name of a submodule, such as `"encoder"`, whose output is the embedding;
            two keys of the mapping that the step returns (default `("embeddings", "labels")`); a function of (outputs,
            batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also names labels and ids. Monitors
            with equal sources share one copy of the embeddings. The first validation batch is also embedded as training
            batches are. If the result differs from the embeddings of the step, an error reports it; then pass
            `EmbeddingSource(embed=...)`.
        val_loader: Index or name of the validation loader.
        classes: Number of training classes to measure, drawn with `seed`; None for all.
        items_per_class: Number of items per class in both sets, drawn with `seed`; None for all. Recall rises with the
            number of items per class. If the sets differ in it, pass a number that both sets have.
        every_n_epochs: Measure at most one in this number of epochs, beginning with the first validation.
        max_share: Postpone a measurement until measuring has taken at most this fraction of the run time, in (0, 1).
            None never postpones.
        prefix: First part of the keys.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, if
            possible in the sanity check. Any other error, such as NaN in one batch, becomes a warning, and the values
            are NaN. True: every error ends the run. False: none does.
        **settings: See `RetrievalSettings`.

    Attributes:
        gap: The latest `GeneralizationGap`; None before the first measurement.

    Raises:
        ValueError: If a setting is unknown or out of range, `bank` is an unknown word, or `classes` make fewer than two
            groups.
    """

    gap: GeneralizationGap | None
    _remedy_for_two = "Give them different prefixes, such as prefix='gap' and prefix='overfitting'."
    _remedy_for_logged_twice = ", or pass prefix='overfitting'"

    def __init__(
        self,
        *,
        bank: Literal["train"] | BankData = "train",
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        val_loader: int | str = 0,
        classes: int | None = 100,
        items_per_class: int | None = None,
        every_n_epochs: int = 1,
        max_share: float | None = 0.1,
        prefix: str = "gap",
        strict: bool | None = None,
        **settings: Unpack[GapOptions],
    ) -> None:
        super().__init__(source, strict=strict)
        call = "GeneralizationGapMonitor"
        refuse_other_arguments(call, settings, hints_of_source(source, call))
        check_at_least(1, call, classes=classes, items_per_class=items_per_class)
        if not prefix:
            raise InputError(f"{call}(prefix={prefix!r}): the keys need a first part. Pass one, such as 'gap'.")
        evaluation = from_keywords(GeneralizationGapMonitor, {"metrics": METRICS, **settings}, GapOptions)
        _check_settings(evaluation, classes)
        self._better = _better_values([requested.key for requested in request_of(evaluation).reported])
        # A `GeneralizationGap` has both recalls of each k.
        self._settings = replace(evaluation, metrics=_both_recalls(request_of(evaluation).grouped_k))
        self._draw = ClassDraw(classes, items_per_class, evaluation.seed)
        self._items = BankItems(data_of_bank(bank, ("train",), call), call, self._draw)
        self.val_loader = val_loader
        self.prefix = prefix
        self.schedule = Schedule(every_n_epochs, max_share, call)
        self.gap = None
        # whether this validation is measured
        self._is_due = False
        # verdict of the latest measurement
        self._was_overfitting: bool | None = None

    def _prefix(self, stage: str) -> str:
        return self.prefix

    # ----------------------------------------------------------------------------------------------------------------- when

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: forget the previous run."""
        super().setup(trainer, pl_module, stage)
        self._items.begin()
        self._training_bank = self._collection.shared_bank(self._items)
        self.schedule.begin()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hook to the submodule that embeddings come from; check that the module can embed training items."""
        super().on_fit_start(trainer, pl_module)
        self._collection.embedder.check_name(pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whether this validation is measured, and begin a new set. *Collective*."""
        self._is_due = trainer.sanity_checking or self.schedule.is_due(trainer.current_epoch)
        super().on_validation_epoch_start(trainer, pl_module)

    def _is_measured(self, trainer: Trainer) -> bool:
        """Return whether this validation is measured. A test is not."""
        return self._is_due and not trainer.testing

    # ----------------------------------------------------------------------------------------------------------- collecting

    def _read_loaders(self, trainer: Trainer) -> Collection[int]:
        loader = loader_index(trainer, self.val_loader)
        return {loader} if self._is_measured(trainer) and loader is not None else set()

    def _see_batch(self, trainer: Trainer, loader: int, read: Batch, batch: Any) -> None:
        """Check with the first batch that training batches will be embedded in the same way."""
        if read.first == 0 and read.embeddings is not None and not self.source.embeds_batches:
            assert self._training_bank is not None
            self._training_bank.compare(trainer, loader, batch, read.embeddings, self._settings.similarity)

    def _check_loaders(self, trainer: Trainer) -> None:
        """Check that the Trainer has the loader to compare with."""
        has_loaders = self._is_measured(trainer) and len(evaluation_loaders(trainer)) > 0
        if has_loaders and loader_index(trainer, self.val_loader) is None:
            raise UsageError(no_such_loader(trainer, f"GeneralizationGapMonitor(val_loader={self.val_loader!r})"))

    def _check(self, trainer: Trainer) -> None:
        if self._is_measured(trainer):
            super()._check(trainer)

    def _needs_bank(self, trainer: Trainer) -> bool:
        return self._is_measured(trainer)

    def _see_weights(self, trainer: Trainer, loader: int) -> None:
        with self.schedule.watch.running():
            super()._see_weights(trainer, loader)

    def _check_bank(self, trainer: Trainer, has_failed: bool) -> None:
        with self.schedule.watch.running():
            super()._check_bank(trainer, has_failed)

    # ------------------------------------------------------------------------------------------------------------ measuring

    def _sets(self, trainer: Trainer) -> list[MeasuredSet]:
        return [MeasuredSet("", "", [Side(loader_index(trainer, self.val_loader) or 0)])]

    def _names(self) -> Sequence[str]:
        return list(self._better)

    def _values_of_set(
        self, trainer: Trainer, stage: str, measured_set: MeasuredSet, failed: Mapping[int, Exception]
    ) -> Mapping[str, float]:
        """Return name -> value; without a gap only the share of time is not NaN. *Collective*."""
        values = super()._values_of_set(trainer, stage, measured_set, failed)
        if values is None:
            values = dict.fromkeys(self._names(), math.nan)
        return {**values, "share_of_time": self.schedule.watch.share}

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Return the gap and its recalls, by name. *Collective*."""
        with self.schedule.watch.running():
            self.gap = self._gap(trainer)
            self._report_verdict(trainer, self.gap)
        metrics = self.gap.metrics()
        return {name: metrics[name] for name in self._names() if name in metrics}

    def _gap(self, trainer: Trainer) -> GeneralizationGap:
        """Return the gap, the same in every process. *Collective*."""
        assert self._training_bank is not None
        training = self._training_bank.shard()
        [side] = self._sets(trainer)[0].sides
        validation = self._shard(side)
        if self._draw.items_per_class is not None:
            validation = validation.some_of_each_class(self._draw.items_per_class, self._draw.seed)
        reports = self._evaluate(training), self._evaluate(validation)
        with named(self._policy.owner, "generalization_gap", _REMEDIES):
            return generalization_gap(*reports)

    def _evaluate(self, shard: Shard) -> RetrievalReport:
        """Return the report of a set, of which `shard` is this process's part. *Collective*."""
        share = Share(all_processes(), shard.places)
        with named(self._policy.owner, "evaluate_retrieval"):
            return evaluate_retrieval(shard.embeddings, shard.labels, share=share, **self._settings.arguments())

    def _report_verdict(self, trainer: Trainer, gap: GeneralizationGap) -> None:
        """Log a sentence if the verdict has changed, and warn if one set has larger classes."""
        has_changed = gap.is_overfitting != self._was_overfitting
        # The first verdict is worth a message only if it is overfitting.
        if has_changed and (gap.is_overfitting or self._was_overfitting is not None):
            rank_zero_info(f"{self.prefix}, epoch {trainer.current_epoch}: {gap.in_words()}")
        self._was_overfitting = gap.is_overfitting
        training_items, validation_items = gap.items_per_class
        fewer = min(training_items, validation_items)
        if max(training_items, validation_items) > UNEVEN * fewer:
            self._policy.warn(
                f"{self.prefix}: training classes have {training_items:.1f} items each, validation classes "
                f"{validation_items:.1f}. Recall rises with the number of items per class. Pass "
                f"items_per_class={max(2, math.floor(fewer))} to make the sets comparable. (Shown once.)",
                kind="uneven classes",
            )


def _better_values(gaps: Sequence[str]) -> dict[str, Better]:
    """Return name of a logged value -> which values are better; `gaps` are names such as `recall@1`."""
    better: dict[str, Better] = {}
    for name in gaps:
        better |= dict.fromkeys((name, f"{name}_low", f"{name}_high"), "lower")
        better |= dict.fromkeys((f"train_{name}", f"val_{name}"), "higher")
    better["share_of_time"] = None
    return better


def _both_recalls(ks: Sequence[int]) -> list[str]:
    """Return the keys of Grouped Recall@k and Recall@k for each k."""
    return [f"{metric}@{k}" for metric in ("grouped_recall", "recall") for k in ks]


def _check_settings(settings: RetrievalSettings, classes: int | None) -> None:
    """Refuse settings that define no gap.

    Raises:
        ValueError: If a metric is neither of the two recalls, or the classes make fewer than two groups.
    """
    call = "GeneralizationGapMonitor"
    ks = request_of(settings).grouped_k
    classes_in_group = request_of(settings).group_size
    keys = {requested.key for requested in request_of(settings).reported}
    if not ks or not keys <= set(_both_recalls(ks)):
        raise InputError(
            f"{call}(metrics={settings.metrics!r}): a gap needs Grouped Recall@k, and can have Recall@k of the same k. "
            "Pass keys such as ('grouped_recall@1', 'recall@1')."
        )
    if classes_in_group is None:
        raise InputError(
            f"{call}: label_groups={settings.label_groups!r} does not fit both sets, because their classes differ. Pass "
            "the number of classes in a random group, such as 10."
        )
    if classes is not None and classes < 2 * classes_in_group:
        raise InputError(
            f"{call}: classes={classes} make fewer than two groups of label_groups={classes_in_group}, so the gap has no "
            f"interval. Pass classes >= {2 * classes_in_group} or a smaller label_groups."
        )
