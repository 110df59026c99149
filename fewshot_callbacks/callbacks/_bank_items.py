"""The items of a bank: what a data set or a loader gives, distributed among the processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fewshot_callbacks.callbacks._batch_entries import read_names
from fewshot_callbacks.callbacks._capture import hooks_ignored
from fewshot_callbacks.callbacks._conduct import UsageError, evaluation_progress
from fewshot_callbacks.callbacks._embedder import Embedder
from fewshot_callbacks.callbacks._evaluation import portable
from fewshot_callbacks.callbacks.embedding_source import EmbeddingSource, Entry
from fewshot_callbacks.distributed.torch_distributed import gather_objects
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, as_labels, join, on_cpu, read_labels
from fewshot_callbacks.functional.class_subset import class_subset
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore
from fewshot_callbacks.metrics.item_batch import ItemBatch
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.system.words import with_article
from fewshot_callbacks.trainer.lightning import Trainer
from fewshot_callbacks.trainer.loaders import Replica, move_batch, replica_of
from fewshot_callbacks.trainer.side_effects import evaluation_mode, preserved_random_states

# batch size if no loader sets one
BATCH_SIZE = 64

# Positions of consecutive batches differ by this number, which is larger than any batch.
POSITIONS_OF_BATCH = 2**31

LABEL_COLUMNS = ("label", "labels", "target", "targets")


@runtime_checkable
class Table(Protocol):
    """Rows that are mappings, and columns by name, as in a Hugging Face data set."""

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...


# A data set, a loader, or a function of the Trainer that returns either.
# With a type parameter, jsonargparse rejects classes derived from Dataset. Without Any, it rejects classes that only
# match a protocol.
BankData = Dataset | DataLoader | Table | Callable[[Trainer], Any] | NoFile | Any  # type: ignore[type-arg]
# words in place of data
BankWord = Literal["train", "gallery", "self"]


def data_of_bank(bank: BankWord | BankData, words: Sequence[str], owner: str) -> BankData | None:
    """Return the data of a bank; None for a word."""
    if not isinstance(bank, str):
        return bank
    if bank not in words:
        listed = ", ".join(map(repr, words))
        raise InputError(f"{owner}(bank={bank!r}) is unknown. Pass {listed}, a data set or a loader.")
    return None


class ClassDraw(NamedTuple):
    """A fixed sample of the items of a data set."""

    classes: int | None
    """number of classes; None for all"""
    items_per_class: int | None
    """number of items of each class; None for all"""
    seed: int

    @property
    def takes_all(self) -> bool:
        """Whether the sample is the whole data set."""
        return self.classes is None and self.items_per_class is None


class _Batches(NamedTuple):
    """The batches that this process embeds."""

    loader: Iterable[Any]
    steps: int | None
    """number of batches, the same in all processes; None for a stream of unknown length"""
    numbers: Iterable[int]
    """index of each batch among the batches of all processes"""
    total: int | None
    """number of batches of all processes; batches from this index on are embedded, and dropped"""


@dataclass(eq=False)
class BankItems:
    """The items of a bank, found once in a run.

    Each batch is embedded by one process. All processes embed the same number of batches, because the forward pass of a
    sharded module is collective. An index that the sampler gives twice is embedded once.

    Args:
        data: A data set, a loader, or a function of the Trainer that returns either; None for the training set, with
            evaluation transforms, of the Trainer's data module.
        draw: The sample that is drawn; None for all items.
    """

    data: BankData | None
    owner: str
    draw: ClassDraw | None = None

    def __post_init__(self) -> None:
        if self.draw is not None and self.draw.takes_all:
            self.draw = None
        self.begin()

    def begin(self) -> None:
        """Begin a run, in which the loader has not been read."""
        self._batches: _Batches | None = None
        self._error: Exception | None = None
        self._replica = Replica(number=0, replicas=1, is_first=True)

    def are_those_of(self, other: BankItems) -> bool:
        """Return whether another object has the same data and the same sample."""
        return self.data is other.data and self.draw == other.draw

    # ------------------------------------------------------------------------------------------------------- what is read

    def prepare(self, trainer: Trainer) -> None:
        """Find the batches of this process, once in a run. *Collective*.

        `embedded` raises an error of any process in all processes.
        """
        if self._batches is not None or self._error is not None:
            return
        self._replica = replica_of(trainer)
        loader = None
        entries = None
        error: Exception | None = None
        try:
            loader = self._find_loader(trainer)
            entries = self._entries(loader)
        except Exception as caught:
            error = _lasting(caught, f"{self.owner}: bank cannot be read")
        by_rank = gather_objects((entries, None if error is None else portable(error)))
        errors = [error_of_rank for _, error_of_rank in by_rank if error_of_rank is not None]
        if errors:
            self._error = error or errors[0]
            return
        assert loader is not None
        if entries is None:
            self._batches = _Batches(loader, None, _count_from(0), None)
        else:
            self._batches = self._dealt(loader, _united([entries_of_rank or [] for entries_of_rank, _ in by_rank]))

    def _find_loader(self, trainer: Trainer) -> Any:
        """Return the user's loader, or a loader for the user's data set."""
        data: Any = self.data
        if data is None:
            make_data = getattr(getattr(trainer, "datamodule", None), "training_data_for_evaluation", None)
            if make_data is None:
                raise UsageError(
                    f"{self.owner} has no training set. Pass bank=..., your training set with evaluation transforms, or "
                    "give your data module a method training_data_for_evaluation() that returns it."
                )
            data = make_data()
        elif callable(data) and not isinstance(data, Dataset | DataLoader):
            data = data(trainer)
        is_data_set = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        if isinstance(data, IterableDataset) or (is_data_set and not isinstance(data, DataLoader)):
            return DataLoader(data, batch_size=BATCH_SIZE)
        if hasattr(data, "__iter__") and not hasattr(data, "__next__"):
            return data
        raise UsageError(
            f"{self.owner}: bank is {with_article(type(data).__name__)}. Pass a data set with a length and "
            "items, a loader, or another object that gives batches each time it is iterated."
        )

    def _entries(self, loader: Any) -> list[Any] | None:
        """Return the sampler's indices of each batch; None for a stream."""
        if _is_stream(loader):
            if self.draw is not None:
                # `_find_loader` may have wrapped the user's stream.
                given = loader.dataset if type(loader) is DataLoader else loader
                raise UsageError(
                    f"{self.owner}: classes cannot be drawn from bank ({type(given).__name__}), because a stream has no "
                    "indices. Pass a data set with a length, or classes=None to measure all items."
                )
            return None
        with preserved_random_states(), _preserved_generators(loader):
            entries = _listed(loader, f"{self.owner}: bank")
        return entries if self.draw is None else self._drawn(loader, entries, self.draw)

    def _drawn(self, loader: DataLoader[Any], entries: Sequence[Any], draw: ClassDraw) -> list[Any]:
        """Return the indices of a sample, in batches of the loader's batch size."""
        # Sorted, so that a shuffling loader does not change what the seed draws.
        pool = torch.tensor(sorted({index for entry in entries for index in _indices(entry)}), dtype=torch.int64)
        labels = self._labels_of(loader.dataset)[pool]
        sample = pool[class_subset(labels, draw.classes, draw.items_per_class, draw.seed)].tolist()
        size = loader.batch_size or max((len(_indices(entry)) for entry in entries), default=1)
        return [sample[start : start + size] for start in range(0, len(sample), size)]

    def _labels_of(self, dataset: Any) -> Labels:
        """Return the label of each item of a data set."""
        call = f"{self.owner}(bank=...)"
        try:
            labels = labels_in(dataset, call)
            if labels is not None:
                return read_labels(labels, len(dataset), "labels", "items", call)
        except ValueError as error:
            raise UsageError(str(error)) from error
        raise UsageError(
            f"{self.owner}: {type(dataset).__name__} has neither labels nor targets, so classes cannot be drawn without "
            "reading every item. Set the label of each item: dataset.labels = [...]."
        )

    def _dealt(self, loader: DataLoader[Any], entries: Sequence[Any]) -> _Batches:
        """Return every n-th batch; if other processes have one more, also a batch that does not count."""
        replica = self._replica
        own = list(entries[replica.number :: replica.replicas])
        steps = math.ceil(len(entries) / replica.replicas)
        own.extend(entries[:1] if len(own) < steps else [])
        return _Batches(_rebuilt(loader, own), steps, _count_from(replica.number, replica.replicas), len(entries))

    # ---------------------------------------------------------------------------------------------------------- embedding

    def embedded(
        self, trainer: Trainer, embed: Embedder, groups: Entry | Sequence[Entry] | None = None
    ) -> EmbeddingStore:
        """Return the embeddings of this process's batches, in evaluation mode.

        The sanity check embeds one batch and drops it.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._embed(trainer, embed, groups)
        except Exception as error:
            if trainer.sanity_checking:
                raise _lasting(error, f"{self.owner}: the first batch of bank cannot be embedded") from error
            raise

    def _embed(self, trainer: Trainer, embed: Embedder, groups: Entry | Sequence[Entry] | None) -> EmbeddingStore:
        assert self._batches is not None
        if self._batches.total is None and self._replica.replicas > 1:
            self._refuse_copies(embed.reader.source)
        store = EmbeddingStore(call=f"{self.owner}(bank=...)")
        module = trainer.lightning_module
        description = "Embedding training classes"
        # Other monitors must not take these outputs for outputs of a validation step.
        with (
            hooks_ignored(),
            evaluation_mode(module),
            evaluation_progress(trainer, description, unit="batch") as progress,
        ):
            for step, (number, batch) in enumerate(zip(self._batches.numbers, self._batches.loader, strict=False)):
                moved = move_batch(trainer, batch)
                embeddings, labels = embed(trainer, module, moved)
                if len(labels) != len(embeddings):
                    raise embed.reader.no_labels(moved, "embed", f"{self.owner}(bank=...)")
                if trainer.sanity_checking:
                    break
                if self._replica.is_first and (self._batches.total is None or number < self._batches.total):
                    columns = self._columns(embed, moved, len(embeddings), groups)
                    positions = number * POSITIONS_OF_BATCH + torch.arange(len(embeddings), device="cpu")
                    store.add(ItemBatch(embeddings, labels, columns, positions))
                progress(step + 1, self._batches.steps or step + 1)
        return store

    def _refuse_copies(self, source: EmbeddingSource) -> None:
        """Refuse a stream that every process reads, unless ids identify repeated items."""
        if source.ids is None:
            raise UsageError(
                f"{self.owner}: bank is a stream, and each of {self._replica.replicas} processes may read the "
                f"same items. Pass {source.as_argument(ids='key')}, a batch entry that identifies each item, so that "
                "repeated items count once; or pass a data set with a length."
            )

    def _columns(
        self, embed: Embedder, batch: Any, items: int, groups: Entry | Sequence[Entry] | None
    ) -> dict[Hashable, Labels]:
        """Return the ids and the groups of a batch, if it has any."""
        source = embed.reader.source
        columns: dict[Hashable, Labels] = {}
        if groups is not None:
            columns["groups"] = read_names("groups", groups, None, batch, items, self.owner, source.views)
        if source.ids is not None and not isinstance(source.ids, tuple) and has_entry(source.ids, batch):
            columns["ids"] = read_names("ids", source.ids, None, batch, items, self.owner, source.views)
        return columns


def has_entry(entry: Entry, batch: Any) -> bool:
    """Return whether a batch has an entry, without the output of a step."""
    if callable(entry):
        try:
            return entry(None, batch) is not None
        except (AttributeError, IndexError, KeyError, TypeError):
            return False
    if isinstance(entry, int):
        return isinstance(batch, Sequence) and not isinstance(batch, str) and entry < len(batch)
    return isinstance(batch, Mapping) and entry in batch


def _lasting(error: Exception, fact: str) -> Exception:
    """Return an error as a `UsageError`, which ends the run in the sanity check: every epoch would repeat it."""
    if isinstance(error, UsageError):
        return error
    return UsageError(
        f"{fact}: {type(error).__name__}: {error}. Pass data whose batches are like the validation batches."
    )


def _is_stream(loader: Any) -> bool:
    """Return whether a loader gives batches without item indices."""
    return (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or type(loader).__iter__ is not DataLoader.__iter__
    )


def _listed(loader: DataLoader[Any], owner: str) -> list[Any]:
    """Return what the sampler of a loader gives in one pass."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    # A sampler may repeat items, and its length may be an estimate. It counts as endless if it gives more than ten times
    # as many indices as items, and more than its length. The constant is for small data sets.
    most = 10 * len(loader.dataset) + 1000  # type: ignore[arg-type]
    with suppress(NotImplementedError, TypeError):  # it may have no length
        most = max(most, len(sampler))
    entries = list(islice(sampler, most + 1))
    if len(entries) > most:
        raise UsageError(
            f"{owner} has a sampler ({type(loader.sampler).__name__}) that does not end: it gave more than {most:,} "
            f"batches of {len(loader.dataset):,} items. "  # type: ignore[arg-type]
            "Pass the data set, or a loader whose sampler gives each item once."
        )
    return entries


def _indices(entry: Any) -> list[Any]:
    """Return the indices of a batch, which may be a single index."""
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    return list(entry) if isinstance(entry, list | tuple | range) else [entry]


def _united(entries_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the batches of all processes without repeated indices.

    The samplers of all processes may give the same entries, in the same or another order, or separate parts.
    """
    seen: set[Hashable] = set()
    united: list[Any] = []
    for entry in (entry for entries in entries_by_rank for entry in entries):
        new: list[Any] = []
        for index in _indices(entry):
            key = index if isinstance(index, Hashable) else repr(index)
            if key not in seen:
                seen.add(key)
                new.append(index)
        if new:
            is_batch = isinstance(entry, list | tuple | range) or getattr(entry, "ndim", 0) == 1
            united.append(new if is_batch else entry)
    return united


def _rebuilt(loader: DataLoader[Any], entries: Sequence[Any]) -> DataLoader[Any]:
    """Return a loader that reads these batches with the options of another loader.

    The user's loader is not iterated, because it may be the training loader in the middle of an epoch.
    """
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    options["multiprocessing_context"] = loader.multiprocessing_context
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=entries, **options)
    return DataLoader(loader.dataset, batch_sampler=entries, **options)


def _count_from(first: int, step: int = 1) -> Iterable[int]:
    """Return first, first + step, ...: more numbers than any run has batches."""
    return range(first, 2**62, step)


@contextmanager
def _preserved_generators(loader: DataLoader[Any]) -> Iterator[None]:
    """Restore the generators of a loader and its samplers after the block, because training may use them."""
    samplers = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = {id(part): part for part in (getattr(sampler, "generator", None) for sampler in samplers)}
    generators = [generator for generator in found.values() if isinstance(generator, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def labels_in(dataset: Any, call: str) -> Any:
    """Return the label of each item of a data set without reading an item; None if it has no labels.

    Labels are the attribute `labels` or `targets`, also inside a `Subset` or a `ConcatDataset`; the last tensor of a
    `TensorDataset`, if it has integers; or such a column of a `Table`.
    """
    for name in ("labels", "targets"):
        if getattr(dataset, name, None) is not None:
            return getattr(dataset, name)
    if isinstance(dataset, Subset):
        labels = labels_in(dataset.dataset, call)
        return None if labels is None else as_labels(labels, "labels", call)[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_in(part, call) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        return join(call, [on_cpu(as_labels(part, "labels", call)) for part in parts])
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        return last if last.ndim == 1 and not (last.is_floating_point() or last.is_complex()) else None
    column_names = getattr(dataset, "column_names", None) or ()
    column = next((name for name in LABEL_COLUMNS if name in column_names), None)
    # From version 4 on, `datasets` returns a view of a column. The slice reads it.
    return None if column is None else dataset[column][:]
