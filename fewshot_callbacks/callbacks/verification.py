"""Error rates of a trial list at the end of every validation and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import fspath

import torch
from torch import Tensor

from fewshot_callbacks.callbacks._collecting import CollectingMonitor
from fewshot_callbacks.callbacks._embedder import LARGEST_DIFFERENCE
from fewshot_callbacks.callbacks._evaluation import Loaders, ends_of_loaders
from fewshot_callbacks.callbacks._sides import Column, MeasuredSet, Side
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, EmbeddingSource, Entry, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes, broadcast_object
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import (
    DEFAULT_TRIAL_METRICS,
    TRIAL_METRICS,
    TrialList,
    TrialReport,
    evaluate_trials,
    read_trials,
    trial_scores,
)
from fewshot_callbacks.functional.neighbours import positive_number
from fewshot_callbacks.functional.retrieval.registry import requested_metrics
from fewshot_callbacks.functional.statistics import normal_quantile
from fewshot_callbacks.settings import FilePath, NoFile, Similarity
from fewshot_callbacks.trainer.lightning import Trainer

# Name under which the number of skipped trials is logged.
MISSING = "missing_trials"


@dataclass(frozen=True)
class _ListedItems:
    """The items of one process that occur in the trial list."""

    ids: list[str]
    embeddings: Tensor  # (listed items, dim)
    places: Tensor  # (listed items,) place of each among the items of all processes
    items: int  # number of all items of the process


class VerificationMonitor(CollectingMonitor):
    """Logs the error rates of your embeddings on a fixed list of pairs, as in speaker and face verification.

    By default it logs these keys. A test logs them with `test/`.

    - `val/eer`: error rate at the threshold where both errors are equal (lower is better)
    - `val/min_dcf@0.01`: lowest detection cost for a target prior of 0.01 (lower is better)
    - `val/tar@far0.01`, `val/tar@far0.001`: accepted target trials at 1 % or 0.1 % false accepts (higher is better)
    - `val/missing_trials`: number of trials whose items are not in the set, which are left out
    - `val/accuracy`: accuracy over the folds, if the list has folds (higher is better)

    The list marks target trials (two items of one identity) and non-target trials, so labels are not needed. Items are
    found by their ids in all measured loaders; the two items of a trial may come from different loaders. An id that
    occurs twice with the same embedding is one item. Missing items, for instance because of `limit_val_batches`, give
    one warning. The first process scores the trials of all processes, and every process logs its values.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import TrialList
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
        >>> loader = DataLoader(TensorDataset(items, torch.arange(4)), batch_size=2)  # a batch is (items, ids)
        >>> pairs = ("0", "1", "2", "0", "0", "1"), ("1", "2", "3", "2", "3", "3")
        >>> trials = TrialList(same=(True, True, True, False, False, False), items=pairs)
        >>> monitor = VerificationMonitor(trials, ids=1, source="encoder", similarity="euclidean", metrics=("eer",))
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> {key: round(value.item(), 4) for key, value in trainer.callback_metrics.items()}
        {'val/eer': 0.3333, 'val/missing_trials': 0.0}

    Args:
        trials: Path of the trial list, or the result of `read_trials`.
        ids: The id of each item, as it is in the list: an entry of the step's output or of the batch, a position in the
            batch, or a function of (outputs, batch). The name of a file matches its path.
        metrics: Keys of the metrics. See `evaluate_trials`. By default `DEFAULT_TRIAL_METRICS`, and with folds also the
            accuracy.
        similarity: How the two embeddings of a trial are compared. See `trial_scores`.
        miss_cost: Cost of a rejected target trial, for `min_dcf`. See `evaluate_trials`.
        false_match_cost: Cost of an accepted non-target trial, for `min_dcf`.
        confidence: Confidence level of the intervals in `report`, in (0, 1).
        source: Where embeddings come from: the name of a submodule, such as `"encoder"`, whose output is the embedding;
            two keys of the mapping that the step returns (default `("embeddings", "labels")`); a function of (outputs,
            batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also names labels and ids. Monitors
            with equal sources share one copy of the embeddings.
        loaders: Index or name of the loader in which items are found, or several of them. By default all loaders.
        name: Part of the keys between the stage and the metric: `t2i` gives `val/t2i/eer`. Several monitors of this
            kind in one Trainer need different names.
        prog_bar: Show the first of the metrics in the progress bar.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, if
            possible in the sanity check. Any other error, such as NaN in one batch, becomes a warning, and the values
            are NaN. True: every error ends the run. False: none does.

    Attributes:
        report: The latest `TrialReport`; None before the first evaluation. If the list has `slices`, `report.of_slices`
            has the error rates of each slice.

    Raises:
        ValueError: If the list cannot be read or has scores instead of items, a metric is unknown, or a cost is not
            positive.
    """

    def __init__(
        self,
        trials: TrialList | FilePath,
        ids: Entry,
        *,
        metrics: Sequence[str] | None = None,
        similarity: Similarity = "cosine",
        miss_cost: float = 1.0,
        false_match_cost: float = 1.0,
        confidence: float = 0.95,
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        loaders: Loaders | None = None,
        name: str | None = None,
        prog_bar: bool = False,
        strict: bool | None = None,
    ) -> None:
        self._ids = Column("ids", ids)
        super().__init__(
            source,
            loaders=loaders,
            name=name,
            prog_bar=prog_bar,
            strict=strict,
            columns=[self._ids],
            needs_labels=False,
            takes_targets=True,
        )
        self.trials = trials if isinstance(trials, TrialList) else read_trials(fspath(trials))
        if self.trials.items is None:
            raise InputError(
                "VerificationMonitor: this list has scores instead of items. Pass a list of pairs of items."
            )
        if metrics is None:
            metrics = DEFAULT_TRIAL_METRICS if self.trials.folds is None else (*DEFAULT_TRIAL_METRICS, "accuracy")
        requested = requested_metrics("VerificationMonitor", metrics, TRIAL_METRICS)
        if self.trials.folds is None and "accuracy" in metrics:
            raise InputError("VerificationMonitor: accuracy needs folds, but this list has none. Leave out accuracy.")
        fix = "Pass a cost such as 1.0."
        self.miss_cost = positive_number("VerificationMonitor", "miss_cost", miss_cost, fix)
        self.false_match_cost = positive_number("VerificationMonitor", "false_match_cost", false_match_cost, fix)
        normal_quantile(confidence)
        self.metrics = tuple(request.key for request in requested)
        self.similarity: Similarity = similarity
        self.confidence = confidence
        self._better = {request.key: request.metric.better for request in requested} | {MISSING: None}
        self.report: TrialReport | None = None

    _takes_label_sets = True

    def _names(self) -> Sequence[str]:
        return (*self.metrics, MISSING)

    def _sets(self, trainer: Trainer) -> list[MeasuredSet]:
        """Return the items of all loaders as one set."""
        return [MeasuredSet("", "", [Side(loader) for loader in ends_of_loaders(trainer, self.loaders)])]

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Return the metrics of the trials with both items, and the number of missing trials. *Collective*."""
        parts = [self._listed_items(trainer, side) for side in measured_set.sides]
        parts_by_rank = all_processes().to_first(parts)
        result = None
        if parts_by_rank is not None:
            # An error of the first process is raised in all.
            result = self._evaluate([_of_all_processes(side) for side in zip(*parts_by_rank, strict=True)])
        answer = broadcast_object(result)
        assert answer is not None
        report, missing = answer
        self.report = report
        notes = list(report.notes)
        if missing:
            notes.append(
                f"{missing:,} of the {len(self.trials):,} trials are left out. Their items did not occur in this "
                "validation, or occurred several times with different embeddings."
            )
        self._tell(notes, set_name)
        return report.values | {MISSING: float(missing)}

    def _listed_items(self, trainer: Trainer, side: Side) -> _ListedItems:
        """Return the items of this process that occur in the list. *Collective*."""
        shard = self._shard(side)
        ids = [str(name) for name in shard.columns[self._ids].tolist()]
        rows = [row for row, name in enumerate(ids) if self.trials.names(name)]
        return _ListedItems([ids[row] for row in rows], shard.embeddings[rows], shard.places[rows], len(ids))

    def _evaluate(self, loaders: Sequence[_ListedItems]) -> tuple[TrialReport, int]:
        """Return the report of the trials with both items, and the number of missing trials.

        Raises:
            ValueError: If no trial has both items.
        """
        items = sum(loader.items for loader in loaders)
        ids, embeddings = _without_copies([name for loader in loaders for name in loader.ids], _joined(loaders))
        first, second = self.trials.known_rows(ids)
        has_items = (first >= 0) & (second >= 0)
        if not bool(has_items.any()):
            assert self.trials.items is not None
            raise InputError(
                f"VerificationMonitor: none of the {len(has_items):,} trials has both items among the {items:,} items of "
                f"this set. The list begins with {self.trials.items[0][0]!r}. Pass ids that name items as the list does."
            )
        scores = trial_scores(embeddings, first[has_items], second[has_items], similarity=self.similarity)
        trials = self.trials.chosen(has_items.nonzero()[:, 0].tolist())
        report = evaluate_trials(
            scores,
            trials.same,
            first=trials.first,
            second=trials.second,
            folds=trials.folds,
            slices=trials.slices,
            metrics=self.metrics,
            miss_cost=self.miss_cost,
            false_match_cost=self.false_match_cost,
            confidence=self.confidence,
        )
        return report, len(has_items) - len(trials)


def _of_all_processes(parts: Sequence[_ListedItems]) -> _ListedItems:
    """Return the items of a loader from all processes, in the order of its data set."""
    places = torch.cat([part.places for part in parts])
    order = places.argsort()
    ids = [name for part in parts for name in part.ids]
    return _ListedItems(
        [ids[row] for row in order.tolist()],
        _joined(parts)[order],
        places[order],
        sum(part.items for part in parts),
    )


def _joined(parts: Sequence[_ListedItems]) -> Tensor:
    """Return the embeddings of all parts. A part without items has no dimension."""
    return torch.cat([part.embeddings for part in parts if part.ids] or [torch.empty(0, 0)])


def _without_copies(ids: Sequence[str], embeddings: Tensor) -> tuple[list[str], Tensor]:
    """Return the items without repeats: rows with equal ids whose embeddings differ only by rounding."""
    kept_of_id: dict[str, list[int]] = {}
    kept: list[int] = []
    for row, name in enumerate(ids):
        earlier = kept_of_id.setdefault(name, [])
        if not any(_are_one_item(embeddings[row], embeddings[other]) for other in earlier):
            earlier.append(row)
            kept.append(row)
    return [ids[row] for row in kept], embeddings[kept]


def _are_one_item(first: Tensor, second: Tensor) -> bool:
    """Return whether two embeddings differ only by rounding, as in batches of different sizes."""
    first, second = first.double(), second.double()
    return bool((first - second).norm() <= LARGEST_DIFFERENCE * torch.maximum(first.norm(), second.norm()))
