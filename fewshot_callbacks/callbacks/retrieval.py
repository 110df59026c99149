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
from fewshot_callbacks.callbacks._two_encoders import TwoEncoders
from fewshot_callbacks.callbacks._viewers import show_batch, show_set
from fewshot_callbacks.callbacks._watched import watched
from fewshot_callbacks.callbacks.embeddings import (
    STEP_KEYS,
    EmbeddingSource,
    Entry,
    LabelSource,
    Source,
    read_codes,
    read_flag,
)
from fewshot_callbacks.distributed.torch_distributed import all_processes, gather_objects
from fewshot_callbacks.functional._labels import Labels, as_labels
from fewshot_callbacks.functional.retrieval import (
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

    Queries and gallery can be given in four ways:

    - one loader: each item is a query against all others (leave-one-out). Several loaders are evaluated separately, and
      the keys of each end in its name or index: `val/mAP/dataloader_idx_1`;
    - two loaders: `gallery_loader=1` (or its name) is the gallery, and every other loader is a set of queries;
    - a flag in the batch: `gallery_flag="is_gallery"`, a boolean for each item;
    - two encoders: `source=("image_embeds", "text_embeds")`, two keys of the step's output that both hold embeddings. Each
      side is searched with the other, and logged as `val/image_to_text/recall@1` and `val/text_to_image/recall@1`. Row i of
      both belong together, unless `labels` says which do: one entry, or one for each side where an image has several texts.

    Labels of shape (items, labels) that hold zeros and ones are several labels an item: a candidate is relevant if it shares
    one, and by default the metrics that `evaluate_retrieval` reports of a relevance are logged (`val/mAP`, `val/recall@1`,
    `val/ndcg@10` and so on). Metrics that need one class for each item are then refused.

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
            the batch. With two encoders also two keys of the step's output or of the batch, one for each side.
        embed: For steps that give no embeddings, how each batch is embedded a second time: the name of a submodule that
            is called with the batch's inputs, or a function of (module, batch) that returns embeddings or (embeddings,
            labels). The module is then in evaluation mode, and random states are restored.
        gallery_loader: Index or name of the loader that holds the gallery.
        gallery_flag: Entry of the step's output or of the batch, or function of (outputs, batch), with a boolean for
            each item: whether it belongs to the gallery.
        exclude: Entries of the step's output or of the batch, such as `("person", "camera")`: a candidate that equals the
            query in all of them is ignored, neither hit nor miss.
        ids: Entry of the step's output or of the batch, or function of (outputs, batch), with an integer or a word that
            identifies each item, such as its path. An item that occurs more than once is counted once; items of one id
            that differ in embedding or label are a warning. Needed if your own sampler repeats samples; the samples
            that Lightning's `DistributedSampler` repeats to give all processes the same number are dropped without ids. With
            two encoders also two entries, one for each side: `("image_id", "caption_id")`.
        name: Part of the keys between the stage and the metric, such as `t2i` for `val/t2i/mAP` and `test/t2i/mAP`. Several
            monitors in one Trainer need different names; one of them may have none.
        prog_bar: Show the first of the metrics in the progress bar.
        strict: Which errors end the run. None: a mistake in the settings or in what a step returns (no embeddings, no
            such loader) ends the run, at the sanity check if there is one; an error that may pass, such as a diverged
            batch, is a warning, once in a run, and the values are NaN. True: every error ends the run. False: no error
            does.
        **settings: See `RetrievalSettings`.

    Attributes:
        reports: The latest report of each set, by the suffix of its keys (`""` for a single loader), after the direction of
            two encoders (`"image_to_text"`); empty before the first evaluation.

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
        labels: LabelSource | tuple[str, str] | None = None,
        embed: Embed | None = None,
        gallery_loader: int | str | None = None,
        gallery_flag: str | Callable[[Any, Any], Tensor] | None = None,
        exclude: Entry | Sequence[str] | None = None,
        ids: Entry | tuple[Entry, Entry] | None = None,
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
        self.gallery_loader, self.gallery_flag, self.exclude, self.ids = gallery_loader, gallery_flag, exclude, ids
        self.name, self.prog_bar = name, prog_bar
        self.reports: dict[str, RetrievalReport] = {}

    @property
    def report(self) -> RetrievalReport | None:
        """The latest report, if there is a single set; for several sets see `reports`."""
        return next(iter(self.reports.values())) if len(self.reports) == 1 else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare for a run."""
        self._reader.read_labels = self._read_labels
        self._form = ""  # of the labels so far
        self._has_sets = self._has_two = False  # items have several labels each; each step gives two embeddings
        self._left_out: set[str] = set()  # keys that the latest report of their set did not have
        super().setup(trainer, pl_module, stage)
        if self.embed is not None:
            self.embed.check_name(pl_module)

    def _prefix(self, stage: str) -> str:
        return stage if self.name is None else f"{stage}/{self.name}"

    def _embeddings(self, trainer: Trainer, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        if self.embed is not None:
            self._reader.dismiss()
            return self.embed.in_evaluation(trainer, trainer.lightning_module, batch)
        pair = self._two.read(outputs, batch, step)
        if pair is None:
            return super()._embeddings(trainer, outputs, batch, step)
        if self.gallery_loader is not None or self.gallery_flag is not None:
            raise UsageError(
                f"RetrievalMonitor(source={self._reader.source!r}): two encoders are queries and gallery of each other. "
                "Leave out gallery_flag and gallery_loader."
            )
        self._has_two = True
        self._other.append(pair[1])
        return pair[0]

    def _read_labels(self, labels: Any, step: str) -> Labels:
        read = as_labels(labels, "labels", self._policy.owner, sets=True)
        if len(read):
            is_set = read.form not in ("words", "integers")
            if self._form not in ("", read.form) and (is_set or self._has_sets):
                raise UsageError(
                    f"{self._policy.owner}: the labels of {step} are {read.form}, those before were {self._form}. Use the "
                    "same form in all batches."
                )
            self._form = read.form
            if is_set and not self._has_sets:
                self._settings.without_classes(self._policy.owner)
                self._has_sets = True
        return read

    def _collect(
        self, trainer: Trainer, loader: int, embeddings: Tensor, labels: Labels, first: int, outputs: Any, batch: Any
    ) -> None:
        places = torch.arange(first, first + len(labels), device="cpu")
        if self._other:
            self._append((loader, False), embeddings, labels, None, outputs, batch)
            self._append((loader, True), *self._other.pop(), None, outputs, batch)
        elif self.gallery_flag is None:
            self._append((loader, False), embeddings, labels, places, outputs, batch)
        else:
            flag = read_flag(
                self.gallery_flag, outputs, batch, len(labels), self._policy.owner, self._reader.shared.views
            )
            for is_gallery in (False, True):
                self._append((loader, is_gallery), embeddings, labels, places, outputs, batch, flag == is_gallery)
        show_batch(trainer, self._prefix(stage_of(trainer)), loader, range(first, first + len(labels)), batch)

    def _append(
        self, part: tuple[int, bool], embeddings: Tensor, labels: Labels, places: Tensor | None, outputs: Any, batch: Any,
        some: Any = slice(None),
    ) -> None:  # fmt: skip
        """Add some items of a batch to a part; without places they follow those that it has."""
        where = self.ids[part[1]] if isinstance(self.ids, tuple | list) else self.ids
        codes = {"ids": where, "exclude": self.exclude}
        of_batch = outputs, batch, len(labels), self._policy.owner, self._reader.shared.views
        ids, groups = (None if one is None else read_codes(name, one, *of_batch)[some] for name, one in codes.items())
        positions = None if places is None else places[some]
        self._stores.setdefault(part, EmbeddingStore()).append(embeddings[some], labels[some], positions, ids, groups)

    def _forget(self) -> None:
        self._two = TwoEncoders(self._reader)
        self._other: list[tuple[Tensor, Labels]] = []  # what a second encoder made of the batch
        self._stores: dict[tuple[int, bool], EmbeddingStore] = {}
        self._shards: dict[tuple[int, bool], Shard] = {}

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        self.reports, gallery = {}, None
        # a process without items has seen no labels
        self._has_sets, self._has_two = map(any, zip(*gather_objects((self._has_sets, self._has_two)), strict=True))
        try:
            gallery = _gallery_index(trainer, self.gallery_loader)
        except ValueError as error:
            failed = dict.fromkeys(range(len(suffixes(trainer))), error)
        for loader, suffix in _query_sets(trainer, gallery).items():
            queries, searched = (loader, False), (loader, True) if gallery is None else (gallery, False)
            if self._has_two:
                one, other = self._two.directions()
                self._measure_set(trainer, pl_module, f"{stage}/{one}", suffix, [queries, searched], failed)
                self._measure_set(trainer, pl_module, f"{stage}/{other}", suffix, [searched, queries], failed)
                self._shards.pop(searched, None)
            else:
                parts = [queries] if gallery is None and self.gallery_flag is None else [queries, searched]
                self._measure_set(trainer, pl_module, stage, suffix, parts, failed)
            self._shards.pop(queries, None)  # no other set has these queries: not to be held while it is evaluated

    def _measure_set(
        self, trainer: Trainer, pl_module: LightningModule, where: str, suffix: str, parts: Sequence[tuple[int, bool]],
        failed: dict[int, Exception],
    ) -> None:  # fmt: skip
        """Evaluate a set, log its values, and hand it to the callbacks that draw. Collective."""
        stage, _, direction = where.partition("/")
        prefix = "/".join(filter(None, (self._prefix(stage), direction)))
        report, first = None, f"{prefix}/{self._metrics[0]}{suffix}"
        with self._policy.handling(f"{first} and the other values of this set are NaN."):
            for part, _ in parts:
                if part in failed:
                    raise failed[part]
            report = self.reports[direction + suffix] = self._evaluate(trainer, f"{prefix}{suffix}", parts)
        log_of_all(pl_module, self._values(trainer, prefix, suffix, report), first if self.prog_bar else None)
        # where an image has several texts, their places are not those of the items of the loader
        if report is not None and (not direction or report.queries == report.gallery):
            show_set(trainer, prefix, suffix, report, [(self._shards[part], part[0]) for part in parts])

    def _evaluate(self, trainer: Trainer, where: str, parts: Sequence[tuple[int, bool]]) -> RetrievalReport:
        """Evaluate a set; the report, or the error, is that of every process. Collective."""
        processes = all_processes()
        groups: dict[str, Any] = {}
        with processes.together(), evaluation_progress(trainer, f"Retrieval of {where}") as progress:
            shards = [self._joined(trainer, part) for part in parts]
            if self.exclude is not None:
                nothing = torch.empty(0, dtype=torch.int64, device="cpu")  # of a process without items
                own = [nothing if shard.groups is None else shard.groups for shard in shards]
                groups = dict(zip(("query_groups", "gallery_groups"), own, strict=False))
            return evaluate_retrieval(
                *(part for shard in shards for part in (shard.embeddings, shard.named_labels)),
                share=Share(processes, *(shard.places for shard in shards)),
                progress=progress,
                **groups,
                **self._settings.arguments(),
            )

    def _joined(self, trainer: Trainer, part: tuple[int, bool]) -> Shard:
        """Join the batches of a part, once, and drop them. Collective."""
        if part not in self._shards:
            length, store = self._unpadded_length(trainer, part[0], ids=self.ids is not None), self._stores.get(part)
            store = EmbeddingStore() if store is None else store
            if self._has_two and not all(gather_objects(len(store) == self._seen[part[0]])):
                length = None  # of the items of the loader; ids tell which of these rows come twice
            shard = self._shards[part] = store.shard(dataset_size=length)
            self._stores.pop(part, None)
            if shard.note is not None:
                self._policy.warn(f"RetrievalMonitor: {shard.note} (Shown once.)", kind="ids")
        return self._shards[part]

    def _values(self, trainer: Trainer, prefix: str, suffix: str, report: RetrievalReport | None) -> dict[str, float]:
        """List what is logged of a set; without a report NaN for all that it had before, or should have."""
        keys = [f"{prefix}/{name}{suffix}" for name in self._metrics]
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

    @property
    def _metrics(self) -> Sequence[str]:
        """The keys of the metrics, also where nothing could be computed."""
        return self._settings.without_classes(self._policy.owner).keys() if self._has_sets else self._settings.keys()

    def _keys(self, trainer: Trainer) -> Collection[str]:
        gallery = None if self.gallery_loader is None else loader_index(trainer, self.gallery_loader)
        sets = _query_sets(trainer, gallery).values()
        names = {*self._metrics, UNMATCHED}
        ways = [""] if not self._has_two else [f"/{direction}" for direction in self._two.directions()]
        return {f"{self._prefix('val')}{way}/{name}{suffix}" for way in ways for name in names for suffix in sets}


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
