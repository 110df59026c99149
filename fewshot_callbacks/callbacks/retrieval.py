"""Exact retrieval metrics at the end of every validation and test."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Unpack

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
    RetrievalReport,
    Share,
    evaluate_retrieval,
    requested_metric,
)
from fewshot_callbacks.functional.retrieval.settings import reported_keys, several, without_classes
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard
from fewshot_callbacks.settings import RetrievalOptions, RetrievalSettings, UnknownSettingError, from_keywords, takes
from fewshot_callbacks.trainer.loaders import evaluation_loaders

# Name of the number of queries without a match, which is logged beside the metrics once there are any.
UNMATCHED = "queries_without_match"
# Arguments of `evaluate_retrieval`.
GROUPS = ("query_groups", "gallery_groups")
IDS = ("query_ids", "gallery_ids")

# What `evaluate_retrieval` and `RetrievalEvaluation` are given for each item -> where a monitor finds it.
_EXCLUDE = "exclude=('person', 'camera'), entries of the batch or of the step's output, all of which a group shares"
_IDS = "ids='path', an entry of the batch or of the step's output that names each item"
_GALLERY = "gallery=1, the index or the name of the loader, or gallery='is_gallery', an entry of the batch"
OF_FUNCTIONS = {
    **dict.fromkeys(GROUPS, _EXCLUDE),
    "groups": f"{_EXCLUDE}; groups of classes for Grouped Recall are label_groups=[[0, 1, 2], [3, 4, 5]]",
    **dict.fromkeys(IDS, _IDS),
    **dict.fromkeys(("gallery_labels", "is_gallery"), _GALLERY),
    "embeddings": "source='encoder', a submodule, or source=('embeddings', 'labels'), keys of the step's output",
}


Side = tuple[Tensor, Labels]

# Index of a loader, and whether it is its gallery, or what the second of two encoders made of it.
Part = tuple[int, bool]


@dataclass(eq=False)
class Parts:
    """Reads what each batch adds to the queries and to the gallery: of one encoder, or of two that search each other.

    Args:
        reader: Knows the source and the labels.
        settings: Of the evaluation; items that have several labels each rule out some.
        embed: See `RetrievalMonitor`.
        gallery: See there.
        loaders: See there.
        ids: See there.
        exclude: See there.
        spill_to: See there.
    """

    reader: EmbeddingReader
    settings: RetrievalSettings
    embed: Embedder | None
    gallery: int | Entry | None
    loaders: Loaders | None
    ids: Entry | Sequence[Entry] | None
    exclude: Entry | Sequence[Entry] | None
    spill_to: str | PathLike[str] | None

    def __post_init__(self) -> None:
        EmbeddingStore(self.spill_to)  # a folder that is none is told at once
        self.reader.read_labels = self._read_labels
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._form = ""  # of the labels so far
        self.have_sets = self.are_two = False  # items have several labels each; each step gives two embeddings

    def clear(self) -> None:
        """Begin a validation: drop what was collected."""
        self.stores: dict[Part, EmbeddingStore] = defaultdict(partial(EmbeddingStore, self.spill_to))
        self.shards: dict[Part, Shard] = {}

    @property
    def metrics(self) -> Sequence[str]:
        """The keys of the metrics, also where nothing could be computed."""
        settings = without_classes(self.reader.owner, self.settings) if self.have_sets else self.settings
        return reported_keys(settings)

    @property
    def directions(self) -> tuple[str, str]:
        """Both directions of two encoders: `image_to_text` for `("image_embeds", "text_embeds")`."""
        one, other = (re.sub(r"_(emb|embeds?|embeddings?|features?)$", "", key) for key in self.reader.keys)
        return f"{one}_to_{other}", f"{other}_to_{one}"

    def agree(self) -> None:
        """Learn what other processes have seen: one without items has seen no labels. Collective."""
        self.have_sets, self.are_two = map(any, zip(*gather_objects((self.have_sets, self.are_two)), strict=True))

    def check_gallery(self, trainer: Trainer) -> None:
        """See that the gallery can be told from the queries.

        Raises:
            UsageError: If there is no such loader, or nothing that it could be the gallery of.
        """
        call, index = f"{self.reader.owner}(gallery={self.gallery!r})", loader_index(trainer, self.gallery)
        if self.are_two and self.gallery is not None:
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

    def _flag(self, trainer: Trainer) -> Any:
        """Return what tells the items of the gallery in a batch; None where they have a loader."""
        is_loader = isinstance(self.gallery, int) or loader_index(trainer, self.gallery) is not None
        return None if is_loader else self.gallery

    def _gallery_loader(self, trainer: Trainer) -> int | None:
        """Return the index of the loader that is searched; None where the items of a loader search each other."""
        return loader_index(trainer, self.gallery) if len(suffixes(trainer)) > 1 else None

    def read_loaders(self, trainer: Trainer) -> set[int]:
        """Return the indices of the loaders of queries and of the gallery."""
        gallery = self._gallery_loader(trainer)
        return set(ends_of_loaders(trainer, self.loaders)) | ({gallery} if gallery is not None else set())

    def sets(self, trainer: Trainer) -> list[tuple[str, str, list[Part]]]:
        """List the sets: the direction of two encoders, or nothing; the end of its keys; its queries, and its gallery."""
        found: list[tuple[str, str, list[Part]]] = []
        ends, gallery = ends_of_loaders(trainer, self.loaders), self._gallery_loader(trainer)
        queries_of = [loader for loader in ends if loader != gallery]
        for loader in queries_of:
            queries: Part = (loader, False)
            searched: Part = (loader, True) if gallery is None else (gallery, False)
            if self.are_two:
                pairs = zip(self.directions, ([queries, searched], [searched, queries]), strict=True)
                found += [(direction, ends[loader], parts) for direction, parts in pairs]
            else:
                is_one = gallery is None and self._flag(trainer) is None
                suffix = "" if gallery is not None and len(queries_of) == 1 else ends[loader]
                found.append(("", suffix, [queries] if is_one else [queries, searched]))
        return found

    def add(self, trainer: Trainer, loader: int, first: int, outputs: Any, batch: Any) -> tuple[int, Tensor | None]:
        """Add a batch; `first` is the index of its first item in this process's pass.

        Returns:
            The number of its items, and their embeddings by one encoder.

        Raises:
            UsageError: If there are no embeddings or labels, or they do not fit each other.
        """
        if self.embed is not None:
            self.reader.dismiss()
            side: Side = self.embed.in_evaluation(trainer, trainer.lightning_module, batch)
        elif (sides := _two_sides(self.reader, outputs, batch, step_of(trainer), first)) is not None:
            self.are_two = True
            for is_other, each in enumerate(sides):
                self._append((loader, bool(is_other)), each, None, slice(None), outputs, batch)
            return len(sides[0][1]), None
        else:
            side = self.reader.read(outputs, batch, step_of(trainer))
        items, owner, views = len(side[1]), self.reader.owner, self.reader.shared.views
        some: dict[bool, Any] = {False: slice(None)}
        if (where := self._flag(trainer)) is not None:
            hint = "" if callable(where) else f" Nor is there such a loader; there are {names_of_loaders(trainer)}."
            flag = read_flag(where, outputs, batch, items, owner, views, hint)
            some = {False: ~flag, True: flag}
        places = torch.arange(first, first + items, device="cpu")
        for is_gallery, rows in some.items():
            self._append((loader, is_gallery), side, places, rows, outputs, batch)
        return items, side[0]

    def _append(self, part: Part, side: Side, places: Tensor | None, some: Any, outputs: Any, batch: Any) -> None:
        """Add some items of a batch to a part; without places they follow those that it has."""
        embeddings, labels = side
        entries = {
            "ids": self.ids[part[1]] if isinstance(self.ids, tuple | list) else self.ids,
            "exclude": self.exclude,
        }
        of_batch = outputs, batch, len(labels), self.reader.owner, self.reader.shared.views
        ids, groups = (None if one is None else read_names(name, one, *of_batch)[some] for name, one in entries.items())
        positions = None if places is None else places[some]
        self.stores[part].append(embeddings[some], labels[some], positions, ids, groups)

    def joined(self, part: Part, items: int, dataset_size: int | None) -> Shard:
        """Join the batches of a part, once, and drop them. Collective.

        Args:
            part: Which.
            items: How many this process has read of its loader.
            dataset_size: See `EmbeddingStore.shard`.
        """
        if part not in self.shards:
            store = self.stores[part]
            if self.are_two and not all(gather_objects(len(store) == items)):
                dataset_size = None  # of the items of the loader; ids tell which of these rows come twice
            shard = store.shard(dataset_size)
            if self.exclude is not None and shard.groups is None:  # of a process without items
                shard = shard._replace(groups=no_labels())
            if self.ids is not None and shard.ids is None:
                shard = shard._replace(ids=no_labels())
            self.shards[part] = shard
            del self.stores[part]
        return self.shards[part]

    def ids_are_shared(self, parts: Sequence[Part]) -> bool:
        """Return whether an id names the same item among the queries and in the gallery.

        Those of two encoders name different things, such as images and texts.
        """
        return self.ids is not None and len(parts) == 2 and not self.are_two

    def _read_labels(self, labels: Any, step: str) -> Labels:
        read, owner = as_labels(labels, "labels", self.reader.owner, sets=True), self.reader.owner
        if len(read):
            is_set = read.form not in ("strings", "integers")
            if self._form not in ("", read.form) and (is_set or self.have_sets):
                raise UsageError(
                    f"{owner}: the labels of {step} are {read.form}, those before were {self._form}. Use the same form in "
                    "all batches."
                )
            self._form = read.form
            if is_set and not self.have_sets:
                without_classes(owner, self.settings)
                self.have_sets = True
        return read


def _two_sides(reader: EmbeddingReader, outputs: Any, batch: Any, step: str, first: int) -> list[Side] | None:
    """Read the embeddings and labels of both sides; None unless each key of the source holds embeddings."""
    if not (isinstance(reader.source, tuple) and isinstance(outputs, Mapping)):
        return None
    sides = [side for key in reader.keys if isinstance(side := outputs.get(key), Tensor)]
    if len(sides) < 2 or not all(side.ndim == 2 and side.is_floating_point() for side in sides):
        return None
    # zeros and ones are labels: those of items with several each
    if sides[0].shape[1] != sides[1].shape[1] or are_zeros_and_ones(sides[1]):
        return None
    reader.dismiss()
    if isinstance(reader.labels, tuple | list):
        labels = [read_entry("labels", entry, outputs, batch, reader.owner) for entry in reader.labels]
    elif reader.labels is not None:
        labels = [reader.labels_of(None, batch, step)] * 2
    elif STEP_KEYS[1] in outputs:
        labels = [outputs[STEP_KEYS[1]]] * 2
    elif len(sides[0]) != len(sides[1]):
        raise UsageError(
            f"{reader.owner}(source={reader.source!r}): {step} gave {len(sides[0])} and {len(sides[1])} embeddings. "
            "Say which belong together: labels=('image_id', 'image_of_caption'), an entry for each side."
        )
    else:  # a label for each row, another one than all other rows have, in every process
        rows, processes = torch.arange(first, first + len(sides[0]), device="cpu"), all_processes()
        labels = [Labels(rows * processes.count + processes.rank)] * 2
    return [reader.checked(side, own, step) for side, own in zip(sides, labels, strict=True)]


class Voters:
    """Classifies queries by a vote of their nearest items of a bank: the training set, the gallery or the queries.

    Args:
        k: See `RetrievalMonitor`.
        bank: See there.
        parts: Know the source, the labels and the settings of the search.
    """

    def __init__(self, k: Any, bank: Any, parts: Parts) -> None:
        call, fix = "RetrievalMonitor", "Pass numbers of neighbours, such as (10, 20)."
        self.k = [positive_whole(call, "knn", each, fix) for each in several(k)]
        if isinstance(bank, str) and bank not in ("train", "gallery", "self"):
            raise ValueError(
                f"{call}(knn_bank={bank!r}): choose 'train', 'gallery', 'self', or pass a data set or loader."
            )
        if parts.exclude is not None:
            raise ValueError(f"{call}: kNN classification leaves out no neighbour. Pass knn or exclude, not both.")
        self.keys = [f"knn@{k}{name}" for k in dict.fromkeys(self.k) for name in PLACES]  # of what is logged
        self.bank, self.parts, self.settings = bank, parts, parts.settings
        self.embed = parts.embed or Embedder(None, parts.reader)
        data = None if isinstance(bank, str) else bank
        self.training = TrainingClasses(data, None, None, self.settings.seed, call, "knn_bank")
        self.clear()

    def clear(self) -> None:
        """Begin a validation: drop what was embedded."""
        self.store: EmbeddingStore | None = None  # what this process has embedded of the training set
        self.shard: Shard | None = None  # its part of the whole

    @property
    def trains(self) -> bool:
        """Whether training items vote."""
        return self.bank not in ("gallery", "self")

    def check(self, trainer: Trainer, batch: Any, given: Tensor | None) -> None:
        """See that training items are embedded as the step embeds those of validation."""
        if self.trains and self.parts.embed is None and given is not None:
            self.embed.check(trainer, trainer.lightning_module, batch, given, self.settings.similarity)

    def prepare(self, trainer: Trainer) -> None:
        """Find the training set, and embed this rank's share outside of the sanity check."""
        self.store = self.training.embedded(trainer, self.embed)

    def values(self, parts: Sequence[Part] | None, where: str, policy: FailurePolicy) -> dict[str, float]:
        """Return the accuracies of the queries, NaN where the set could not be evaluated. Collective."""
        values = dict.fromkeys(self.keys, math.nan)
        if parts is not None:
            with policy.handling(f"{where}: {self.keys[0]} and the others of its kind are NaN."):
                values, notes = self._accuracies(parts)
                for note in notes:
                    policy.warn(f"{where}, knn: {note} (Shown once.)", kind="knn" + without_digits(note))
        return values

    def _accuracies(self, parts: Sequence[Part]) -> tuple[dict[str, float], Sequence[str]]:
        """Return the accuracies of the queries, and notes. Collective.

        Args:
            parts: The queries, and the gallery if there is one.

        Raises:
            UsageError: If there is no one label to vote for.
        """
        if self.parts.have_sets or (self.parts.are_two and self.trains):
            raise UsageError(
                "RetrievalMonitor: a vote needs one label for each item, and one encoder if training items vote. Leave out "
                "knn."
            )
        shards = [self.parts.shards[part] for part in parts]
        processes, queries, bank = all_processes(), shards[0], shards[1:] if self.bank == "gallery" else ()
        with processes.together():
            if self.trains:
                if self.store is None:  # without it the queries would vote for each other
                    raise ValueError("RetrievalMonitor: the training items that vote were not embedded.")
                if self.shard is None:
                    self.shard = self.store.shard(dataset_size=self.training.items)
                bank = [self.shard]
            ids: dict[str, Any] = {}
            if self.bank == "gallery" and self.parts.ids_are_shared(parts):
                ids = {"ids": queries.ids, "bank_ids": self.parts.shards[parts[1]].ids}
            found = knn_accuracy(
                *(part for shard in (queries, *bank) for part in (shard.embeddings, shard.labels)),
                **ids,
                k=self.k,
                temperature=0.07 if self.settings.similarity == "cosine" else None,
                similarity=self.settings.similarity,
                confidence=self.settings.confidence,
                memory_mb=self.settings.memory_mb,
                share=Share(processes, queries.places, *(shard.places for shard in bank)),
            )
        return found.values, found.notes


@takes(RetrievalOptions)
class RetrievalMonitor(EvaluationMonitor):
    """Logs mAP, Recall@K, precision, recall, F1, recall at fixed precision and Grouped Recall@K of an embedding.

    During validation and test, the embeddings of each step are copied to the CPU. At the end they are evaluated exactly
    over all pairs, in tiles under a memory budget, and then dropped. The values are logged before `ModelCheckpoint` and
    `EarlyStopping` read them, the same on every rank, as `val/mAP`, `val/recall@1`, `val/grouped_recall@1`, `val/f1`,
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
        exclude: Entries of the step's output or of the batch, such as `("person", "camera")`, or positions in the batch,
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
            the whole bank while it is searched.
        knn_bank: What votes: `train`, `gallery` (without a gallery the set itself) or `self`, the queries without the query
            itself. `train` is the result of `training_data_for_evaluation()` of the Trainer's data module, as the data
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
    _remedy_for_weights = " Or let the queries vote themselves, knn_bank='self'."
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
        exclude: Entry | Sequence[Entry] | None = None,
        ids: Entry | tuple[Entry, Entry] | None = None,
        spill_to: str | PathLike[str] | None = None,
        knn: int | Sequence[int] | None = None,
        knn_bank: str | TrainingData = "train",
        name: str | None = None,
        prog_bar: bool = True,
        strict: bool | None = None,
        **settings: Unpack[RetrievalOptions],
    ) -> None:
        super().__init__(source, labels, strict)
        self._reader.can_embed = True
        for setting in settings:
            if setting in OF_FUNCTIONS:
                raise UnknownSettingError(f"RetrievalMonitor: {setting} is no setting. Write {OF_FUNCTIONS[setting]}.")
        given = from_keywords(RetrievalMonitor, settings)
        if name is not None and not name.strip("/"):
            raise ValueError(f"RetrievalMonitor(name={name!r}) names nothing. Leave out name for val/mAP and test/mAP.")
        embedder = None if embed is None else Embedder(embed, self._reader)
        self._parts = Parts(self._reader, given, embedder, gallery, loaders, ids, exclude, spill_to)
        self._voters = None if knn is None else Voters(knn, knn_bank, self._parts)
        self.name, self.prog_bar, self.loaders = name, prog_bar, loaders
        self.reports: dict[str, RetrievalReport] = {}

    @property
    def report(self) -> RetrievalReport | None:
        """The latest report, if there is a single set; for several sets see `reports`."""
        return next(iter(self.reports.values())) if len(self.reports) == 1 else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare for a run."""
        self._parts.begin()
        if self._voters is not None:
            self._voters.training.begin()
        self._left_out: set[str] = set()  # keys that the latest report of their set did not have
        self._counted: set[str] = set()  # those of the queries without a match, where there have been any
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See that the submodules are there that embeddings come from."""
        super().on_fit_start(trainer, pl_module)
        if self._parts.embed is not None:
            self._parts.embed.check_name(pl_module)

    def _prefix(self, stage: str) -> str:
        return stage if self.name is None else f"{stage}/{self.name}"

    def _key(self, stage: str, *names: str) -> str:
        return "/".join(filter(None, (self._prefix(stage), *names)))

    def _read_loaders(self, trainer: Trainer) -> set[int]:
        return self._parts.read_loaders(trainer)

    def _collect(self, trainer: Trainer, loader: int, first: int, outputs: Any, batch: Any) -> int:
        items, embeddings = self._parts.add(trainer, loader, first, outputs, batch)
        if self._voters is not None and not first:
            self._voters.check(trainer, batch, embeddings)
        prefix, (source, held) = self._prefix(stage_of(trainer)), list(evaluation_loaders(trainer).items())[loader]
        for viewer in viewers_of(trainer, prefix):
            viewer.see_batch(prefix, source, held, range(first, first + items), batch)
        return items

    def _forget(self) -> None:
        self._parts.clear()
        if self._voters is not None:
            self._voters.clear()

    def _prepare(self, trainer: Trainer) -> None:
        self._parts.check_gallery(trainer)

    def _needs_training_items(self, trainer: Trainer) -> bool:
        return self._voters is not None and self._voters.trains

    def _embed_training_items(self, trainer: Trainer) -> None:
        assert self._voters is not None
        self._voters.prepare(trainer)

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        self.reports = {}
        self._parts.agree()
        sets = self._parts.sets(trainer)
        for number, (direction, suffix, parts) in enumerate(sets):
            self._measure_set(trainer, pl_module, stage, direction, suffix, parts, failed)
            # another set is not to be evaluated beside what was of this one alone
            needed = {part for *_, of_set in sets[number + 1 :] for part in of_set}
            self._parts.shards = {part: shard for part, shard in self._parts.shards.items() if part in needed}

    def _measure_set(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, direction: str, suffix: str,
        parts: Sequence[Part], failed: dict[int, Exception],
    ) -> None:  # fmt: skip
        """Evaluate a set, log its values, and hand it to the callbacks that draw. Collective."""
        prefix = self._key(stage, direction)
        report, first = None, f"{prefix}/{self._parts.metrics[0]}{suffix}"
        with self._policy.handling(f"{first} and the other values of this set are NaN."):
            for error in (failed[loader] for loader, _ in parts if loader in failed):
                raise error
            report = self.reports[direction + suffix] = self._evaluate(trainer, f"{prefix}{suffix}", parts)
        self._log(trainer, pl_module, self._values(trainer, prefix, suffix, report), first if self.prog_bar else None)
        if self._voters is not None:
            votes = self._voters.values(None if report is None else parts, f"{prefix}{suffix}", self._policy)
            self._log(trainer, pl_module, {f"{prefix}/{name}{suffix}": value for name, value in votes.items()})
        # where an image has several texts, their places are not those of the items of the loader
        viewers = viewers_of(trainer, prefix)
        if viewers and report is not None and (not direction or report.queries == report.gallery):
            shards = [(self._parts.shards[part], part[0]) for part in parts]
            show_set(viewers, trainer, prefix, suffix, report, shards)

    def _evaluate(self, trainer: Trainer, where: str, parts: Sequence[Part]) -> RetrievalReport:
        """Evaluate a set; the report, or the error, is that of every process. Collective."""
        processes = all_processes()
        with processes.together(), evaluation_progress(trainer, f"Retrieval of {where}") as progress:
            shards = []
            for part in parts:
                size = self._unpadded_length(trainer, part[0], ids=self._parts.ids is not None)
                shards.append(self._parts.joined(part, self._seen[part[0]], size))
                if (note := shards[-1].note) is not None:
                    self._policy.warn(f"RetrievalMonitor: {note} (Shown once.)", kind="ids")
            groups: dict[str, Any] = dict(zip(GROUPS, (shard.groups for shard in shards), strict=False))
            if self._parts.ids_are_shared(parts):
                groups |= dict(zip(IDS, (shard.ids for shard in shards), strict=True))
            return evaluate_retrieval(
                *(part for shard in shards for part in (shard.embeddings, shard.labels)),
                share=Share(processes, *(shard.places for shard in shards)),
                progress=progress,
                **groups,
                **self._parts.settings.arguments(),
            )

    def _values(self, trainer: Trainer, prefix: str, suffix: str, report: RetrievalReport | None) -> dict[str, float]:
        """List what is logged of a set; without a report NaN for all that it had before, or should have."""
        keys = [f"{prefix}/{name}{suffix}" for name in self._parts.metrics]
        unmatched = f"{prefix}/{UNMATCHED}{suffix}"
        waited_for = {watcher.key: watcher.name for watcher in watchers(trainer)}
        # a chart of zeros says nothing; one that has begun goes on
        if unmatched in waited_for or (report is not None and report.queries_without_match):
            self._counted.add(unmatched)
        if report is None:
            counted = [unmatched] if unmatched in self._counted else []
            return dict.fromkeys([key for key in keys if key not in self._left_out] + counted, math.nan)
        for note in report.messages:  # each kind once in a training
            self._policy.warn(f"{prefix}{suffix}: {note}", kind=without_digits(note))
        values = {f"{prefix}/{name}{suffix}": value for name, value in report.metrics().items()}
        for key in [key for key in keys if key not in values and key in waited_for]:
            fact = f"{waited_for[key]}(monitor={key!r}): this set has too few classes for it. {report.fact_of_classes}"
            fix = "Monitor another value, or give the RetrievalMonitor a smaller label_groups."
            self._policy.handle(UsageError(f"{fact.rstrip()} {fix}"), f"{key} is NaN.")
            values[key] = math.nan
        self._left_out = self._left_out.difference(keys) | set(keys).difference(values)
        if unmatched in self._counted:
            values[unmatched] = float(report.queries_without_match)
        return values

    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        better: dict[str, Better] = {key: requested_metric(key).metric.better for key in self._parts.metrics}
        better |= dict.fromkeys([] if self._voters is None else self._voters.keys, "higher")
        better |= {UNMATCHED: None}
        return {
            self._key("val", direction, name) + suffix: each
            for direction, suffix, _ in self._parts.sets(trainer)
            for name, each in better.items()
        }


def viewers_of(trainer: Trainer, prefix: str) -> list[Viewer]:
    """List the callbacks of a Trainer that want to see the sets of this epoch whose keys begin with the prefix."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    return [callback for callback in callbacks if isinstance(callback, Viewer) and callback.wants(prefix)]
