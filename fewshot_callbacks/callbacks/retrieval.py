"""Exact retrieval metrics at the end of every validation and test."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, NamedTuple, Unpack

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fewshot_callbacks.callbacks._conduct import FailurePolicy, UsageError, evaluation_progress, without_digits
from fewshot_callbacks.callbacks._embedder import Embed, Embedder, TrainingClasses, TrainingData
from fewshot_callbacks.callbacks._evaluation import (
    EvaluationMonitor,
    Loaders,
    ends_of_loaders,
    loader_index,
    names_of_loaders,
    no_such_loader,
    stage_of,
    step_of,
    suffixes,
)
from fewshot_callbacks.callbacks._viewers import Viewer, show_set
from fewshot_callbacks.callbacks._watched_keys import Better, watchers
from fewshot_callbacks.callbacks.embeddings import (
    STEP_KEYS,
    EmbeddingReader,
    EmbeddingSource,
    Entry,
    LabelSources,
    Source,
    are_zeros_and_ones,
    read_entry,
    read_flag,
    read_names,
)
from fewshot_callbacks.distributed.torch_distributed import all_processes, gather_objects
from fewshot_callbacks.functional._labels import Labels, as_labels, no_labels
from fewshot_callbacks.functional.knn import PLACES, knn_accuracy
from fewshot_callbacks.functional.neighbours import positive_whole
from fewshot_callbacks.functional.retrieval import (
    RequestedMetric,
    RetrievalReport,
    Share,
    evaluate_retrieval,
)
from fewshot_callbacks.functional.retrieval.settings import reported_metrics, several, without_classes
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard
from fewshot_callbacks.settings import RetrievalOptions, RetrievalSettings, UnknownSettingError, from_keywords, takes
from fewshot_callbacks.trainer.loaders import evaluation_loaders

# Name of the number of queries without a match, which is logged beside the metrics once there are any.
UNMATCHED = "queries_without_match"
# Arguments of `evaluate_retrieval`.
GROUPS = ("query_groups", "gallery_groups")
IDS = ("query_ids", "gallery_ids")

# What `evaluate_retrieval` and `RetrievalEvaluation` are given for each item -> where a monitor finds it.
_GROUPS_HINT = "groups=('person', 'camera'), entries of the batch or of the step's output, all of which a group shares"
_IDS_HINT = "ids='path', an entry of the batch or of the step's output that names each item"
_GALLERY_HINT = "gallery=1, the index or the name of the loader, or gallery='is_gallery', an entry of the batch"
_SOURCE_HINT = "source='encoder', a submodule, or source=('embeddings', 'labels'), keys of the step's output"
FUNCTION_ARGUMENTS = {
    **dict.fromkeys(GROUPS, _GROUPS_HINT),
    **dict.fromkeys(IDS, _IDS_HINT),
    **dict.fromkeys(("gallery_labels", "is_gallery"), _GALLERY_HINT),
    "query_labels": "labels='label', an entry of the batch or of the step's output",
    **dict.fromkeys(("queries", "embeddings"), _SOURCE_HINT),
}


def _refuse_groups_of_classes(groups: Any) -> None:
    """Refuse lists of classes, which are the groups of Grouped Recall, where entries of a batch are expected."""
    if isinstance(groups, list | tuple) and any(isinstance(entry, list | tuple) for entry in groups):
        raise ValueError(
            f"RetrievalMonitor(groups={groups!r}): lists name no entry of a batch. Write {_GROUPS_HINT}; groups of classes "
            "for Grouped Recall are label_groups=[[0, 1, 2], [3, 4, 5]]."
        )


# Embeddings of a batch, and their labels.
LabelledEmbeddings = tuple[Tensor, Labels]


class SideKey(NamedTuple):
    """Names one side of an evaluation: the queries or the gallery items that come from one loader."""

    loader: int
    """index of the loader"""
    is_second: bool
    """whether these are the items that a flag assigns to the gallery, or the embeddings of the second encoder"""


class SetSides(NamedTuple):
    """Names a set that is evaluated."""

    direction: str
    """direction of two encoders, such as `image_to_text`; empty for one encoder"""
    suffix: str
    """end of its keys"""
    sides: list[SideKey]
    """its queries and its gallery; one side if the queries search each other"""


@dataclass(eq=False)
class SideCollector:
    """Reads each batch into the stores of its sides, and joins each side at the end of the epoch.

    Each side has an `EmbeddingStore` while batches arrive. `joined` replaces the store by the `Shard` of this process, which
    `keep_shards` and `clear` drop.

    Args:
        reader: Knows the source and the labels.
        settings: Of the evaluation; items that have several labels each rule out some.
        embed: See `RetrievalMonitor`.
        gallery: See there.
        loaders: See there.
        ids: See there.
        groups: See there.
        spill_to: See there.
    """

    reader: EmbeddingReader
    settings: RetrievalSettings
    embed: Embedder | None
    gallery: int | Entry | None
    loaders: Loaders | None
    ids: Entry | Sequence[Entry] | None
    groups: Entry | Sequence[Entry] | None
    spill_to: str | PathLike[str] | None

    def __post_init__(self) -> None:
        # Raises if the folder cannot be written to.
        EmbeddingStore(self.spill_to)
        self.reader.read_labels = self._read_labels
        self.begin()

    def begin(self) -> None:
        """Begin a run, whose steps and labels are not known yet."""
        # form of the labels so far, see `Labels.form`; empty before the first
        self._label_form = ""
        # whether items have several labels each
        self.has_label_sets = False
        # whether each step gives two embeddings
        self.has_two_encoders = False

    def clear(self) -> None:
        """Drop all stores and shards."""
        self.stores: dict[SideKey, EmbeddingStore] = defaultdict(partial(EmbeddingStore, self.spill_to))
        self.shards: dict[SideKey, Shard] = {}

    @property
    def metrics(self) -> Sequence[RequestedMetric]:
        """The metrics, with or without a result."""
        settings = without_classes(self.reader.owner, self.settings) if self.has_label_sets else self.settings
        return reported_metrics(settings)

    @property
    def directions(self) -> tuple[str, str]:
        """Both directions of two encoders: `image_to_text` for `("image_embeds", "text_embeds")`."""
        first, second = (re.sub(r"_(emb|embeds?|embeddings?|features?)$", "", key) for key in self.reader.keys)
        return f"{first}_to_{second}", f"{second}_to_{first}"

    def agree(self) -> None:
        """Learn of labels and encoders from processes that had items. *Collective*."""
        by_rank = gather_objects((self.has_label_sets, self.has_two_encoders))
        self.has_label_sets = any(has_label_sets for has_label_sets, _ in by_rank)
        self.has_two_encoders = any(has_two_encoders for _, has_two_encoders in by_rank)

    def check_gallery(self, trainer: Trainer) -> None:
        """Check that `gallery` names a loader, and that another loader has queries; or that it is an entry of batches.

        Raises:
            UsageError: If there is no such loader, or there are no queries.
        """
        call = f"{self.reader.owner}(gallery={self.gallery!r})"
        index = loader_index(trainer, self.gallery)
        if self.has_two_encoders and self.gallery is not None:
            raise UsageError(f"{call}: two encoders are queries and gallery of each other. Leave out gallery.")
        if index is None and isinstance(self.gallery, int):
            raise UsageError(no_such_loader(trainer, call))
        if index is not None and not self.sets(trainer) and len(suffixes(trainer)) > 1:
            raise UsageError(
                f"{call}, loaders={self.loaders!r}: there are no queries. Name a loader of queries in loaders."
            )
        if index is not None and len(suffixes(trainer)) < 2:
            raise UsageError(
                f"{call}: there is one loader only, so there are no queries. Return two loaders, or leave gallery out for "
                "leave-one-out."
            )

    def _gallery_flag(self, trainer: Trainer) -> Any:
        """Return the entry that flags gallery items in a batch; None if there is none, or the gallery has a loader."""
        is_loader = isinstance(self.gallery, int) or loader_index(trainer, self.gallery) is not None
        return None if is_loader else self.gallery

    def _gallery_loader(self, trainer: Trainer) -> int | None:
        """Return the index of the loader that is the gallery of all others; None if there is none."""
        return loader_index(trainer, self.gallery) if len(suffixes(trainer)) > 1 else None

    def read_loaders(self, trainer: Trainer) -> set[int]:
        """Return the indices of the loaders of queries and of the gallery."""
        loaders = set(ends_of_loaders(trainer, self.loaders))
        gallery = self._gallery_loader(trainer)
        if gallery is not None:
            loaders.add(gallery)
        return loaders

    def sets(self, trainer: Trainer) -> list[SetSides]:
        """Return the sets that are evaluated: one for each loader of queries, or two with two encoders."""
        ends = ends_of_loaders(trainer, self.loaders)
        gallery_loader = self._gallery_loader(trainer)
        query_loaders = [loader for loader in ends if loader != gallery_loader]
        has_one_side = gallery_loader is None and self._gallery_flag(trainer) is None
        sets: list[SetSides] = []
        for loader in query_loaders:
            queries = SideKey(loader, False)
            gallery = SideKey(loader, True) if gallery_loader is None else SideKey(gallery_loader, False)
            suffix = ends[loader]
            if self.has_two_encoders:
                forward, backward = self.directions
                sets.append(SetSides(forward, suffix, [queries, gallery]))
                sets.append(SetSides(backward, suffix, [gallery, queries]))
                continue
            if gallery_loader is not None and len(query_loaders) == 1:
                suffix = ""
            sets.append(SetSides("", suffix, [queries] if has_one_side else [queries, gallery]))
        return sets

    def add(self, trainer: Trainer, loader: int, first: int, outputs: Any, batch: Any) -> tuple[int, Tensor | None]:
        """Add a batch; `first` is the index of its first item in this process's pass.

        Returns:
            The number of its items, and their embeddings; None for the embeddings of two encoders.

        Raises:
            UsageError: If there are no embeddings or labels, or they do not fit each other.
        """
        step = step_of(trainer)
        if self.embed is None:
            both = _read_two_encoders(self.reader, outputs, batch, step, first)
            if both is not None:
                self.has_two_encoders = True
                every_row = slice(None)
                self._append(SideKey(loader, False), both[0], None, every_row, outputs, batch)
                self._append(SideKey(loader, True), both[1], None, every_row, outputs, batch)
                return len(both[0][1]), None
            labelled = self.reader.read(outputs, batch, step)
        else:
            self.reader.stop_capture()
            labelled = self.embed.in_evaluation(trainer, trainer.lightning_module, batch)

        embeddings, labels = labelled
        items = len(labels)
        positions = torch.arange(first, first + items, device="cpu")
        entry = self._gallery_flag(trainer)
        if entry is None:
            self._append(SideKey(loader, False), labelled, positions, slice(None), outputs, batch)
        else:
            hint = "" if callable(entry) else f" Nor is there such a loader; there are {names_of_loaders(trainer)}."
            views = self.reader.embedding_source.views
            is_gallery = read_flag(entry, outputs, batch, items, self.reader.owner, views, hint)
            self._append(SideKey(loader, False), labelled, positions, ~is_gallery, outputs, batch)
            self._append(SideKey(loader, True), labelled, positions, is_gallery, outputs, batch)
        return items, embeddings

    def _append(
        self, key: SideKey, labelled: LabelledEmbeddings, positions: Tensor | None, rows: Any, outputs: Any, batch: Any
    ) -> None:
        """Append rows of a batch, a slice or a mask, to the store of a side; see `EmbeddingStore.append` for positions."""
        embeddings, labels = labelled
        entries = {
            "ids": self.ids[key.is_second] if isinstance(self.ids, tuple | list) else self.ids,
            "groups": self.groups,
        }
        views = self.reader.embedding_source.views
        columns: list[Labels | None] = []
        for argument, entry in entries.items():
            if entry is None:
                columns.append(None)
            else:
                names = read_names(argument, entry, outputs, batch, len(labels), self.reader.owner, views)
                columns.append(names[rows])
        self.stores[key].append(
            embeddings[rows], labels[rows], None if positions is None else positions[rows], *columns
        )

    def joined(self, key: SideKey, items: int, dataset_size: int | None) -> Shard:
        """Return this process's part of a side, without repeated items; its store is dropped. *Collective*.

        Args:
            key: The side.
            items: Number of items that this process has read of the loader.
            dataset_size: See `EmbeddingStore.shard`.
        """
        if key not in self.shards:
            store = self.stores[key]
            if self.has_two_encoders and not all(gather_objects(len(store) == items)):
                # The rows of this side are not the items of the loader, of which only ids tell repeated ones.
                dataset_size = None
            shard = store.shard(dataset_size)
            # A process without items has no ids and groups, but passes them as the others do.
            if self.groups is not None and shard.groups is None:
                shard = shard._replace(groups=no_labels())
            if self.ids is not None and shard.ids is None:
                shard = shard._replace(ids=no_labels())
            self.shards[key] = shard
            del self.stores[key]
        return self.shards[key]

    def keep_shards(self, sets: Sequence[SetSides]) -> None:
        """Drop the shards of all sides but those of these sets."""
        needed = {key for needed_set in sets for key in needed_set.sides}
        self.shards = {key: shard for key, shard in self.shards.items() if key in needed}

    def ids_are_shared(self, sides: Sequence[SideKey]) -> bool:
        """Return whether an id names the same item among the queries and in the gallery.

        Ids of two encoders name different things, such as images and texts.
        """
        return self.ids is not None and len(sides) == 2 and not self.has_two_encoders

    def _read_labels(self, labels: Any, step: str) -> Labels:
        """Read the labels of a step, one or several for each item.

        Raises:
            UsageError: If only some batches have several labels for each item, or a metric needs one.
        """
        owner = self.reader.owner
        item_labels = as_labels(labels, "labels", owner, sets=True)
        if not len(item_labels):
            return item_labels
        form = item_labels.form
        are_sets = form not in ("strings", "integers")
        if self._label_form not in ("", form) and (are_sets or self.has_label_sets):
            raise UsageError(
                f"{owner}: the labels of {step} are {form}, those before were {self._label_form}. Use the same form in all "
                "batches."
            )
        self._label_form = form
        if are_sets and not self.has_label_sets:
            # Raises if a metric was asked for that needs one class for each item.
            without_classes(owner, self.settings)
            self.has_label_sets = True
        return item_labels


def _read_two_encoders(
    reader: EmbeddingReader, outputs: Any, batch: Any, step: str, first: int
) -> list[LabelledEmbeddings] | None:
    """Read the embeddings and labels of two encoders; None unless each key of the source holds embeddings.

    Raises:
        UsageError: If nothing says which rows of the two belong together.
    """
    if not (isinstance(reader.source, tuple) and isinstance(outputs, Mapping)):
        return None
    first_key, second_key = reader.keys
    outputs_of_encoders = (outputs.get(first_key), outputs.get(second_key))
    embeddings = [rows for rows in outputs_of_encoders if isinstance(rows, Tensor)]
    if len(embeddings) < 2 or not all(rows.ndim == 2 and rows.is_floating_point() for rows in embeddings):
        return None
    # Zeros and ones are multi-label targets.
    if embeddings[0].shape[1] != embeddings[1].shape[1] or are_zeros_and_ones(embeddings[1]):
        return None
    reader.stop_capture()
    counts = [len(rows) for rows in embeddings]
    if isinstance(reader.labels, tuple | list):
        labels = [read_entry("labels", entry, outputs, batch, reader.owner) for entry in reader.labels]
    elif reader.labels is not None:
        labels = [reader.find_labels(None, batch, step)] * 2
    elif STEP_KEYS[1] in outputs:
        labels = [outputs[STEP_KEYS[1]]] * 2
    elif counts[0] != counts[1]:
        raise UsageError(
            f"{reader.owner}(source={reader.source!r}): {step} gave {counts[0]} and {counts[1]} embeddings. "
            "Say which belong together: labels=('image_id', 'image_of_caption'), an entry for each side."
        )
    else:
        # Row i of both belong together: each pair has a label that no other pair of any process has.
        positions = torch.arange(first, first + counts[0], device="cpu")
        processes = all_processes()
        labels = [Labels(positions * processes.count + processes.rank)] * 2
    return [reader.check(rows, row_labels, step) for rows, row_labels in zip(embeddings, labels, strict=True)]


class KnnVotes:
    """Classifies queries by a vote of their nearest items of a gallery: the training set, the gallery or the queries.

    Args:
        k: See `RetrievalMonitor`.
        gallery: The `knn_gallery` of it.
        collector: Knows the source, the labels and the settings of the search, and has the queries and the gallery.
    """

    def __init__(self, k: Any, gallery: Any, collector: SideCollector) -> None:
        call = "RetrievalMonitor"
        fix = "Pass numbers of neighbours, such as (10, 20)."
        self.k = [positive_whole(call, "knn", neighbours, fix) for neighbours in several(k)]
        if isinstance(gallery, str) and gallery not in ("train", "gallery", "self"):
            raise ValueError(
                f"{call}(knn_gallery={gallery!r}): choose 'train', 'gallery', 'self', or pass a data set or loader."
            )
        if collector.groups is not None:
            raise ValueError(f"{call}: kNN classification leaves out no neighbour. Pass knn or groups, not both.")
        # names of the accuracies in the log
        self.keys = [f"knn@{k}{name}" for k in dict.fromkeys(self.k) for name in PLACES]
        self.gallery = gallery
        self.collector = collector
        self.settings = collector.settings
        self.embed = collector.embed or Embedder(None, collector.reader)
        data = None if isinstance(gallery, str) else gallery
        self.training = TrainingClasses(data, None, None, self.settings.seed, call, "knn_gallery")
        self.clear()

    def clear(self) -> None:
        """Drop the embedded training items."""
        # those that this process has embedded
        self.store: EmbeddingStore | None = None
        # this process's part of them without repeated items, made from the store when the first set is evaluated
        self.shard: Shard | None = None

    @property
    def needs_training_items(self) -> bool:
        """Whether training items vote."""
        return self.gallery not in ("gallery", "self")

    def check(self, trainer: Trainer, batch: Any, embeddings: Tensor | None) -> None:
        """Check that training items will be embedded as the validation step has embedded this batch.

        Raises:
            UsageError: If the embeddings differ by more than rounding.
        """
        if self.needs_training_items and self.collector.embed is None and embeddings is not None:
            self.embed.check(trainer, trainer.lightning_module, batch, embeddings, self.settings.similarity)

    def embed_training_items(self, trainer: Trainer) -> None:
        """Find the training set, and embed this rank's share of it; in the sanity check find it only."""
        self.store = self.training.embedded(trainer, self.embed)

    def values(self, sides: Sequence[SideKey] | None, set_name: str, policy: FailurePolicy) -> dict[str, float]:
        """Return the accuracies of the queries, by name; NaN after an error. *Collective*.

        Args:
            sides: Those of the set; None if it could not be evaluated.
            set_name: Name of the set, for messages.
            policy: Handles errors, and warns.
        """
        values = dict.fromkeys(self.keys, math.nan)
        if sides is not None:
            with policy.handling(f"{set_name}: {self.keys[0]} and the others of its kind are NaN."):
                values, notes = self._accuracies(sides)
                for note in notes:
                    policy.warn(f"{set_name}, knn: {note} (Shown once.)", kind="knn" + without_digits(note))
        return values

    def _accuracies(self, sides: Sequence[SideKey]) -> tuple[dict[str, float], Sequence[str]]:
        """Return the accuracies of the queries, by name, and notes. *Collective*.

        Args:
            sides: The queries, and the gallery if there is one.

        Raises:
            UsageError: If items have several labels, or training items should vote for two encoders.
        """
        if self.collector.has_label_sets or (self.collector.has_two_encoders and self.needs_training_items):
            raise UsageError(
                "RetrievalMonitor: a vote needs one label for each item, and one encoder if training items vote. Leave out "
                "knn."
            )
        shards = [self.collector.shards[key] for key in sides]
        queries = shards[0]
        processes = all_processes()
        # Without a gallery the queries vote for each other.
        galleries = shards[1:] if self.gallery == "gallery" else []
        with processes.together():
            if self.needs_training_items:
                galleries = [self._training_shard()]
            ids: dict[str, Any] = {}
            if self.gallery == "gallery" and self.collector.ids_are_shared(sides):
                ids = {"query_ids": queries.ids, "gallery_ids": shards[1].ids}
            votes = knn_accuracy(
                *(column for shard in (queries, *galleries) for column in (shard.embeddings, shard.labels)),
                **ids,
                k=self.k,
                temperature=0.07 if self.settings.similarity == "cosine" else None,
                similarity=self.settings.similarity,
                confidence=self.settings.confidence,
                memory_mb=self.settings.memory_mb,
                share=Share(processes, queries.places, *(shard.places for shard in galleries)),
            )
        return votes.values, votes.notes

    def _training_shard(self) -> Shard:
        """Return this process's part of the training items; all sets of a validation share it. *Collective*.

        Raises:
            ValueError: If they were not embedded.
        """
        if self.store is None:
            raise ValueError("RetrievalMonitor: the training items that vote were not embedded.")
        if self.shard is None:
            self.shard = self.store.shard(dataset_size=self.training.items)
        return self.shard


@takes(RetrievalOptions)
class RetrievalMonitor(EvaluationMonitor):
    """Logs mAP, Recall@K, precision, recall, F1, recall at fixed precision and Grouped Recall@K of an embedding.

    During validation and test, the embeddings of each step are copied to the CPU. At the end they are evaluated exactly
    over all pairs, in tiles under a memory budget, and then dropped. The values are logged before `ModelCheckpoint` and
    `EarlyStopping` read them, the same on every rank, as `val/mAP`, `val/recall@1`, `val/grouped_recall@1`, `val/pair_f1`,
    `val/recall@precision0.95` and so on (`test/...` in a test). Metrics lie in [0, 1]; larger is better. Queries without a
    relevant item are left out of the means, and counted in `val/queries_without_match` once there are any. If a set
    cannot be evaluated, a warning gives the reason and its values are NaN. The model is not touched. Nothing is
    evaluated in the sanity check.

    Queries and gallery can be given in four ways:

    - one loader: each item is a query against all others (leave-one-out). Several loaders are evaluated separately, and
      the keys of each end in its name or index: `val/mAP/dataloader_idx_1`;
    - two loaders: `gallery=1` (or its name) is the gallery, and every other loader is a set of queries;
    - a flag in the batch: `gallery="is_gallery"`, a boolean for each item;
    - two encoders: `source=("image_embeds", "text_embeds")`, two keys of the step's output that both hold embeddings. Each
      side is searched with the other, and logged as `val/image_to_text/recall@1` and `val/text_to_image/recall@1`. Row i of
      both belong together, unless `labels` says which do: one entry, or one for each side where an image has several texts.

    Labels of shape (items, labels) that hold zeros and ones are several labels for each item: a candidate is relevant if it
    shares one. By default the metrics that `evaluate_retrieval` reports of a relevance are then logged (`val/mAP`,
    `val/recall@1`, `val/ndcg@10` and so on). Metrics that need one class for each item are then refused.

    One validation runs in this order:

    1. `on_validation_epoch_start` begins a new set, and the callbacks that draw decide whether they will;
    2. `on_validation_batch_start` keeps what the submodule returns from now on, if embeddings come from one;
    3. `on_validation_batch_end` reads embeddings and labels, once, and appends them to the store of their loader; after the
       first batch it embeds the training items that vote (`knn`);
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
        gallery: Index or name of the loader that holds the gallery; or, if no loader has that name, an entry of the step's
            output or of the batch, or a function of (outputs, batch), with a boolean for each item: whether it is of the
            gallery.
        loaders: Index or name of the loader that is measured, or several, such as `("retrieval",)` where the steps of
            another loader give no embeddings. By default all are measured. A gallery need not be named here. The keys of a
            single set have no ending.
        groups: Entries of the step's output or of the batch, such as `("person", "camera")`, or positions in the batch,
            such as `(1, 2)`: a candidate that equals the query in all of them is ignored, neither hit nor miss. They make
            the `query_groups` and `gallery_groups` of `evaluate_retrieval`.
        ids: Entry of the step's output or of the batch, position in the batch, or function of (outputs, batch), with an
            integer or a string that identifies each item, such as its path. An item that occurs more than once is counted
            once, and no query finds the item of its id in a gallery; items of one id that differ in embedding or label are
            a warning. Needed if your own sampler, or the workers of an iterable data set, repeat samples; the samples that
            Lightning's `DistributedSampler` repeats to give all processes the same number are dropped without ids. With
            two encoders also two entries, one for each side: `("image_id", "caption_id")`.
        spill_to: A folder on a disk, for validation sets larger than memory: embeddings are written to a file in it, and
            read from there as they are needed. It has no name, and vanishes after the evaluation.
        knn: Numbers of neighbours that vote for the label of a query, or one, such as (10, 20, 100, 200), see
            `knn_accuracy`; logged as `val/knn@20`, and `val/knn@20_top5` where the five classes with the most votes count.
            None for no vote. Votes are weighted by the cosine; of other similarities they are equal. Each process holds
            all items that vote while they are searched.
        knn_gallery: What votes: `train`, `gallery` (without a gallery the set itself) or `self`, the queries without the
            query itself. `train` is the result of `training_data_for_evaluation()` of the Trainer's data module, as the data
            modules of this package have it; or pass a data set, a loader of one, or a function of the Trainer, with the
            transforms of an evaluation. It is embedded once in each validation, as `embed` says or else by the module, after
            the first batch and so with the weights of the steps.
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
        ValueError: If a setting is unknown or out of range, or `name` is empty.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> best = ModelCheckpoint(monitor="val/mAP", mode="max")
        >>> trainer = Trainer(callbacks=[RetrievalMonitor(), best], logger=False, accelerator="cpu")
    """

    _remedy_for_logged_twice = ", or pass name='exact' for val/exact/mAP"
    _remedy_for_weights = " Or let the queries vote themselves, knn_gallery='self'."
    _remedy_for_two = "Give them different names, such as name='t2i' for val/t2i/mAP."
    _remedy_for_repeats = (
        "Pass ids='key', an entry of the batch or of the step's output that names each item, or let Lightning make the "
        "sampler (Trainer(use_distributed_sampler=True))."
    )

    def __init__(
        self,
        *,
        source: Source | EmbeddingSource = STEP_KEYS,
        labels: LabelSources | None = None,
        embed: Embed | None = None,
        gallery: int | Entry | None = None,
        loaders: Loaders | None = None,
        groups: Entry | Sequence[Entry] | None = None,
        ids: Entry | tuple[Entry, Entry] | None = None,
        spill_to: str | PathLike[str] | None = None,
        knn: int | Sequence[int] | None = None,
        knn_gallery: str | TrainingData = "train",
        name: str | None = None,
        prog_bar: bool = True,
        strict: bool | None = None,
        **settings: Unpack[RetrievalOptions],
    ) -> None:
        super().__init__(source, labels, strict)
        self._reader.can_embed = True
        for setting in settings:
            if setting in FUNCTION_ARGUMENTS:
                fix = FUNCTION_ARGUMENTS[setting]
                raise UnknownSettingError(f"RetrievalMonitor: {setting} is no setting. Write {fix}.")
        _refuse_groups_of_classes(groups)
        evaluation = from_keywords(RetrievalMonitor, settings)
        if name is not None and not name.strip("/"):
            raise ValueError(f"RetrievalMonitor(name={name!r}) names nothing. Leave out name for val/mAP and test/mAP.")
        embedder = None if embed is None else Embedder(embed, self._reader)
        self._collector = SideCollector(self._reader, evaluation, embedder, gallery, loaders, ids, groups, spill_to)
        self._knn = None if knn is None else KnnVotes(knn, knn_gallery, self._collector)
        self.name = name
        self.prog_bar = prog_bar
        self.loaders = loaders
        self.reports: dict[str, RetrievalReport] = {}

    @property
    def report(self) -> RetrievalReport | None:
        """The latest report, if there is a single set; for several sets see `reports`."""
        return next(iter(self.reports.values())) if len(self.reports) == 1 else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: forget the run before."""
        self._collector.begin()
        if self._knn is not None:
            self._knn.training.begin()
        # keys of metrics that the latest report of their set did not have
        self._undefined_keys: set[str] = set()
        # keys of numbers of queries without a match that are logged: there have been such queries, or somebody waits for it
        self._unmatched_keys: set[str] = set()
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hook to the submodule that embeddings come from; check that the module has the submodule of `embed`."""
        super().on_fit_start(trainer, pl_module)
        if self._collector.embed is not None:
            self._collector.embed.check_name(pl_module)

    def _prefix(self, stage: str) -> str:
        return stage if self.name is None else f"{stage}/{self.name}"

    def _key(self, stage: str, *names: str) -> str:
        """Return the prefix of a stage and these names, joined by slashes; empty names are skipped."""
        return "/".join(filter(None, (self._prefix(stage), *names)))

    def _read_loaders(self, trainer: Trainer) -> set[int]:
        return self._collector.read_loaders(trainer)

    def _collect(self, trainer: Trainer, loader: int, first: int, outputs: Any, batch: Any) -> int:
        """Add a batch to the stores, and show it to the callbacks that draw."""
        items, embeddings = self._collector.add(trainer, loader, first, outputs, batch)
        if self._knn is not None and first == 0:
            self._knn.check(trainer, batch, embeddings)
        prefix = self._prefix(stage_of(trainer))
        loader_name, dataloader = list(evaluation_loaders(trainer).items())[loader]
        for viewer in viewers_of(trainer, prefix):
            viewer.see_batch(prefix, loader_name, dataloader, range(first, first + items), batch)
        return items

    def _forget(self) -> None:
        self._collector.clear()
        if self._knn is not None:
            self._knn.clear()

    def _prepare(self, trainer: Trainer) -> None:
        self._collector.check_gallery(trainer)

    def _needs_training_items(self, trainer: Trainer) -> bool:
        return self._knn is not None and self._knn.needs_training_items

    def _embed_training_items(self, trainer: Trainer) -> None:
        assert self._knn is not None
        self._knn.embed_training_items(trainer)

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        """Evaluate the sets one after the other. *Collective*."""
        self.reports = {}
        self._collector.agree()
        sets = self._collector.sets(trainer)
        for number, evaluated_set in enumerate(sets):
            self._measure_set(trainer, pl_module, stage, evaluated_set, failed)
            # The embeddings of this set alone are freed before the next evaluation takes memory.
            self._collector.keep_shards(sets[number + 1 :])

    def _measure_set(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, evaluated_set: SetSides,
        failed: dict[int, Exception],
    ) -> None:  # fmt: skip
        """Evaluate a set, log its values on every rank, and hand it to the callbacks that draw. *Collective*."""
        direction, suffix, sides = evaluated_set
        prefix = self._key(stage, direction)
        set_name = f"{prefix}{suffix}"
        first_key = f"{prefix}/{self._collector.metrics[0].key}{suffix}"
        report = None
        with self._policy.handling(f"{first_key} and the other values of this set are NaN."):
            for key in sides:
                if key.loader in failed:
                    raise failed[key.loader]
            report = self._evaluate(trainer, set_name, sides)
            self.reports[direction + suffix] = report
        values = self._values(trainer, prefix, suffix, report)
        self._log(trainer, pl_module, values, first_key if self.prog_bar else None)
        if self._knn is not None:
            votes = self._knn.values(None if report is None else sides, set_name, self._policy)
            self._log(trainer, pl_module, {f"{prefix}/{name}{suffix}": value for name, value in votes.items()})
        viewers = viewers_of(trainer, prefix)
        # If an image has several texts, rows of one side are not items of the loader, which viewers would read.
        if viewers and report is not None and (not direction or report.queries == report.gallery):
            shards = [(self._collector.shards[key], key.loader) for key in sides]
            show_set(viewers, trainer, prefix, suffix, report, shards)

    def _evaluate(self, trainer: Trainer, set_name: str, sides: Sequence[SideKey]) -> RetrievalReport:
        """Return the report of a set, the same in every process; an error of one is raised in all. *Collective*."""
        processes = all_processes()
        with processes.together(), evaluation_progress(trainer, f"Retrieval of {set_name}") as progress:
            shards: list[Shard] = []
            for key in sides:
                size = self._unpadded_length(trainer, key.loader, ids=self._collector.ids is not None)
                shard = self._collector.joined(key, self._seen[key.loader], size)
                if shard.note is not None:
                    self._policy.warn(f"RetrievalMonitor: {shard.note} (Shown once.)", kind="ids")
                shards.append(shard)
            columns: dict[str, Any] = dict(zip(GROUPS, (shard.groups for shard in shards), strict=False))
            if self._collector.ids_are_shared(sides):
                columns |= dict(zip(IDS, (shard.ids for shard in shards), strict=True))
            return evaluate_retrieval(
                *(column for shard in shards for column in (shard.embeddings, shard.labels)),
                share=Share(processes, *(shard.places for shard in shards)),
                progress=progress,
                **columns,
                **self._collector.settings.arguments(),
            )

    def _values(self, trainer: Trainer, prefix: str, suffix: str, report: RetrievalReport | None) -> dict[str, float]:
        """Return key -> value of a set; without a report NaN for the keys that its latest report had, or would have."""
        keys = [f"{prefix}/{metric.key}{suffix}" for metric in self._collector.metrics]
        unmatched_key = f"{prefix}/{UNMATCHED}{suffix}"
        monitored_by = {watcher.key: watcher.name for watcher in watchers(trainer)}
        # Zeros alone would say nothing; a chart that has begun goes on with zeros.
        if unmatched_key in monitored_by or (report is not None and report.queries_without_match):
            self._unmatched_keys.add(unmatched_key)
        if report is None:
            expected = [key for key in keys if key not in self._undefined_keys]
            if unmatched_key in self._unmatched_keys:
                expected.append(unmatched_key)
            return dict.fromkeys(expected, math.nan)
        for note in report.messages:
            self._policy.warn(f"{prefix}{suffix}: {note}", kind=without_digits(note))
        values = {f"{prefix}/{name}{suffix}": value for name, value in report.metrics().items()}
        for key in keys:
            if key not in values and key in monitored_by:
                fact = f"{monitored_by[key]}(monitor={key!r}): this set has too few classes for it. "
                fact += report.fact_of_classes
                fix = "Monitor another value, or give the RetrievalMonitor a smaller label_groups."
                self._policy.handle(UsageError(f"{fact.rstrip()} {fix}"), f"{key} is NaN.")
                values[key] = math.nan
        self._undefined_keys.difference_update(keys)
        self._undefined_keys.update(key for key in keys if key not in values)
        if unmatched_key in self._unmatched_keys:
            values[unmatched_key] = float(report.queries_without_match)
        return values

    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        better: dict[str, Better] = {requested.key: requested.metric.better for requested in self._collector.metrics}
        if self._knn is not None:
            better |= dict.fromkeys(self._knn.keys, "higher")
        better[UNMATCHED] = None
        keys: dict[str, Better] = {}
        for evaluated_set in self._collector.sets(trainer):
            for name, direction in better.items():
                keys[self._key("val", evaluated_set.direction, name) + evaluated_set.suffix] = direction
        return keys


def viewers_of(trainer: Trainer, prefix: str) -> list[Viewer]:
    """Return the callbacks of a Trainer that want to see the sets of this epoch whose keys begin with the prefix."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    return [callback for callback in callbacks if isinstance(callback, Viewer) and callback.wants(prefix)]
