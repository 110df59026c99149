"""Exact retrieval metrics at the end of every validation and test."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Unpack

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fewshot_callbacks._trainer import evaluation_loaders, log_of_all
from fewshot_callbacks.callbacks._embedder import Embed, Embedder
from fewshot_callbacks.callbacks._evaluation import (
    EvaluationMonitor,
    loader_index,
    no_such_loader,
    stage_of,
    suffixes,
)
from fewshot_callbacks.callbacks._failures import UsageError, without_digits
from fewshot_callbacks.callbacks._progress import evaluation_progress
from fewshot_callbacks.callbacks._targets import TargetBook, target_metrics
from fewshot_callbacks.callbacks._viewers import show_batch, show_set
from fewshot_callbacks.callbacks._watched import watched
from fewshot_callbacks.callbacks.embeddings import (
    STEP_KEYS,
    EmbeddingSource,
    LabelSource,
    Source,
    read_flag,
    read_ids,
)
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional.retrieval import (
    MultilabelReport,
    RetrievalOptions,
    RetrievalReport,
    RetrievalSettings,
    Share,
    evaluate_retrieval,
    shows_settings,
)
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard

# Name of the number of queries without a match, which is logged beside the metrics.
UNMATCHED = "queries_without_match"


@shows_settings()
class RetrievalMonitor(EvaluationMonitor):
    """Logs mAP, Recall@K, precision, recall, F1, recall at fixed precision and Grouped Recall@K of an embedding.

    During validation and test, the embeddings of each step are copied to the CPU. At the end they are evaluated exactly
    over all pairs, in tiles under a memory budget, and then dropped. The values are logged before `ModelCheckpoint` and
    `EarlyStopping` read them, the same on every rank, as `val/mAP`, `val/recall@1`, `val/grouped_recall@1`, `val/f1`,
    `val/recall@precision0.95` and so on (`test/...` in a test). Metrics lie in [0, 1]; larger is better. If a set
    cannot be evaluated, a warning gives the reason and its values are NaN. The model is not touched. Nothing is
    evaluated in the sanity check.

    Queries and gallery can be given in three ways:

    - one loader: each item is a query against all others (leave-one-out). Several loaders are evaluated separately, and
      the keys of each end in its name or index: `val/mAP/dataloader_idx_1`;
    - two loaders: `gallery_loader=1` (or its name) is the gallery, and every other loader is a set of queries;
    - a flag in the batch: `gallery_flag="is_gallery"`, a boolean for each item.

    Labels of shape (items, labels) that hold zeros and ones are multi-label targets: a candidate is relevant if it shares a
    label, and the metrics of `evaluate_multilabel` are logged (`val/mAP`, `val/map@r`, `val/recall@1`, `val/ndcg@10` and so
    on). Settings that need one class for each item are then refused. Under DDP every process receives the whole set.

    One validation runs in this order:

    1. `on_validation_epoch_start` begins a new set, and the callbacks that draw decide whether they will;
    2. `on_validation_batch_start` keeps what the submodule returns from now on, if embeddings come from one;
    3. `on_validation_batch_end` reads embeddings and labels, once, and appends them to the store of their loader;
    4. `on_validation_epoch_end` exchanges the errors of all ranks, and for each set
    5. joins its batches to this rank's part and drops them, evaluates it together with the other ranks,
    6. logs the values, of which checkpoints and early stopping read the same on every rank,
    7. hands the whole set on the first rank to the callbacks that draw it, and drops it;
    8. `on_validation_end`: the pictures forget what they had kept of the batches.

    Args:
        source: Where embeddings come from: two keys of the mapping that the step returns (default
            `("embeddings", "labels")`), the name of a submodule whose output is the embedding, or a function of
            (outputs, batch) that returns (embeddings, labels); or an `EmbeddingSource`, which several monitors can share.
        labels: Where the labels are in the batch, if the step does not return them: a key, a position, or a function of
            the batch.
        embed: For steps that give no embeddings, how each batch is embedded a second time: the name of a submodule that
            is called with the batch's inputs, or a function of (module, batch) that returns embeddings or (embeddings,
            labels). The module is then in evaluation mode, and random states are restored.
        gallery_loader: Index or name of the loader that holds the gallery.
        gallery_flag: Entry of the step's output or of the batch, or function of (outputs, batch), with a boolean for
            each item: whether it belongs to the gallery.
        ids: Entry of the step's output or of the batch, or function of (outputs, batch), with an integer or a word that
            identifies each item, such as its path. An item that occurs more than once is counted once; items of one id
            that differ in embedding or label are a warning. Needed if your own sampler repeats samples; the samples
            that Lightning's `DistributedSampler` repeats to give all processes the same number are dropped without ids.
        name: Part of the keys between the stage and the metric, such as `t2i` for `val/t2i/mAP` and `test/t2i/mAP`. Several
            monitors in one Trainer need different names; one of them may have none.
        prog_bar: Show the first of the metrics in the progress bar.
        strict: Which errors end the run. None: a mistake in the settings or in what a step returns (no embeddings, no
            such loader) ends the run, at the sanity check if there is one; an error that may pass, such as a diverged
            batch, is a warning, once in a run, and the values are NaN. True: every error ends the run. False: no error
            does.
        **settings: See `RetrievalSettings`.

    Attributes:
        reports: The latest report of each set, by the suffix of its keys (`""` for a single loader); empty before the
            first evaluation.

    Raises:
        ValueError: If a setting is unknown or out of range, both gallery arguments are given, or `name` is empty.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> best = ModelCheckpoint(monitor="val/mAP", mode="max")
        >>> trainer = Trainer(callbacks=[RetrievalMonitor(), best], logger=False, accelerator="cpu")
    """

    _remedy_for_two = "Give them different names, such as name='t2i' for val/t2i/mAP."
    _remedy_for_repeats = (
        "Pass ids='key', an entry of the batch or of the step's output that names each item, or let Lightning make the "
        "sampler (Trainer(use_distributed_sampler=True))."
    )

    def __init__(
        self,
        *,
        source: Source | EmbeddingSource = STEP_KEYS,
        labels: LabelSource | None = None,
        embed: Embed | None = None,
        gallery_loader: int | str | None = None,
        gallery_flag: str | Callable[[Any, Any], Tensor] | None = None,
        ids: str | Callable[[Any, Any], Any] | None = None,
        name: str | None = None,
        prog_bar: bool = True,
        strict: bool | None = None,
        **settings: Unpack[RetrievalOptions],
    ) -> None:
        super().__init__(source, labels, strict)
        if gallery_loader is not None and gallery_flag is not None:
            raise ValueError(
                "RetrievalMonitor: gallery_loader and gallery_flag both choose the gallery. Pass one of them."
            )
        self.embed = None if embed is None else Embedder(embed, self._reader, "RetrievalMonitor")
        self._settings = RetrievalSettings.checked(RetrievalMonitor, settings)
        if name is not None and not name.strip("/"):
            raise ValueError(f"RetrievalMonitor(name={name!r}) names nothing. Leave out name for val/mAP and test/mAP.")
        self.gallery_loader, self.gallery_flag, self.ids = gallery_loader, gallery_flag, ids
        self.name, self.prog_bar = name, prog_bar
        self.reports: dict[str, RetrievalReport | MultilabelReport] = {}

    @property
    def report(self) -> RetrievalReport | MultilabelReport | None:
        """The latest report, if there is a single set; for several sets see `reports`."""
        return next(iter(self.reports.values())) if len(self.reports) == 1 else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare for a run."""
        self._book = TargetBook(self._settings, self._policy.owner)
        self._reader.read_labels = self._book.read
        self._left_out: set[str] = set()  # keys that the latest report of their set did not have
        super().setup(trainer, pl_module, stage)
        if self.embed is not None:
            self.embed.check_name(pl_module)

    def _prefix(self, stage: str) -> str:
        return stage if self.name is None else f"{stage}/{self.name}"

    def _embeddings(self, trainer: Trainer, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        if self.embed is None:
            return super()._embeddings(trainer, outputs, batch, step)
        self._reader.dismiss()
        return self.embed.in_evaluation(trainer, trainer.lightning_module, batch)

    def _collect(
        self, trainer: Trainer, loader: int, embeddings: Tensor, labels: Labels, first: int, outputs: Any, batch: Any
    ) -> None:
        places = torch.arange(first, first + len(labels), device="cpu")
        of_batch = (outputs, batch, len(labels), self._policy.owner, self._reader.shared.views)
        names = None if self.ids is None else read_ids(self.ids, *of_batch)
        flag = None if self.gallery_flag is None else read_flag(self.gallery_flag, *of_batch)
        for is_gallery in (False,) if flag is None else (False, True):
            some = slice(None) if flag is None else flag == is_gallery
            self._stores.setdefault((loader, is_gallery), EmbeddingStore()).append(
                embeddings[some], labels[some], places[some], None if names is None else names[some]
            )
        show_batch(trainer, self._prefix(stage_of(trainer)), loader, range(first, first + len(labels)), batch)

    def _forget(self) -> None:
        self._stores: dict[tuple[int, bool], EmbeddingStore] = {}
        self._shards: dict[tuple[int, bool], Shard] = {}

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        self.reports, prefix, gallery = {}, self._prefix(stage), None
        try:
            self._book.join(all_processes())
            gallery = _gallery_index(trainer, self.gallery_loader)
        except ValueError as error:
            failed = dict.fromkeys(range(len(suffixes(trainer))), error)
        for loader, suffix in _query_sets(trainer, gallery).items():
            parts = [(loader, False)]  # queries, and what is searched, if these are two sets
            if gallery is not None or self.gallery_flag is not None:
                parts.append((loader, True) if gallery is None else (gallery, False))
            report, first = None, f"{prefix}/{self._book.metrics[0]}{suffix}"
            with self._policy.handling(f"{first} and the other values of this set are NaN."):
                for part, _ in parts:
                    if part in failed:
                        raise failed[part]
                report = self.reports[suffix] = self._evaluate(trainer, f"{prefix}{suffix}", parts)
            log_of_all(pl_module, self._values(trainer, prefix, suffix, report), first if self.prog_bar else None)
            if report is not None:
                show_set(trainer, prefix, suffix, report, [(self._shards[part], part[0]) for part in parts], self._book)
            self._shards.pop(parts[0], None)  # no other set has these queries: not to be held while it is evaluated

    def _evaluate(
        self, trainer: Trainer, where: str, parts: Sequence[tuple[int, bool]]
    ) -> RetrievalReport | MultilabelReport:
        """Evaluate a set; the report, or the error, is that of every process. Collective."""
        processes = all_processes()
        with processes.together(), evaluation_progress(trainer, f"Retrieval of {where}") as progress:
            shards = [self._joined(trainer, part) for part in parts]
            if self._book.labels is not None:
                return self._book.evaluate(shards, processes, progress)
            return evaluate_retrieval(
                *(part for shard in shards for part in (shard.embeddings, shard.named_labels)),
                share=Share(processes, *(shard.places for shard in shards)),
                progress=progress,
                **self._settings.arguments(),
            )

    def _joined(self, trainer: Trainer, part: tuple[int, bool]) -> Shard:
        """Join the batches of a part, once, and drop them. Collective."""
        if part not in self._shards:
            length = self._unpadded_length(trainer, part[0], ids=self.ids is not None)
            shard = self._shards[part] = self._stores.get(part, EmbeddingStore()).shard(dataset_size=length)
            self._stores.pop(part, None)
            if shard.note is not None:
                self._policy.warn(f"RetrievalMonitor: {shard.note} (Shown once.)", kind="ids")
        return self._shards[part]

    def _values(
        self, trainer: Trainer, prefix: str, suffix: str, report: RetrievalReport | MultilabelReport | None
    ) -> dict[str, float]:
        """List what is logged of a set; without a report NaN for all that it had before, or should have."""
        keys = [f"{prefix}/{name}{suffix}" for name in self._book.metrics]
        unmatched = f"{prefix}/{UNMATCHED}{suffix}"
        if report is None:
            return dict.fromkeys([key for key in (*keys, unmatched) if key not in self._left_out], math.nan)
        for note in report.messages:  # each kind once in a training
            self._policy.warn(f"{prefix}{suffix}: {note}", kind=without_digits(note))
        values = {f"{prefix}/{name}{suffix}": value for name, value in report.metrics().items()}
        waited_for = watched(trainer)
        for key in [key for key in keys if key not in values and key in waited_for]:
            fact = f"{waited_for[key]}(monitor={key!r}): this set has too few classes for it. Monitor another value."
            self._policy.handle(UsageError(fact), f"{key} is NaN.")
            values[key] = math.nan
        self._left_out = self._left_out.difference(keys) | set(keys).difference(values)
        return values | {unmatched: float(report.queries_without_match)}

    def _prepare(self, trainer: Trainer) -> None:
        _gallery_index(trainer, self.gallery_loader)

    def _keys(self, trainer: Trainer) -> Collection[str]:
        gallery = None if self.gallery_loader is None else loader_index(trainer, self.gallery_loader)
        sets = _query_sets(trainer, gallery).values()
        names = {*self._settings.keys(), *target_metrics(self._settings), UNMATCHED}
        return {f"{self._prefix('val')}/{name}{suffix}" for name in names for suffix in sets}


def _gallery_index(trainer: Trainer, gallery: int | str | None) -> int | None:
    """Find the loader that holds the gallery; None where none is given."""
    if gallery is None:
        return None
    index, call = loader_index(trainer, gallery), f"RetrievalMonitor(gallery_loader={gallery!r})"
    if index is None:
        raise UsageError(no_such_loader(trainer, call))
    if len(evaluation_loaders(trainer)) < 2:
        raise UsageError(
            f"{call}: there is one loader only, so there are no queries. Return two loaders, or leave gallery_loader out "
            "for leave-one-out."
        )
    return index


def _query_sets(trainer: Trainer, gallery: int | None) -> dict[int, str]:
    """List the loaders that hold queries, each with the end of its keys."""
    ends = suffixes(trainer)
    single = gallery is not None and len(ends) == 2
    return {loader: "" if single else end for loader, end in enumerate(ends) if loader != gallery}
