"""The items of one validation, read and joined once for all monitors with the same source.

    Member        what one monitor needs
    Collection    one per source of a Trainer

Each monitor forwards Lightning's hooks. The first call of an event does the work and later calls find it done, so the
order of the monitors does not matter. Only the first monitor makes a collective call. It is the same monitor in every
process, because all processes have the same monitors in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewshot_callbacks.callbacks._bank import Bank
from fewshot_callbacks.callbacks._bank_items import BankItems
from fewshot_callbacks.callbacks._batch_entries import read_flag, read_names
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._embedder import LARGEST_DIFFERENCE, Embedder
from fewshot_callbacks.callbacks._embedding_reader import EmbeddingReader
from fewshot_callbacks.callbacks._evaluation import step_of
from fewshot_callbacks.callbacks._label_reader import LabelReader
from fewshot_callbacks.callbacks._side_items import SideItems
from fewshot_callbacks.callbacks._sides import (
    FLAG,
    SLICES,
    Column,
    LabelledEmbeddings,
    Side,
    directions_of,
    read_two_encoders,
)
from fewshot_callbacks.callbacks.embedding_source import EmbeddingSource, Entry
from fewshot_callbacks.distributed.torch_distributed import gather_objects, process_count
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, no_labels
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard
from fewshot_callbacks.metrics.item_batch import ItemBatch, refuse_another_form
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer
from fewshot_callbacks.trainer.loaders import (
    Replica,
    evaluation_loaders,
    replica_of,
    unknown_order_reason,
    unpadded_length,
)


@dataclass(frozen=True, eq=False)
class Member:
    """What one monitor needs from a collection. Members are compared by identity.

    Args:
        columns: Other values that are read for each item.
        needs_labels: Whether nothing can be measured without labels.
        takes_targets: Whether labels may be regression targets.
        keeps_items: Whether it needs the items at the end. If not, it gets one batch at a time.
    """

    owner: str
    columns: Sequence[Column] = ()
    needs_labels: bool = True
    takes_targets: bool = False
    keeps_items: bool = True


class Batch(NamedTuple):
    """What was read from a batch."""

    first: int
    """index of its first item in this process's pass over the loader"""
    items: int
    """number of its items"""
    embeddings: Tensor | None
    """(items, dim), on the device of the step; None with two encoders"""
    labels: Labels
    """label of each item; empty without labels or with two encoders"""


@dataclass
class _Step:
    """The current step, or the step that has just ended."""

    loader: int
    batch_idx: int
    awaited_by: list[Member]
    """members that have not read it yet"""
    is_read: bool = False
    batch: Batch | None = None
    """the result; None before it, after an error, and once all members have it, to free memory on the device"""


@dataclass
class _Errors:
    """Errors of this process, raised at the end of the epoch so that other processes do not hang."""

    by_loader: dict[int, Exception] = field(default_factory=dict)
    """loader -> error for all members"""
    no_labels: dict[int, Exception] = field(default_factory=dict)
    """loader -> error for the members that need labels"""
    by_column: dict[tuple[int, Column], Exception] = field(default_factory=dict)
    """(loader, column) -> error for the members that need the column; it is no longer read"""
    by_attribute: dict[tuple[int, Column], Exception] = field(default_factory=dict)
    """the same for slices that earlier batches had; the validation is measured without them"""


class Dealing(NamedTuple):
    """How the items of a side were dealt to the processes."""

    items: int | None
    """number of items before a `DistributedSampler` pads them; None on a single process, and if unknown"""
    reason: str | None
    """why it is unknown"""
    items_of_all: int
    """number of items of all processes, including repeats"""


class Collection:
    """The embeddings, labels, ids and columns of a validation, stored once for all members.

    The first monitor with this source creates it in its setup. Each monitor calls, in this order:

        join         in `setup`, once in a run. All members join before the first validation.
        begin        at the start of the epoch. *Collective*. The first member drops what an interrupted validation has
                     left, so nothing is in memory until the first step.
        expect       before a step of a loader that the monitor reads. The submodule's output is captured from now on.
        read         after that step. The first member reads the batch and appends it to the store of its side; the
                     others get the same `Batch`. An error waits: see `failures`.
        agree        at the end of the epoch, after all processes have exchanged `failures`. *Collective*. All processes
                     then know the same about labels and encoders.
        dealing      for each side of a set, before its first shard. *Collective*. It finds out whether repeated items
                     are known.
        shard        for each side of a set. *Collective*. The first member joins the batches of the side, which are
                     then stored once, as a shard.
        done_with    after a set, for the sides that the member no longer needs. Shards that no member needs are
                     dropped.
        finish       at the end of the epoch. The last member drops everything.

    From `agree` to `finish` the members take turns: the second begins after the first has finished. In the sanity
    check, and if a validation is not measured, `finish` follows `failures`. `close`, at the end of the run or after an
    exception, may follow any of them, and drops what is left.
    """

    def __init__(self, source: EmbeddingSource, owner: str) -> None:
        # This store is dropped at once. If the folder cannot be written to, it raises the error now, in the setup.
        EmbeddingStore(source.spill_to, owner)
        self.source = source
        # advice on repeated items that monitors of this source have given in this run
        self.remedies_told: set[str] = set()
        self.labels = LabelReader(takes_sets=True)
        self.reader = EmbeddingReader(source, owner, needs_labels=False, labels=self.labels)
        self.embedder = Embedder(self.reader)
        self.banks: list[Bank] = []
        self._members: list[Member] = []
        # whether each step gives two embeddings, in this run
        self.has_two_encoders = False
        self._clear()

    def _clear(self) -> None:
        """Drop all state of a validation."""
        # name -> loader, in the order of their indices
        self.dataloaders: dict[str, Any] = {}
        # this process's part of the data
        self.replica = Replica(number=0, replicas=1, is_first=True)
        self._items = SideItems(self.source.spill_to, self.reader.owner)
        self._errors = _Errors()
        self.labels.target_error = None
        # whether the items of each loader have labels in this process
        self._has_labels: dict[int, bool] = {}
        # numbers of items and of batches of each loader so far
        self.seen: Counter[int] = Counter()
        self.batches: Counter[int] = Counter()
        self._step: _Step | None = None
        # lengths of the embeddings in the first batch of each loader, if other processes see the same batches
        self._first_lengths: dict[int, Tensor] = {}
        # facts of other processes, exchanged once
        self._has_agreed = False
        self._has_compared = False
        self._dealings: dict[Side, Dealing] = {}
        # members that have begun this validation; empty if and only if no items are in memory
        self._begun: list[Member] = []
        # members that no longer need a side, and members that have finished
        self._done: dict[Side, list[Member]] = defaultdict(list)
        self._finished: list[Member] = []
        for bank in self.banks:
            bank.clear()

    # ------------------------------------------------------------------------------------------------------ who takes part

    def join(self, member: Member) -> None:
        """Add a member for all validations of the run."""
        self._members.append(member)
        self.labels.takes_targets = self.labels.takes_targets or member.takes_targets
        # An error while reading concerns all members.
        self.reader.owner = _owners(self._members)
        self.labels.owner_of_classes = _owners(known for known in self._members if not known.takes_targets)

    def shared_bank(self, items: BankItems, groups: Entry | Sequence[Entry] | None = None) -> Bank:
        """Return the bank of these items, one for all monitors with the same items."""
        for bank in self.banks:
            if bank.is_for(items, groups):
                bank.serve(groups)
                return bank
        self.banks.append(Bank(items, self.embedder, groups))
        return self.banks[-1]

    def attach(self, module: LightningModule) -> None:
        """Add the hook to the submodule that embeddings come from."""
        self.reader.attach(module)
        if self.source.embed is not None:
            self.embedder.check_name(module)

    def close(self) -> None:
        """End the run, even after an error: remove the hook, and drop the items."""
        self.reader.detach()
        self._clear()
        for bank in self.banks:
            bank.items.begin()

    # ---------------------------------------------------------------------------------------------------- one validation

    def begin(self, member: Member, trainer: Trainer) -> None:
        """Begin a validation. *Collective*.

        If a member begins a second time, the previous validation was interrupted, and its items are dropped.
        """
        if not self._begun or member in self._begun:
            self._clear()
            self.dataloaders = evaluation_loaders(trainer)
            self.replica = replica_of(trainer)
        self._begun.append(member)

    def done_with(self, member: Member, sides: Iterable[Side]) -> None:
        """Record that a member no longer needs these sides. Sides that no member needs are dropped."""
        for side in sides:
            self._done[side.undivided].append(member)
            finished = [*self._done[side.undivided], *self._finished]
            if all(known in finished for known in self._members if known.keeps_items):
                self._items.drop(side.undivided)

    def finish(self, member: Member) -> None:
        """Record that a member has finished this validation. After the last member, everything is dropped."""
        self._finished.append(member)
        if all(known in self._finished for known in self._members):
            self._clear()

    # ------------------------------------------------------------------------------------------------------ reading a batch

    def expect(self, member: Member, loader: int, batch_idx: int) -> None:
        """Begin a step, and capture the submodule's output from now on."""
        if self._step is None or (self._step.loader, self._step.batch_idx) != (loader, batch_idx):
            self._step = _Step(loader, batch_idx, [])
            self.reader.start_capture()
        self._step.awaited_by.append(member)

    def read(self, member: Member, trainer: Trainer, outputs: Any, batch: Any) -> Batch | None:
        """Return the expected batch, which is read once for all members.

        Returns:
            None if this batch or an earlier batch of its loader could not be read, see `failures`.
        """
        step = self._step
        assert step is not None
        if not step.is_read:
            step.is_read = True
            step.batch = self._read_once(trainer, step, outputs, batch)
        result = step.batch
        step.awaited_by.remove(member)
        if not step.awaited_by:
            step.batch = None
        return result

    def _read_once(self, trainer: Trainer, step: _Step, outputs: Any, batch: Any) -> Batch | None:
        """Read a batch and append it. An error waits for the end of the epoch."""
        loader = step.loader
        self.batches[loader] += 1
        if loader in self._errors.by_loader:
            # A set with a missing batch is not measured.
            self.reader.stop_capture()
            return None
        try:
            by_encoder = self._read_encoders(trainer, loader, outputs, batch)
            if len(by_encoder) == 1:
                self._see_whether_labelled(loader, by_encoder[0], batch, step_of(trainer))
            for encoder, labelled in enumerate(by_encoder):
                self._append(Side(loader, encoder), step.awaited_by, labelled, outputs, batch)
        except Exception as error:  # a metric must not end the run
            self._errors.by_loader[loader] = error
            return None
        first = self.seen[loader]
        embeddings, labels = by_encoder[0]
        if first == 0 and self.replica.replicas < process_count():
            self._first_lengths[loader] = embeddings.detach().double().norm(dim=1).cpu()
        self.seen[loader] += len(embeddings)
        if len(by_encoder) == 2:
            return Batch(first, len(embeddings), None, no_labels())
        return Batch(first, len(embeddings), embeddings, labels)

    def _read_encoders(self, trainer: Trainer, loader: int, outputs: Any, batch: Any) -> Sequence[LabelledEmbeddings]:
        """Return the embeddings and labels of one encoder or of two."""
        step = step_of(trainer)
        if self.source.embeds_batches:
            self.reader.stop_capture()
            return [self.embedder.in_evaluation(trainer, trainer.lightning_module, batch)]
        both = read_two_encoders(self.reader, outputs, batch, step, self.seen[loader])
        if both is None:
            return [self.reader.read(outputs, batch, step)]
        self.has_two_encoders = True
        return both

    def _see_whether_labelled(self, loader: int, labelled: LabelledEmbeddings, batch: Any, step: str) -> None:
        """Store an error for members that need labels, if a batch has no labels."""
        embeddings, labels = labelled
        has_labels = len(labels) == len(embeddings)
        if self._has_labels.setdefault(loader, has_labels) != has_labels:
            raise InputError(
                f"{self.reader.owner}: some batches have labels, but others do not. Pass labels in every batch or in none."
            )
        if not has_labels and loader not in self._errors.no_labels:
            error = self.reader.no_labels(batch, step, _owners(known for known in self._members if known.needs_labels))
            # A step that has returned labels before may do so again.
            was_successful = step in self.reader.successful_steps
            self._errors.no_labels[loader] = InputError(str(error)) if was_successful else error

    def _append(
        self, side: Side, members: Sequence[Member], labelled: LabelledEmbeddings, outputs: Any, batch: Any
    ) -> None:
        """Append the items of a batch to a side, with the requested ids and columns."""
        if not self.replica.is_first or not any(member.keeps_items for member in members):
            return
        embeddings, labels = labelled
        items = len(embeddings)
        if len(labels) != items:
            # A store needs a label for each item. These are never read.
            labels = Labels(torch.zeros(items, dtype=torch.int64, device="cpu"))
        columns: dict[Hashable, Labels] = {}
        ids: Any = self.source.ids
        if ids is not None:
            entry = ids[side.encoder] if isinstance(ids, tuple) else ids
            owner = f"{self.reader.owner}, EmbeddingSource"
            columns["ids"] = read_names("ids", entry, outputs, batch, items, owner, self.source.views)
        store = self._items.store(side)
        for column in dict.fromkeys(column for member in members for column in member.columns):
            names_loader = column.argument == FLAG and column.entry in self.dataloaders
            place = (side.loader, column)
            if names_loader or place in self._errors.by_column or place in self._errors.by_attribute:
                continue
            owner = _owners(member for member in self._members if column in member.columns)
            try:
                values = self._read_column(column, owner, outputs, batch, items)
                refuse_another_form(owner, store.forms.get(column, ""), values, column.argument)
                columns[column] = values
            except Exception as error:
                # A value that the first batch lacks is a mistake in the settings. In later batches it may be missing data.
                if column.argument == SLICES and column in store.forms:
                    self._errors.by_attribute[place] = error
                else:
                    self._errors.by_column[place] = error
        store.add(ItemBatch(embeddings, labels, columns))

    def _read_column(self, column: Column, owner: str, outputs: Any, batch: Any, items: int) -> Labels:
        """Return the value of each item of a batch."""
        views = self.source.views
        if column.argument != FLAG:
            return read_names(column.argument, column.entry, outputs, batch, items, owner, views)
        names = ", ".join(map(repr, self.dataloaders))
        hint = "" if callable(column.entry) else f" It is not a loader either; the loaders are {names}."
        return Labels(read_flag(column.entry, outputs, batch, items, owner, views, hint).long())

    def failures(self, member: Member) -> dict[int, Exception]:
        """Return loader -> error of this process that concerns a member."""
        failures: dict[int, Exception] = {}
        for (loader, column), error in self._errors.by_column.items():
            if column in member.columns:
                failures[loader] = error
        if member.needs_labels:
            failures |= self._errors.no_labels
            if self.labels.target_error is not None and not member.takes_targets:
                failures |= dict.fromkeys(self._has_labels, self.labels.target_error)
        return failures | self._errors.by_loader

    def failures_of_attributes(self, member: Member) -> dict[tuple[int, Column], Exception]:
        """Return (loader, column) -> why a batch of this process lacks slices that earlier batches had."""
        return {place: error for place, error in self._errors.by_attribute.items() if place[1] in member.columns}

    # --------------------------------------------------------------------------------------------- the end of a validation

    def compare_replicas(self) -> None:
        """Store an error for loaders whose embeddings differ within a tensor-parallel group, once. *Collective*.

        Only one process of the group counts. If embeddings differ, the processes see different items, or each has some
        of the dimensions.
        """
        if self._has_compared or self.replica.replicas == process_count():
            return
        self._has_compared = True
        by_rank = gather_objects((self.replica.number, self._first_lengths))
        lengths_of_first = dict(reversed(by_rank))
        for rank, (number, lengths_here) in enumerate(by_rank):
            for loader, lengths in lengths_here.items():
                expected = lengths_of_first[number].get(loader, lengths)
                if len(lengths) == len(expected) and torch.allclose(
                    lengths, expected, LARGEST_DIFFERENCE, equal_nan=True
                ):
                    continue
                self._errors.by_loader[loader] = UsageError(
                    f"{self.reader.owner}: process {rank} and another process of its tensor-parallel group have different "
                    f"embeddings of the first batch of loader {loader}. If the last layer is a ColwiseParallel, each "
                    "process has some of the dimensions: pass ColwiseParallel(output_layouts=Replicate()). If they see "
                    "different items, let Lightning make the sampler (Trainer(use_distributed_sampler=True))."
                )

    def agree(self) -> None:
        """Share what is known about labels and encoders with processes without items, once. *Collective*."""
        if self._has_agreed:
            return
        self.labels.agree()
        self.has_two_encoders = any(gather_objects(self.has_two_encoders))
        self._has_agreed = True

    def have_classes(self, loader: int) -> bool | None:
        """Return whether the items of a loader have classes as labels; None without items. *Collective*."""
        has_classes = self._has_labels.get(loader)
        if self.labels.has_targets:
            has_classes = False
        by_rank = gather_objects(has_classes)
        answers = [has_labels for has_labels in by_rank if has_labels is not None]
        return all(answers) if answers else None

    def have_labels(self, loader: int) -> bool:
        """Return whether the items of a loader have labels of any form in all processes. *Collective*."""
        return all(gather_objects(self._has_labels.get(loader, True)))

    @property
    def directions(self) -> tuple[str, str] | None:
        """Both directions of two encoders, such as `image_to_text`; None for one encoder."""
        return directions_of(self.reader.keys) if self.has_two_encoders else None

    def dataloader(self, loader: int) -> Any:
        """Return the loader of an index."""
        return list(self.dataloaders.values())[loader]

    def dealing(self, side: Side) -> Dealing:
        """Return how the items of a side were dealt to the processes; found out once. *Collective*."""
        side = side.undivided
        samples = self.seen[side.loader]
        if process_count() == 1:
            return Dealing(None, None, samples)
        if side not in self._dealings:
            items = len(self._items.store(side)) if self.has_two_encoders else samples
            dataloader = self.dataloader(side.loader)
            reason_here = unknown_order_reason(dataloader, self.batches[side.loader], samples, self.replica)
            # Another process of the tensor-parallel group counts the same items.
            items_here = items if self.replica.is_first else 0
            is_one_of_each_here = items == samples or not self.replica.is_first
            # All ranks must decide alike: a reason on one rank is enough.
            by_rank = gather_objects((reason_here, items_here, is_one_of_each_here))
            reasons = [reason for reason, _, _ in by_rank if reason is not None]
            length = None if reasons else unpadded_length(dataloader, self.replica)
            has_one_of_each = all(is_one_of_each for _, _, is_one_of_each in by_rank)
            if length is not None and not has_one_of_each:
                # The rows of this encoder are not the dealt samples: an image may have several texts.
                if length % self.replica.replicas:
                    reasons.append("this encoder gives another number of embeddings than the first")
                length = None
            reason = reasons[0] if reasons else None
            self._dealings[side] = Dealing(length, reason, sum(count for _, count, _ in by_rank))
        return self._dealings[side]

    def shard(self, side: Side) -> Shard:
        """Return this process's part of a side, without repeated items. *Collective*."""
        needs_undivided = any(side.flag not in member.columns for member in self._members if member.keeps_items)
        part = (self.replica.number, self.replica.replicas)
        shard = self._items.shard(side, self.dealing(side).items, part, needs_undivided=needs_undivided)
        # A process without items has no ids and columns, but must pass some, as the others do.
        if self.source.ids is not None and shard.ids is None:
            shard = shard._replace(ids=no_labels())
        missing: dict[Hashable, Labels] = {column: no_labels() for member in self._members for column in member.columns}
        return shard._replace(columns={**missing, **shard.columns})


def _owners(members: Iterable[Member]) -> str:
    """Return the names of the monitors, for messages: `RetrievalMonitor and KnnMonitor`."""
    return " and ".join(dict.fromkeys(member.owner for member in members))
