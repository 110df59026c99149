"""The items of one validation, read and joined once for all monitors with the same source.

    Question      what one monitor asks for
    Collection    one for each source of a Trainer

Each monitor forwards the hooks that Lightning calls. The first call of an event does the work, and the others find it
done, so that the order of the monitors does not matter. All processes have the same monitors in the same order, so that the
first of a collective call is the first in every process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewshot_callbacks.callbacks._bank import Bank
from fewshot_callbacks.callbacks._bank_items import BankItems
from fewshot_callbacks.callbacks._conduct import UsageError, without_owner
from fewshot_callbacks.callbacks._embedder import Embedder
from fewshot_callbacks.callbacks._evaluation import names_of_loaders, step_of
from fewshot_callbacks.callbacks._sides import SideKey, directions_of, gallery_flag, read_two_encoders
from fewshot_callbacks.callbacks.embeddings import (
    EmbeddingReader,
    EmbeddingSource,
    Entry,
    describe,
    read_flag,
    read_names,
)
from fewshot_callbacks.distributed.torch_distributed import gather_objects, process_count
from fewshot_callbacks.functional._labels import Labels, as_labels, as_targets, join, no_labels
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard, refuse_another_form, rows_of_shard
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer
from fewshot_callbacks.trainer.loaders import (
    Replica,
    evaluation_loaders,
    replica_of,
    unknown_order_reason,
    unpadded_length,
)


class Column(NamedTuple):
    """Something that is read of each item beside its embedding, its label and its id."""

    argument: str
    """name of the monitor's argument that asks for it: `groups`, `ids`, or `gallery` for a flag"""
    entry: Any
    """where it is: an entry, or several that make one value together"""


# `gallery` names a loader or a flag; which of both is known when there are loaders.
FLAG = "gallery"


@dataclass(frozen=True, eq=False)
class Question:
    """What one monitor asks of a collection.

    Args:
        owner: Name of the monitor, for messages.
        columns: What is read of each item for it.
        needs_labels: Whether it can do nothing without labels.
        takes_targets: Whether labels may be the targets of a regression.
        keeps_items: Whether it needs the items at the end. Without, it sees each batch alone.
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


@dataclass(eq=False)
class _Rows:
    """The items of a side as they come, batch by batch."""

    store: EmbeddingStore
    columns: dict[Column, list[Labels]] = field(default_factory=lambda: defaultdict(list))

    def append(self, column: Column, values: Labels, owner: str) -> None:
        """Append the values of a batch to a column.

        Raises:
            ValueError: If they are words and those before integers, or the other way round; names the monitor, `owner`.
        """
        batches = self.columns[column]
        refuse_another_form(owner, batches[0].form if batches else "", values, column.argument)
        if len(values):
            batches.append(values)


class _Side(NamedTuple):
    """The items of a side that this process holds, joined."""

    shard: Shard
    columns: dict[Column, Labels]


class Dealing(NamedTuple):
    """How the items of a side were dealt to the processes."""

    items: int | None
    """number of items before a `DistributedSampler` repeats some; None on a single process, and if it is unknown"""
    reason: str | None
    """why it is unknown"""
    items_of_all: int
    """number of items that came to all processes"""


class Collection:
    """The embeddings, labels, ids and columns of a validation, held once.

    It is made at the setup of the first monitor of a Trainer that has this source. What it holds is dropped when the last
    monitor has finished its measuring; a side that all monitors have measured goes before.

    Args:
        source: Where the items come from.
        owner: Name of the monitor that makes it, for messages.
    """

    def __init__(self, source: EmbeddingSource, owner: str) -> None:
        # Raises if the folder cannot be written to.
        EmbeddingStore(source.spill_to, owner)
        self.source = source
        # how repeated items could be told, as monitors of this source have said in this run
        self.remedies_told: set[str] = set()
        self.reader = EmbeddingReader(source, owner, needs_labels=False)
        self.reader.read_labels = self._read_labels
        self.embedder = Embedder(self.reader)
        self.banks: list[Bank] = []
        self._questions: list[Question] = []
        # form of the labels so far, see `Labels.form`; empty before the first
        self.label_form = ""
        # whether items have several labels each
        self.has_label_sets = False
        # whether labels are floating-point numbers, which are targets to the questions that take them; to all others they
        # are label sets, if they are nothing but zeros and ones
        self.has_targets = False
        # whether each step gives two embeddings
        self.has_two_encoders = False
        # the part of the data that this process has in a validation
        self.replica = Replica(number=0, replicas=1, is_first=True)
        self._reset()

    # ------------------------------------------------------------------------------------------------------ who takes part

    def join(self, question: Question) -> None:
        """Take part in each validation of the run."""
        self._questions.append(question)
        # What cannot be read concerns all of them.
        self.reader.owner = _owners(self._questions)

    def shared_bank(self, items: BankItems, groups: Entry | Sequence[Entry] | None = None) -> Bank:
        """Return the bank of some items, one for all monitors that ask for the same items.

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

    # ---------------------------------------------------------------------------------------------------- one validation

    def begin(self, question: Question, trainer: Trainer) -> None:
        """Begin a validation: with the first question that says so, what is left of the one before is dropped.

        *Collective*.
        """
        if not self._begun or question in self._begun:
            self._reset()
            self.replica = replica_of(trainer)
        self._begun.append(question)

    def _reset(self) -> None:
        """Forget a validation: its items, its errors, who has finished, and what banks hold.

        The form of the labels stays for the run. Called only while no monitor still has to measure.
        """
        self._rows: dict[SideKey, _Rows] = {}
        self._joined: dict[SideKey, _Side] = {}
        # (side, flag) -> the items without and with the flag
        self._divided: dict[tuple[SideKey, Column], tuple[_Side, _Side]] = {}
        # errors of loaders: of all questions, of those that need labels, and of those that need a column
        self._errors: dict[int, Exception] = {}
        self._label_errors: dict[int, Exception] = {}
        self._column_errors: dict[tuple[int, Column], Exception] = {}
        # error of all questions but those that take the targets of a regression
        self._target_error: Exception | None = None
        # whether the items of each loader have labels in this process
        self._has_labels: dict[int, bool] = {}
        # numbers of items and of batches of each loader so far
        self.seen: Counter[int] = Counter()
        self.batches: Counter[int] = Counter()
        # the step that is read: loader and index of its batch, who will read it, and what was read
        self._step: tuple[int, int] | None = None
        self._expecting: list[Question] = []
        self._is_read = False
        self._batch: Batch | None = None
        # what other processes know, asked once
        self._has_agreed = False
        self._dealings: dict[SideKey, Dealing] = {}
        # questions that have begun this validation, those that need no more of a side, and those that have finished
        self._begun: list[Question] = []
        self._done: dict[SideKey, list[Question]] = defaultdict(list)
        self._finished: list[Question] = []
        for bank in self.banks:
            bank.clear()

    def finish(self, question: Question) -> None:
        """End the part of a question in this validation; with the last question all is dropped."""
        self._finished.append(question)
        if all(known in self._finished for known in self._questions):
            self._reset()

    def done_with(self, question: Question, sides: Iterable[SideKey]) -> None:
        """Say that a question needs these sides no more; joined ones that no question needs are dropped."""
        for key in sides:
            side = self._undivided(key)
            self._done[side].append(question)
            finished = [*self._done[side], *self._finished]
            if all(known in finished for known in self._questions if known.keeps_items):
                self._joined.pop(side, None)
                self._divided = {place: parts for place, parts in self._divided.items() if place[0] != side}

    def _undivided(self, key: SideKey) -> SideKey:
        """Return the side that holds the items of a side: with a flag both sides of a loader are collected as one."""
        return key if self.has_two_encoders else SideKey(key.loader)

    # ------------------------------------------------------------------------------------------------------ reading a batch

    def expect(self, question: Question, loader: int, batch_idx: int) -> None:
        """Begin a step: keep what the submodule returns from now on."""
        if self._step != (loader, batch_idx):
            self._step = (loader, batch_idx)
            self._expecting = []
            self._is_read = False
            self._batch = None
            self.reader.start_capture()
        self._expecting.append(question)

    def read(self, question: Question, trainer: Trainer, loader: int, outputs: Any, batch: Any) -> Batch | None:
        """Read the batch that was expected, once for all questions.

        Returns:
            What was read; None if this batch or an earlier one of its loader could not be read, see `failures`.
        """
        if not self._is_read:
            self._is_read = True
            self._batch = self._read_once(trainer, loader, outputs, batch)
        result = self._batch
        self._expecting.remove(question)
        if not self._expecting:
            # The embeddings of the step are on its device.
            self._batch = None
        return result

    def _read_once(self, trainer: Trainer, loader: int, outputs: Any, batch: Any) -> Batch | None:
        """Read a batch and append it; an error waits for the end of the epoch."""
        self.batches[loader] += 1
        if loader in self._errors:
            # A set that lacks a batch is no set.
            self.reader.stop_capture()
            return None
        try:
            result = self._append_batch(trainer, loader, outputs, batch)
        except Exception as error:  # a metric must not end a training
            self._errors[loader] = error
            return None
        self.seen[loader] += result.items
        return result

    def _append_batch(self, trainer: Trainer, loader: int, outputs: Any, batch: Any) -> Batch:
        """Append a batch to the rows of its sides.

        Raises:
            UsageError: If there are no embeddings, or their labels do not fit them.
        """
        step = step_of(trainer)
        first = self.seen[loader]
        if self.source.embeds_batches:
            self.reader.stop_capture()
            labelled = self.embedder.in_evaluation(trainer, trainer.lightning_module, batch)
        else:
            both = read_two_encoders(self.reader, outputs, batch, step, first)
            if both is not None:
                self.has_two_encoders = True
                for is_second, labelled_side in enumerate(both):
                    key = SideKey(loader, bool(is_second))
                    self._append(key, *labelled_side, trainer, outputs, batch)
                return Batch(first, len(both[0][1]), None, no_labels())
            labelled = self.reader.read(outputs, batch, step)
        embeddings, labels = labelled
        has_labels = len(labels) == len(embeddings)
        if self._has_labels.setdefault(loader, has_labels) != has_labels:
            raise ValueError(
                f"{self.reader.owner}: some batches have labels, others have none. Give labels in every batch, or in none."
            )
        if not has_labels and loader not in self._label_errors:
            asking = (question for question in self._questions if question.needs_labels)
            error = self.reader.no_labels(batch, step, _owners(asking))
            # A step that has given labels before may give some again.
            was_successful = step in self.reader.successful_steps
            self._label_errors[loader] = ValueError(str(error)) if was_successful else error
        # The store asks for a label of each item; without labels it is never used.
        filled = labels if has_labels else Labels(torch.zeros(len(embeddings), dtype=torch.int64, device="cpu"))
        self._append(SideKey(loader), embeddings, filled, trainer, outputs, batch)
        return Batch(first, len(embeddings), embeddings, labels)

    def _append(
        self, key: SideKey, embeddings: Tensor, labels: Labels, trainer: Trainer, outputs: Any, batch: Any
    ) -> None:
        """Append the items of a batch to the rows of a side, with their ids and columns."""
        if not self.replica.is_first or not any(question.keeps_items for question in self._expecting):
            return
        rows = self._rows.setdefault(key, _Rows(EmbeddingStore(self.source.spill_to, self.reader.owner)))
        items = len(labels)
        ids: Any = self.source.ids
        if isinstance(ids, tuple):
            ids = ids[key.is_second]
        item_ids = None
        if ids is not None:
            owner = f"{self.reader.owner}, EmbeddingSource"
            item_ids = read_names("ids", ids, outputs, batch, items, owner, self.source.views)
        rows.store.append(embeddings, labels, ids=item_ids)
        for column in _columns_of(self._expecting):
            if (key.loader, column) in self._column_errors:
                continue
            try:
                values = self._read_column(trainer, column, outputs, batch, items)
                if values is not None:
                    rows.append(column, values, self._owners_of(column))
            except Exception as error:
                self._column_errors[key.loader, column] = error

    def _owners_of(self, column: Column) -> str:
        """Return the names of the monitors that ask for a column, for messages."""
        return _owners(question for question in self._questions if column in question.columns)

    def _read_column(self, trainer: Trainer, column: Column, outputs: Any, batch: Any, items: int) -> Labels | None:
        """Return the value of each item of a batch; None if the column names the loader of the gallery."""
        owner = self._owners_of(column)
        views = self.source.views
        if column.argument != FLAG:
            return read_names(column.argument, column.entry, outputs, batch, items, owner, views)
        if gallery_flag(trainer, column.entry) is None:
            return None
        hint = "" if callable(column.entry) else f" Nor is there such a loader; there are {names_of_loaders(trainer)}."
        is_gallery = read_flag(column.entry, outputs, batch, items, owner, views, hint)
        return Labels(is_gallery.long())

    def _read_labels(self, labels: Any, step: str) -> Labels:
        """Read the labels of a step, one or several for each item.

        Raises:
            UsageError: If only some batches have several labels for each item.
        """
        owner = self.reader.owner
        if any(question.takes_targets for question in self._questions):
            targets = as_targets(labels, "labels", owner)
            if targets is not None:
                self._see_targets(labels, step)
                return targets
        item_labels = as_labels(labels, "labels", owner, sets=True)
        if not len(item_labels):
            return item_labels
        form = item_labels.form
        are_sets = item_labels.columns is not None
        # The store refuses all other forms that are mixed in one loader.
        if self.label_form not in ("", form) and (are_sets or self.has_label_sets):
            raise UsageError(
                f"{owner}: the labels of {step} are {form}, those before were {self.label_form}. Use the same form in all "
                "batches."
            )
        self.label_form = form
        self.has_label_sets = self.has_label_sets or are_sets
        return item_labels

    def _see_targets(self, labels: Any, step: str) -> None:
        """Keep the error of all questions that take no targets, unless labels are zeros and ones in all batches."""
        self.has_targets = True
        if self._target_error is not None:
            return
        owner = _owners(question for question in self._questions if not question.takes_targets)
        try:
            as_labels(labels, "labels", owner, sets=True)
        except ValueError as error:
            fault = without_owner(error, owner)
            self._target_error = UsageError(f"{owner}: the labels of {step} are {describe(labels)}. {fault}")

    def has_label_sets_for(self, question: Question) -> bool:
        """Return whether items have several labels each, as far as this process knows."""
        are_zeros_and_ones = self.has_targets and self._target_error is None
        return self.has_label_sets or (are_zeros_and_ones and not question.takes_targets)

    def failures(self, question: Question) -> dict[int, Exception]:
        """Return loader -> the error with which this process cannot answer a question."""
        failures: dict[int, Exception] = {}
        for (loader, column), error in self._column_errors.items():
            if column in question.columns:
                failures[loader] = error
        if question.needs_labels:
            failures |= self._label_errors
            if self._target_error is not None and not question.takes_targets:
                failures |= dict.fromkeys(self._has_labels, self._target_error)
        return failures | self._errors

    # --------------------------------------------------------------------------------------------- the end of a validation

    def agree(self) -> None:
        """Learn of labels and encoders from processes that had items, once. *Collective*."""
        if self._has_agreed:
            return
        by_rank = gather_objects((self.has_label_sets, self.has_targets, self.has_two_encoders))
        self.has_label_sets = any(has_label_sets for has_label_sets, _, _ in by_rank)
        self.has_targets = any(has_targets for _, has_targets, _ in by_rank)
        self.has_two_encoders = any(has_two_encoders for _, _, has_two_encoders in by_rank)
        self._has_agreed = True

    def have_classes(self, loader: int) -> bool | None:
        """Return whether the items of a loader have labels that name classes; None without items. *Collective*."""
        has_classes = self._has_labels.get(loader)
        if self.has_targets:
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

    def dealing(self, trainer: Trainer, key: SideKey) -> Dealing:
        """Return how the items of a side were dealt to the processes, asked once. *Collective*."""
        side = self._undivided(key)
        samples = self.seen[side.loader]
        rows = self._rows.get(side)
        items = len(rows.store) if self.has_two_encoders and rows is not None else samples
        if process_count() == 1:
            return Dealing(None, None, items)
        if side not in self._dealings:
            dataloader = list(evaluation_loaders(trainer).values())[side.loader]
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
                # Such as several texts of an image: the rows of this encoder are not the samples that were dealt.
                if length % self.replica.replicas:
                    reasons.append("this encoder gives other numbers of embeddings than the first")
                length = None
            reason = reasons[0] if reasons else None
            self._dealings[side] = Dealing(length, reason, sum(count for _, count, _ in by_rank))
        return self._dealings[side]

    def shard(self, trainer: Trainer, key: SideKey, flag: Column | None = None) -> Shard:
        """Return this process's part of a side, without repeated items. *Collective*.

        Args:
            trainer: The Trainer.
            key: The side.
            flag: The column that divides the items of a loader into queries and gallery.
        """
        return self._side(trainer, key, flag).shard

    def column(self, trainer: Trainer, key: SideKey, column: Column, flag: Column | None = None) -> Labels:
        """Return the value of each item of a side's shard, in the order of the shard. *Collective*, see `shard`."""
        return self._side(trainer, key, flag).columns[column]

    def _side(self, trainer: Trainer, key: SideKey, flag: Column | None) -> _Side:
        """Return a side, joined and divided once. *Collective*."""
        undivided = key if flag is None else SideKey(key.loader)
        if flag is None:
            return self._join(trainer, undivided)
        if (undivided, flag) not in self._divided:
            whole = self._join(trainer, undivided)
            is_gallery = whole.columns[flag].values
            assert isinstance(is_gallery, Tensor)
            masks = (is_gallery == 0, is_gallery == 1)
            queries, gallery = (self._rows_of(whole, mask) for mask in masks)
            self._divided[undivided, flag] = (queries, gallery)
            # A second copy of the embeddings stays only if some question needs them undivided.
            if all(flag in question.columns for question in self._questions if question.keeps_items):
                del self._joined[undivided]
        return self._divided[undivided, flag][key.is_second]

    def _rows_of(self, side: _Side, mask: Tensor) -> _Side:
        """Return some items of a side. *Collective*."""
        columns = {column: values[mask] for column, values in side.columns.items()}
        return _Side(rows_of_shard(side.shard, mask, self.source.spill_to, self.reader.owner), columns)

    def _join(self, trainer: Trainer, key: SideKey) -> _Side:
        """Return a side; its batches are dropped. *Collective*."""
        if key not in self._joined:
            rows = self._rows.get(key) or _Rows(EmbeddingStore(self.source.spill_to, self.reader.owner))
            dataset_size = self.dealing(trainer, key).items
            shard = rows.store.shard(dataset_size, (self.replica.number, self.replica.replicas))
            # A process without items has no ids, but passes them as the others do.
            if self.source.ids is not None and shard.ids is None:
                shard = shard._replace(ids=no_labels())
            # A position counts the items of all parts of the data, which are dealt in turn.
            kept_rows = (shard.positions - self.replica.number) // self.replica.replicas
            columns: dict[Column, Labels] = {}
            for column in _columns_of(self._questions):
                batches = rows.columns[column]
                values = join(self.reader.owner, batches, column.argument) if batches else no_labels()
                # After an error of this column its values are fewer; nobody reads them.
                columns[column] = values[kept_rows] if len(values) == len(rows.store) else no_labels()
            self._joined[key] = _Side(shard, columns)
            self._rows.pop(key, None)
        return self._joined[key]

    # ------------------------------------------------------------------------------------------------------------ hooks

    def close(self) -> None:
        """End the run, also after an error: remove the hook, and drop what was collected."""
        self.reader.detach()
        self._reset()
        for bank in self.banks:
            bank.items.begin()

    def attach(self, module: LightningModule) -> None:
        """Add the hook to the submodule that embeddings come from.

        Raises:
            UsageError: If there is no such submodule, or not that of `embed`.
        """
        self.reader.attach(module)
        if self.source.embed is not None:
            self.embedder.check_name(module)


def _owners(questions: Iterable[Question]) -> str:
    """Return the names of the monitors that ask, for messages: `RetrievalMonitor and KnnMonitor`."""
    return " and ".join(dict.fromkeys(question.owner for question in questions))


def _columns_of(questions: Iterable[Question]) -> list[Column]:
    """Return the columns that some of these questions ask for."""
    return list(dict.fromkeys(column for question in questions for column in question.columns))
