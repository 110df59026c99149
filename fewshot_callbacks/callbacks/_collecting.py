"""Base class of the monitors that measure whole sets. A `Collection` reads each set once for all monitors with one source.

Lightning calls the hooks of a validation or test in this order (`Collection` describes what it contains in between):

    setup                on every rank: joins the collection of the source, or creates it
    on_*_start           adds the hook to the submodule that embeddings come from
    on_*_epoch_start     drops what an interrupted epoch has left; finds the loaders to read
    on_*_batch_start     starts to capture the submodule's output
    on_*_batch_end       the collection reads the batch; `_see_batch` gets it; errors wait for the end of the epoch
    on_*_epoch_end       all ranks exchange their errors, then `_measure_set` measures each set (collective), and the
                         collected items are dropped
    teardown, or on_exception
                         removes the hook, and drops the collected items
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection as Container
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from fewshot_callbacks.callbacks._bank import Bank, changed_weights
from fewshot_callbacks.callbacks._collection import Batch, Collection, Member
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._evaluation import (
    EvaluationMonitor,
    Loaders,
    ends_of_loaders,
    gather_errors,
    stage_of,
    step_of,
    suffixes,
)
from fewshot_callbacks.callbacks._sides import (
    FLAG,
    Column,
    MeasuredSet,
    Side,
    check_gallery,
    gallery_loader,
    sets_of,
)
from fewshot_callbacks.callbacks._watched_keys import Better, watchers
from fewshot_callbacks.callbacks.embedding_source import EmbeddingSource, Entry, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional._notes import without_digits
from fewshot_callbacks.functional.retrieval.settings import several
from fewshot_callbacks.metrics.embedding_store import Shard
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer, rank_zero_info


class CollectingMonitor(EvaluationMonitor):
    """Measures the sets of each validation and test, and logs their values.

    Lightning's sanity check measures nothing, but a step without embeddings is an error there, too. An error of one
    rank waits for the end of the epoch; otherwise the other ranks would wait for this rank.

    A subclass implements `_names` and `_measure_set`.

    Args:
        keeps_items: Whether the items are needed at the end of the epoch. If not, `_see_batch` gets one batch at a
            time.
    """

    # whether items may have several labels each, and whether steps may give the embeddings of two encoders
    _takes_label_sets = False
    _takes_two_encoders = False
    # name of a value, without stage and loader -> which values are better; no entry if neither
    _better: Mapping[str, Better] = {}

    # ends of messages, which subclasses replace
    _remedy_for_two = "Give them different names, such as name='t2i' for val/t2i/mAP."
    _remedy_for_logged_twice = ", or pass name='exact' for val/exact/mAP"
    _remedy_for_weights = ""

    # training items that the sets are compared with
    _training_bank: Bank | None = None

    def __init__(
        self,
        source: EmbeddingSource | Source | NoFile,
        *,
        gallery: int | Entry | None = None,
        loaders: Loaders | None = None,
        name: str | None = None,
        prog_bar: bool = False,
        strict: bool | None = None,
        columns: Sequence[Column] = (),
        groups: Sequence[Entry] | Entry | None = None,
        needs_labels: bool = True,
        takes_targets: bool = False,
        keeps_items: bool = True,
    ) -> None:
        super().__init__(strict)
        owner = self._policy.owner
        if name is not None and not name.strip("/"):
            raise InputError(f"{owner}(name={name!r}) is empty. Leave out name to log val/mAP and test/mAP.")
        if loaders is not None and not several(loaders):
            raise InputError(f"{owner}(loaders={loaders!r}) is empty. Leave out loaders to measure all of them.")
        self.source = EmbeddingSource.of(source, owner)
        self.gallery = gallery
        self.loaders = loaders
        self.name = name
        self.prog_bar = prog_bar
        # An index is a loader; a name may be a loader or a flag.
        if gallery is not None and not isinstance(gallery, int):
            columns = [*columns, Column(FLAG, gallery)]
        self._groups = (
            None if groups is None else Column("groups", tuple(groups) if isinstance(groups, list) else groups)
        )
        if self._groups is not None:
            columns = [self._groups, *columns]
        self._member = Member(owner, columns, needs_labels, takes_targets, keeps_items)
        # It is not shared before the setup.
        self._collection = Collection(self.source, owner)
        self._clear()

    # ------------------------------------------------------------------------------------------ what a subclass implements

    @abstractmethod
    def _names(self) -> Sequence[str]:
        """Return the names of all values of a set, without stage and end of the key; empty if unknown."""

    @abstractmethod
    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Return name -> value for a set, the same in every process. *Collective*.

        `set_name` is the first part and the end of the keys, such as `val/t2i`.
        """

    def _see_batch(self, trainer: Trainer, loader: int, read: Batch, batch: Any) -> None:
        """Process a batch. An error counts for its loader. By default, do nothing."""

    def _clear(self) -> None:
        """Reset this monitor's own state, around each validation and after a run."""
        # errors of this rank in `_see_batch`, by loader
        self._own_errors: dict[int, Exception] = {}
        # indices of the loaders to read, which are found at the start of a validation
        self._loaders_read: Container[int] = ()

    def _after_set(self, trainer: Trainer, stage: str, measured_set: MeasuredSet, has_values: bool) -> None:
        """Process a set after its values were logged. By default, do nothing. *Collective*."""

    def _names_of_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Sequence[str]:
        """Return the names that are logged as NaN if a set cannot be measured. *Collective*."""
        return self._names()

    def _is_measured(self, trainer: Trainer) -> bool:
        """Return whether this validation is measured; by default True."""
        return True

    def _check(self, trainer: Trainer) -> None:
        """Check at the end of an epoch what may fail on only one rank. Not collective."""
        collection = self._collection
        owner = self._policy.owner
        if collection.has_two_encoders and not self._takes_two_encoders:
            raise UsageError(
                f"{owner}: the source gives the embeddings of two encoders, {' and '.join(collection.reader.keys)}. Name "
                "the embeddings and the labels of one encoder: source=('embeddings', 'labels')."
            )
        if self._has_label_sets and not self._takes_label_sets:
            raise UsageError(
                f"{owner} needs one label for each item, but the labels are {collection.labels.form or 'zeros and ones'}. "
                "Pass a source whose labels are one integer or string for each item."
            )
        two_encoders = collection.has_two_encoders
        check_gallery(trainer, self.gallery, self.loaders, owner, two_encoders=two_encoders)

    # -------------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: join the collection of the first monitor with the same source."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        monitors = [callback for callback in callbacks if isinstance(callback, CollectingMonitor)]
        sharing = [monitor for monitor in monitors if monitor.source == self.source]
        # A monitor is not in the list if a callback of the user forwards hooks to it.
        first = sharing[0] if self in sharing else self
        # Lightning sets up callbacks in their order, so the first one's collection is new.
        owner = self._policy.owner
        self._collection = Collection(self.source, owner) if first is self else first._collection
        self._collection.join(self._member)
        super().setup(trainer, pl_module, stage)
        if first is self:
            self._tell_of_similar_sources(monitors)
        self._clear()

    def _tell_of_similar_sources(self, monitors: Sequence[CollectingMonitor]) -> None:
        """Report another monitor that reads the same embeddings again, and how the sources differ."""
        for other in monitors[: monitors.index(self)] if self in monitors else ():
            both_keep_items = other._member.keeps_items and self._member.keeps_items
            if both_keep_items and other.source.source == self.source.source:
                calls = (other.source.but_for(), self.source.but_for())
                reason = f"one has source={calls[0]}, and the other source={calls[1]}"
                if calls[0] == calls[1]:
                    reason += ", and two functions are equal only if they are the same object"
                rank_zero_info(
                    f"{other._policy.owner} and {self._policy.owner} each keep a copy of the same embeddings, because "
                    f"{reason}. Pass one EmbeddingSource to both to keep one copy."
                )
                return

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hook to the submodule that embeddings come from, which now has its layers."""
        self._collection.attach(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hook if there was no fit, or to a layer that was replaced since its start."""
        self.on_fit_start(trainer, pl_module)

    on_test_start = on_validation_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: Any) -> None:
        """Remove the hook, and drop the embeddings. An interrupted epoch is not measured."""
        self._collection.close()
        self._training_bank = None
        # The next run shares a new collection.
        self._collection = Collection(self.source, self._policy.owner)
        self._clear()

    on_exception = teardown  # type: ignore[assignment] # Lightning passes the exception by its place

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new set."""
        # Check before the first batch, because a validation may be long.
        with self._policy.handling(f"What {self._policy.owner} logs is NaN."):
            self._check_loaders(trainer)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            # Without a sanity check, the loaders were unknown at the start of the fit.
            self._check_keys(trainer)
        self._clear()
        self._loaders_read = self._read_loaders(trainer)
        self._collection.begin(self._member, trainer)
        if self._needs_bank(trainer):
            assert self._training_bank is not None
            self._training_bank.begin(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start to capture the submodule's output."""
        if dataloader_idx in self._loaders_read:
            self._collection.expect(self._member, dataloader_idx, batch_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Read the embeddings of this batch. An error waits for the end of the epoch."""
        if dataloader_idx not in self._loaders_read:
            return
        read = self._collection.read(self._member, trainer, outputs, batch)
        if read is None or dataloader_idx in self._own_errors:
            return
        try:
            self._see_batch(trainer, dataloader_idx, read, batch)
            if read.first == 0 and self._needs_bank(trainer):
                self._see_weights(trainer, dataloader_idx)
        except Exception as error:  # a metric must not end the run
            self._own_errors[dataloader_idx] = error

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the sets, before checkpoints and early stopping read the values. *Collective*."""
        self._collection.compare_replicas()
        errors = self._own_errors | self._collection.failures(self._member)
        if trainer.sanity_checking:
            # A mistake ends the run here; otherwise every validation would lack an attribute.
            for (loader, _), error in self._collection.failures_of_attributes(self._member).items():
                errors.setdefault(loader, error)
        # Errors of loaders that only other monitors read concern only them.
        failures = {loader: error for loader, error in errors.items() if loader in self._loaders_read}
        try:
            self._check_loaders(trainer)
            self._check(trainer)
            self._check_bank(trainer, has_failed=bool(failures))
        except Exception as error:  # a metric must not end the run
            # The error counts for all loaders without an own error.
            for loader in range(len(suffixes(trainer)) or 1):
                failures.setdefault(loader, error)
        failed = gather_errors(failures)
        if trainer.sanity_checking:
            for failure in failed.values():
                self._policy.handle(failure, "The sanity check found that the validation cannot be measured.")
        elif self._is_measured(trainer):
            self._measure(trainer, pl_module, stage_of(trainer), failed)
            if self._collection.seen and not failed:
                self._collection.reader.successful_steps.add(step_of(trainer))
        self._clear()
        self._collection.finish(self._member)

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end

    # ------------------------------------------------------------------------------------------------------ training items

    def _needs_bank(self, trainer: Trainer) -> bool:
        """Return whether this validation is compared with training items."""
        return self._training_bank is not None

    def _see_weights(self, trainer: Trainer, loader: int) -> None:
        """Embed the bank after the first batch of a loader."""
        assert self._training_bank is not None
        if not self._training_bank.after_first_batch(trainer, loader):
            raise changed_weights(self._policy.owner, self._remedy_for_weights)

    def _check_bank(self, trainer: Trainer, has_failed: bool) -> None:
        """Embed the training items if this rank had no batch, and raise a deferred error."""
        if not self._needs_bank(trainer):
            return
        assert self._training_bank is not None
        if not has_failed and not self._training_bank.embed_without_batch(trainer):
            raise changed_weights(self._policy.owner, self._remedy_for_weights)
        self._training_bank.check()

    # ---------------------------------------------------------------------------------------------------------- measuring

    def _read_loaders(self, trainer: Trainer) -> Container[int]:
        """Return the indices of the loaders of the queries and the gallery."""
        loaders = set(ends_of_loaders(trainer, self.loaders))
        index = gallery_loader(trainer, self.gallery)
        if index is not None:
            loaders.add(index)
        return loaders

    def _sets(self, trainer: Trainer) -> list[MeasuredSet]:
        """Return the sets to measure."""
        return sets_of(trainer, self.gallery, self.loaders, self._collection.directions)

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        """Measure each set and log its values. *Collective*."""
        self._collection.agree()
        # If the settings name no existing loader, a set without sides gets the error.
        sets = self._sets(trainer) or [MeasuredSet("", "", [])]
        for number, measured_set in enumerate(sets):
            values = self._values_of_set(trainer, stage, measured_set, failed)
            has_values = values is not None
            prefix = self._key(stage, measured_set.direction)
            suffix = measured_set.suffix
            if values is None:
                names = self._names_of_set(trainer, prefix + suffix, measured_set)
                values = dict.fromkeys(names, math.nan)
            logged = {f"{prefix}/{name}{suffix}": value for name, value in values.items()}
            self._log(trainer, pl_module, logged, next(iter(logged), None) if self.prog_bar else None)
            self._after_set(trainer, stage, measured_set, has_values)
            # Free the embeddings of the set before the next evaluation needs memory.
            needed = {side for later_set in sets[number + 1 :] for side in later_set.sides}
            self._collection.done_with(self._member, set(measured_set.sides) - needed)

    def _values_of_set(
        self, trainer: Trainer, stage: str, measured_set: MeasuredSet, failed: Mapping[int, Exception]
    ) -> Mapping[str, float] | None:
        """Return name -> value of a set; None after a handled error. *Collective*."""
        prefix = self._key(stage, measured_set.direction)
        set_name = prefix + measured_set.suffix
        names = self._names()
        consequence = f"{self._policy.owner} logs nothing for {set_name}."
        if names:
            consequence = f"{prefix}/{names[0]}{measured_set.suffix} and the other values of this set are NaN."
        values = None
        with self._policy.handling(consequence):
            for loader in [side.loader for side in measured_set.sides] or failed:
                if loader in failed:
                    raise failed[loader]
            with all_processes().together():
                values = self._measure_set(trainer, set_name, measured_set)
        return values

    def _shard(self, side: Side) -> Shard:
        """Return this process's part of a side, with groups if there are any. Warn of possible repeats. *Collective*."""
        self._warn_of_repeats(side)
        shard = self._collection.shard(side)
        if shard.labels.are_targets and not self._member.takes_targets:
            # Targets that are only zeros and ones are several labels per item for this monitor.
            shard = shard._replace(labels=as_labels(shard.labels.values, "labels", self._policy.owner, sets=True))
        if shard.note is not None:
            self._policy.warn(f"{self._policy.owner}: {shard.note} (Shown once.)", kind="ids")
        return shard if self._groups is None else shard._replace(groups=shard.columns[self._groups])

    def _warn_of_repeats(self, side: Side) -> None:
        """Warn if several processes may have seen the same items without ids. *Collective*."""
        dealing = self._collection.dealing(side)
        if dealing.reason is None or self.source.ids is not None:
            return
        dataset = getattr(self._collection.dataloader(side.loader), "dataset", None)
        once = "let Lightning make the sampler (Trainer(use_distributed_sampler=True))."
        if isinstance(dataset, IterableDataset):
            once = "yield other items in each process: use torch.distributed.get_rank() in __iter__."
        ids = ("key", "key_of_second") if self._collection.has_two_encoders else "key"
        remedy = (
            f"Pass {self.source.as_argument(ids=ids)}, an entry of the batch or of the step's output that identifies each "
            f"item, or {once}"
        )
        # Other monitors of the same source would repeat the warning.
        if remedy in self._collection.remedies_told:
            return
        self._collection.remedies_told.add(remedy)
        self._policy.warn(
            f"Several processes may have seen some of the {dealing.items_of_all} items of loader {side.loader}, because "
            f"{dealing.reason}. Such items count more than once. {remedy} (Shown once.)"
        )

    @property
    def _has_label_sets(self) -> bool:
        """Whether items have several labels for this monitor, as far as this process knows."""
        return self._collection.labels.are_sets(to_targets=self._member.takes_targets)

    def _ids_are_shared(self, sides: Sequence[Side]) -> bool:
        """Return whether an id names the same item among the queries and in the gallery.

        Ids of two encoders identify different things, such as images and texts.
        """
        return self.source.ids is not None and len(sides) == 2 and not self._collection.has_two_encoders

    def _awaited(self, trainer: Trainer, measured_set: MeasuredSet, names: Iterable[str]) -> list[str]:
        """Return the names that a checkpoint or a scheduler monitors.

        A missing key would end the run, so they are logged as NaN.
        """
        watched = {watcher.key for watcher in watchers(trainer)}
        prefix = self._key(stage_of(trainer), measured_set.direction)
        return [name for name in names if f"{prefix}/{name}{measured_set.suffix}" in watched]

    def _tell(self, notes: Sequence[str], set_name: str) -> None:
        """Warn of each kind of note once in a run."""
        for note in notes:
            self._policy.warn(f"{set_name}: {note} (Shown once.)", kind=self._policy.owner + without_digits(note))

    # --------------------------------------------------------------------------------------------------------------- keys

    def _prefix(self, stage: str) -> str:
        return stage if self.name is None else f"{stage}/{self.name}"

    def _key(self, stage: str, *names: str) -> str:
        """Return the prefix of a stage and these names, joined by slashes; empty names are skipped."""
        return "/".join(filter(None, (self._prefix(stage), *names)))

    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        keys: dict[str, Better] = {}
        for measured_set in self._sets(trainer):
            for name in self._names():
                key = self._key("val", measured_set.direction, name) + measured_set.suffix
                keys[key] = self._better.get(name)
        return keys
