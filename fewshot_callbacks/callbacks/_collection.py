"""The items of one validation, read and joined once for all monitors with the same source.

    Member        what one monitor asks for
    Collection    one for each source of a Trainer

Each monitor forwards the hooks that Lightning calls. The first call of an event does the work, and the others find it
done, so that the order of the monitors does not matter. Only the first monitor that asks makes a collective call. It is
the same monitor in every process, because all processes have the same monitors in the same order.
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
    """What one monitor needs of a collection. Two members are the same only if they are one object.

    Args:
        owner: Name of the monitor, for messages.
        columns: What is read of each item for it.
        needs_labels: Whether it can do nothing without labels.
        takes_targets: Whether labels may be the targets of a regression.
        keeps_items: Whether it needs the items at the end. If not, it only sees one batch at a time.
    """

    owner: str
    columns: Sequence[Column] = ()
    needs_labels: bool = True
    takes_targets: bool = False
    keeps_items: bool = True


class Batch(NamedTuple):
    """What was read of a batch."""

    first: int
    """index of its first item in this process's pass over the loader"""
    items: int
    """number of its items"""
    embeddings: Tensor | None
    """(items, dim), on the device of the step; None with two encoders"""
    labels: Labels
    """label of each item; empty without labels, and with two encoders"""


@dataclass
class _Step:
    """The step that runs, or has just ended."""

    loader: int
    batch_idx: int
    awaited_by: list[Member]
    """members that have yet to read it"""
    is_read: bool = False
    batch: Batch | None = None
    """what was read; None before, after an error, and once no member awaits it: embeddings are on the device"""


@dataclass
class _Errors:
    """Errors of this process, which wait for the end of the epoch: an earlier one would leave other processes waiting."""

    by_loader: dict[int, Exception] = field(default_factory=dict)
    """loader -> error of all members"""
    no_labels: dict[int, Exception] = field(default_factory=dict)
    """loader -> error of the members that need labels"""
    by_column: dict[tuple[int, Column], Exception] = field(default_factory=dict)
    """(loader, column) -> error of the members that ask for the column; it is not read any more"""
    by_attribute: dict[tuple[int, Column], Exception] = field(default_factory=dict)
    """the same for slices that earlier batches had; a validation is measured without them"""


class Dealing(NamedTuple):
    """How the items of a side were dealt to the processes."""

    items: int | None
    """number of items before a `DistributedSampler` repeats some; None on a single process, and if it is unknown"""
    reason: str | None
    """why it is unknown"""
    items_of_all: int
    """number of items that came to all processes"""


class Collection:
    """The embeddings, labels, ids and columns of a validation, held once for all members.

    It is made at the setup of the first monitor of a Trainer that has this source. Each monitor calls, in this order:

        join         in `setup`, once in a run. All members have joined before the first validation.
        begin        at the start of the epoch. *Collective*. The first member drops what an aborted validation has left, so
                     that nothing is in memory until the first step.
        expect       before a step of a loader that the monitor reads. From now on the submodule's output is captured.
        read         after that step. The first member reads the batch and appends it to the store of its side; the others
                     get the same `Batch`. An error waits: see `failures`.
        agree        at the end of the epoch, after all processes have exchanged `failures`. *Collective*. All processes
                     then know the same about labels and encoders.
        dealing      for each side of a set, before its first shard. *Collective*. It decides whether repeated items are
        known. shard        for each side of a set. *Collective*. The first member joins the batches of the side, which
        are then
                     held once, as a shard.
        done_with    after a set, for the sides that the member does not need again. Shards that no member needs are dropped.
        finish       at the end of the epoch. The last member drops everything.

    The members take turns from `agree` to `finish`: the second begins after the first has finished. In the sanity check,
    and where a validation is not measured, `finish` follows `failures`. `close`, at the end of the run or after an
    exception, may come after any of them, and drops what they have left.

    Args:
        source: Where the items come from.
        owner: Name of the monitor that makes it, for messages.
    """

    def __init__(self, source: EmbeddingSource, owner: str) -> None:
        # The store is dropped at once. It raises an error here, at the setup, if the folder cannot be written to.
        EmbeddingStore(source.spill_to, owner)
        self.source = source
        # remedies for repeated items that monitors of this source have reported in this run
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
        """Drop what belongs to one validation: before it begins, after its last member has measured, or after an abort."""
        # name -> loader, in the order of their indices
        self.dataloaders: dict[str, Any] = {}
        # the part of the data that this process has
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
        # lengths of the embeddings of the first batch of each loader, if other processes see the same batches
        self._first_lengths: dict[int, Tensor] = {}
        # facts of other processes, exchanged once
        self._has_agreed = False
        self._has_compared = False
        self._dealings: dict[Side, Dealing] = {}
        # Members that have begun this validation, compared by identity. It is empty if and only if no items are in
        # memory: items come after `begin`, and this method drops both.
        self._begun: list[Member] = []
        # members that no longer need a side, and members that have finished
        self._done: dict[Side, list[Member]] = defaultdict(list)
        self._finished: list[Member] = []
        for bank in self.banks:
            bank.clear()

    # ------------------------------------------------------------------------------------------------------ who takes part

    def join(self, member: Member) -> None:
        """Take part in each validation of the run."""
        self._members.append(member)
        self.labels.takes_targets = self.labels.takes_targets or member.takes_targets
        # A read error concerns all members.
        self.reader.owner = _owners(self._members)
        self.labels.owner_of_classes = _owners(known for known in self._members if not known.takes_targets)

    def shared_bank(self, items: BankItems, groups: Entry | Sequence[Entry] | None = None) -> Bank:
        """Return the bank of these items, one for all monitors that ask for the same items.

        Args:
            items: The items.
            groups: Entry of a batch with the group of each item; None if it is not asked for.
        """
        for bank in self.banks:
            if bank.is_for(items, groups):
                bank.serve(groups)
                return bank
        self.banks.append(Bank(items, self.embedder, groups))
        return self.banks[-1]

    def attach(self, module: LightningModule) -> None:
        """Add the hook to the submodule that embeddings come from.

        Raises:
            UsageError: If the submodule of `source` or of `embed` does not exist.
        """
        self.reader.attach(module)
        if self.source.embed is not None:
            self.embedder.check_name(module)

    def close(self) -> None:
        """End the run, also after an error: remove the hook, and drop what was collected."""
        self.reader.detach()
        self._clear()
        for bank in self.banks:
            bank.items.begin()

    # ---------------------------------------------------------------------------------------------------- one validation

    def begin(self, member: Member, trainer: Trainer) -> None:
        """Begin a validation. *Collective*.

        If a member begins a second time, the validation before was aborted: an error was caught inside the run, so that no
        `on_exception` came. What is left of that validation is dropped.
        """
        if not self._begun or member in self._begun:
            self._clear()
            self.dataloaders = evaluation_loaders(trainer)
            self.replica = replica_of(trainer)
        self._begun.append(member)

    def done_with(self, member: Member, sides: Iterable[Side]) -> None:
        """Record that a member no longer needs these sides; sides that no member needs are dropped."""
        for side in sides:
            self._done[side.undivided].append(member)
            finished = [*self._done[side.undivided], *self._finished]
            if all(known in finished for known in self._members if known.keeps_items):
                self._items.drop(side.undivided)

    def finish(self, member: Member) -> None:
        """End the part of a member in this validation; with the last member all is dropped."""
        self._finished.append(member)
        if all(known in self._finished for known in self._members):
            self._clear()

    # ------------------------------------------------------------------------------------------------------ reading a batch

    def expect(self, member: Member, loader: int, batch_idx: int) -> None:
        """Begin a step: keep what the submodule returns from now on."""
        if self._step is None or (self._step.loader, self._step.batch_idx) != (loader, batch_idx):
            self._step = _Step(loader, batch_idx, [])
            self.reader.start_capture()
        self._step.awaited_by.append(member)

    def read(self, member: Member, trainer: Trainer, outputs: Any, batch: Any) -> Batch | None:
        """Read the batch that was expected, once for all members.

        Returns:
            What was read; None if this batch or an earlier one of its loader could not be read, see `failures`.
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
        """Read a batch and append it. An error is deferred to the end of the epoch."""
        loader = step.loader
        self.batches[loader] += 1
        if loader in self._errors.by_loader:
            # A set without one of its batches is not measured.
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
        """Return the embeddings and labels of one encoder or of two.

        Raises:
            UsageError: If there are no embeddings, or their labels do not fit them.
        """
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
        """Store an error for members that need labels, if there are none.

        Raises:
            ValueError: If only some batches of a loader have labels.
        """
        embeddings, labels = labelled
        has_labels = len(labels) == len(embeddings)
        if self._has_labels.setdefault(loader, has_labels) != has_labels:
            raise InputError(
                f"{self.reader.owner}: some batches have labels, others have none. Give labels in every batch, or in none."
            )
        if not has_labels and loader not in self._errors.no_labels:
            error = self.reader.no_labels(batch, step, _owners(known for known in self._members if known.needs_labels))
            # A step that has given labels before may give labels again.
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
            # A store needs a label for each item. These labels are never read.
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
                # What the first batch lacks is a mistake in the settings. Later ones may have a missing value.
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
        hint = "" if callable(column.entry) else f" Nor is there such a loader; there are {names}."
        return Labels(read_flag(column.entry, outputs, batch, items, owner, views, hint).long())

    def failures(self, member: Member) -> dict[int, Exception]:
        """Return loader -> the error with which this process cannot serve a member."""
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
        """Return loader and column -> why a batch of this process has no slices, although earlier batches had some."""
        return {place: error for place, error in self._errors.by_attribute.items() if place[1] in member.columns}

    # --------------------------------------------------------------------------------------------- the end of a validation

    def compare_replicas(self) -> None:
        """Store an error for loaders whose embeddings differ within a tensor-parallel group, once. *Collective*.

        Only the embeddings of one process of the group are counted. If another process has different ones, each has a part
        of the dimensions, or the processes see different items.
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
                    f"{self.reader.owner}: process {rank} has other embeddings of the first batch of loader {loader} than "
                    "another process of its tensor-parallel group. If the last layer is a ColwiseParallel, each process has "
                    "some of the dimensions: pass ColwiseParallel(output_layouts=Replicate()). If the processes see other "
                    "items, let Lightning make the sampler (Trainer(use_distributed_sampler=True))."
                )

    def agree(self) -> None:
        """Learn of labels and encoders from processes that had items, once. *Collective*."""
        if self._has_agreed:
            return
        self.labels.agree()
        self.has_two_encoders = any(gather_objects(self.has_two_encoders))
        self._has_agreed = True

    def have_classes(self, loader: int) -> bool | None:
        """Return whether the items of a loader have labels that name classes; None without items. *Collective*."""
        has_classes = self._has_labels.get(loader)
        if self.labels.has_targets:
            has_classes = False
        by_rank = gather_objects(has_classes)
        answers = [has_labels for has_labels in by_rank if has_labels is not None]
        return all(answers) if answers else None

    def have_labels(self, loader: int) -> bool:
        """Return whether the items of a loader have labels of any form, in all processes. *Collective*."""
        return all(gather_objects(self._has_labels.get(loader, True)))

    @property
    def directions(self) -> tuple[str, str] | None:
        """Both directions of two encoders, such as `image_to_text`; None for one encoder."""
        return directions_of(self.reader.keys) if self.has_two_encoders else None

    def dataloader(self, loader: int) -> Any:
        """Return the loader of an index."""
        return list(self.dataloaders.values())[loader]

    def dealing(self, side: Side) -> Dealing:
        """Return how the items of a side were dealt to the processes, asked once. *Collective*."""
        side = side.undivided
        samples = self.seen[side.loader]
        if process_count() == 1:
            return Dealing(None, None, samples)
        if side not in self._dealings:
            items = len(self._items.store(side)) if self.has_two_encoders else samples
            dataloader = self.dataloader(side.loader)
            reason_here = unknown_order_reason(dataloader, self.batches[side.loader], samples, self.replica)
            # Another process of a tensor-parallel group counts the same items.
            items_here = items if self.replica.is_first else 0
            is_one_of_each_here = items == samples or not self.replica.is_first
            # The decision whether items are dropped must be the same on all ranks: one rank with a reason is enough.
            by_rank = gather_objects((reason_here, items_here, is_one_of_each_here))
            reasons = [reason for reason, _, _ in by_rank if reason is not None]
            length = None if reasons else unpadded_length(dataloader, self.replica)
            has_one_of_each = all(is_one_of_each for _, _, is_one_of_each in by_rank)
            if length is not None and not has_one_of_each:
                # The rows of this encoder are not the samples that were dealt, such as several texts of an image.
                if length % self.replica.replicas:
                    reasons.append("this encoder gives other numbers of embeddings than the first")
                length = None
            reason = reasons[0] if reasons else None
            self._dealings[side] = Dealing(length, reason, sum(count for _, count, _ in by_rank))
        return self._dealings[side]

    def shard(self, side: Side) -> Shard:
        """Return this process's part of a side, without repeated items. *Collective*."""
        needs_undivided = any(side.flag not in member.columns for member in self._members if member.keeps_items)
        part = (self.replica.number, self.replica.replicas)
        shard = self._items.shard(side, self.dealing(side).items, part, needs_undivided=needs_undivided)
        # A process without items has no ids and columns, but passes them as the others do.
        if self.source.ids is not None and shard.ids is None:
            shard = shard._replace(ids=no_labels())
        missing: dict[Hashable, Labels] = {column: no_labels() for member in self._members for column in member.columns}
        return shard._replace(columns={**missing, **shard.columns})


def _owners(members: Iterable[Member]) -> str:
    """Return the names of the monitors, for messages: `RetrievalMonitor and KnnMonitor`."""
    return " and ".join(dict.fromkeys(member.owner for member in members))
