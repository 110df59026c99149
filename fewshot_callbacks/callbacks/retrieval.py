"""Exact retrieval metrics at the end of every validation and test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from fewshot_callbacks.callbacks._collecting import CollectingMonitor
from fewshot_callbacks.callbacks._collection import Batch
from fewshot_callbacks.callbacks._conduct import UsageError, evaluation_progress, print_beside_bar
from fewshot_callbacks.callbacks._evaluation import Loaders, gather_errors, stage_of
from fewshot_callbacks.callbacks._gains import CHECKPOINT_ENTRY, Compare, Gains, names_of_gain, values_of_gain
from fewshot_callbacks.callbacks._sides import SLICES, Column, MeasuredSet, Side
from fewshot_callbacks.callbacks._viewers import Viewer, show_set
from fewshot_callbacks.callbacks._watched_keys import Better, watchers
from fewshot_callbacks.callbacks.embedding_source import (
    STEP_KEYS,
    EmbeddingSource,
    Entry,
    Source,
    as_code,
    hints_of_source,
    is_entry,
)
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._notes import without_digits
from fewshot_callbacks.functional._reading import named
from fewshot_callbacks.functional.retrieval import (
    CompressionReport,
    RequestedMetric,
    RetrievalReport,
    Share,
    evaluate_retrieval,
)
from fewshot_callbacks.functional.retrieval.compression import Compression, costs_beside, headline_metrics
from fewshot_callbacks.functional.retrieval.gain import Gain
from fewshot_callbacks.functional.retrieval.settings import from_keywords, request_of, several, without_classes
from fewshot_callbacks.functional.retrieval.slices import SlicesError
from fewshot_callbacks.settings import NoFile, RetrievalOptions, plain_list, refuse_other_arguments, takes
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer

# Name of the number of queries without a match, which is logged with the metrics once there are any.
UNMATCHED = "queries_without_match"
# Arguments of `evaluate_retrieval`.
GROUPS = ("query_groups", "gallery_groups")
IDS = ("query_ids", "gallery_ids")
LABELS = ("query_labels", "gallery_labels")

_GALLERY_HINT = "gallery=1, the index or the name of the loader, or gallery='is_gallery', an entry of the batch"


def _hints(source: Any) -> dict[str, Callable[[Any], str]]:
    """Return argument of `evaluate_retrieval` -> a function of its value that describes where a monitor finds it."""
    of_source = hints_of_source(source, "RetrievalMonitor")
    return {
        **dict.fromkeys(GROUPS, _groups_hint),
        **of_source,
        **dict.fromkeys(IDS, of_source["ids"]),
        "query_labels": of_source["labels"],
        "knn": lambda k: f"a monitor of its own: KnnMonitor({k if isinstance(k, int) else 20}, bank='self')",
        **dict.fromkeys(("gallery_labels", "is_gallery"), lambda _: _GALLERY_HINT),
        **dict.fromkeys(("queries", "embeddings"), _source_hint),
    }


def _groups_hint(groups: Any) -> str:
    """Return where a monitor finds groups."""
    entries = groups if is_entry(groups) else ("person", "camera")
    return f"groups={as_code(entries)}, entries of the batch or of the step's output, all of which a group shares"


def _source_hint(value: Any) -> str:
    """Return where a monitor finds embeddings."""
    name = value if isinstance(value, str) else "encoder"
    return f"source={name!r}, a submodule, or source=('embeddings', 'labels'), keys of the step's output"


def _refuse_groups_of_classes(groups: Any) -> None:
    """Refuse lists of classes, which are the groups of Grouped Recall, where entries of a batch are expected."""
    if isinstance(groups, list | tuple) and any(isinstance(entry, list | tuple) for entry in groups):
        raise InputError(
            f"RetrievalMonitor(groups={groups!r}): lists name no entry of a batch. Write {_groups_hint(None)}. Groups of "
            "classes for Grouped Recall are label_groups=[[0, 1, 2], [3, 4, 5]]."
        )


def _columns_of_slices(slices: Any) -> dict[str, Column]:
    """Return attribute -> where its values are."""
    if slices is None:
        return {}
    slices = plain_list(slices)
    entries = slices if isinstance(slices, Mapping) else {name: name for name in several(slices)}
    if not all(isinstance(name, str) for name in entries):
        raise InputError(
            f"RetrievalMonitor(slices={slices!r}): an attribute needs a name. Pass names of entries, such as ('camera',), "
            "or {'camera': 2} for a position in the batch."
        )
    return {name: Column(SLICES, entry) for name, entry in entries.items()}


def _sliced_metric(metrics: Sequence[RequestedMetric]) -> RequestedMetric:
    """Return the metric of slices that is logged: the first with a value for each query."""
    for requested in metrics:
        if requested.metric.is_of_queries:
            return requested
    raise InputError(
        "RetrievalMonitor(slices=...) needs a metric that has a value for each query, such as mAP. Add it to metrics."
    )


def _name_of_worst(requested: RequestedMetric, attribute: str) -> str:
    """Return the name with which the worst slice of an attribute is logged."""
    return f"{requested.key}_worst_{attribute}"


@takes(RetrievalOptions)
class RetrievalMonitor(CollectingMonitor):
    """Logs mAP, Recall@K, precision, recall, F1, recall at fixed precision and Grouped Recall@K of an embedding.

    During validation and test, the embeddings of each step are copied to the CPU. At the end they are evaluated exactly
    over all pairs, in tiles under a memory budget, and then dropped. The values are logged before `ModelCheckpoint` and
    `EarlyStopping` read them, the same on every rank, as `val/mAP`, `val/recall@1`, `val/grouped_recall@1`, `val/pair_f1`,
    `val/recall@precision0.95` and so on (`test/...` in a test). Metrics are in [0, 1]; larger is better. Queries
    without a relevant item are left out of the means, and counted in `val/queries_without_match` once there are any. If
    a set cannot be evaluated, a warning gives the reason and its values are NaN. The model is not touched. Nothing is
    evaluated in the sanity check.

    Queries and gallery can be given in four ways:

    - one loader: each item is a query against all others (leave-one-out). Several loaders are evaluated separately, and
      the keys of each end in its name or index: `val/mAP/dataloader_idx_1`;
    - two loaders: `gallery=1` (or its name) is the gallery, and every other loader is a set of queries;
    - a flag in the batch: `gallery="is_gallery"`, a boolean for each item;
    - two encoders: `source=("image_embeds", "text_embeds")`, two keys of the step's output that both contain
      embeddings. Each side is searched with the other, and logged as `val/image_to_text/recall@1` and
      `val/text_to_image/recall@1`. Row i of both belong together, unless `labels` matches rows: one entry, or one for
      each side where an image has several texts.

    Labels of shape (items, labels) with zeros and ones are several labels for each item: a candidate is relevant if it
    shares one. By default the metrics that `evaluate_retrieval` reports of a relevance are then logged (`val/mAP`,
    `val/recall@1`, `val/ndcg@10` and so on). Metrics that need one class for each item are then refused.

    One validation runs in this order:

    1. `on_validation_epoch_start` begins a new set, and the callbacks that draw decide whether they will;
    2. `on_validation_batch_start` keeps what the submodule returns from now on, if embeddings come from one;
    3. `on_validation_batch_end` reads embeddings and labels, once for all monitors with an equal source, and appends them
       to the store of their side, which is a loader and an encoder;
    4. `on_validation_epoch_end` exchanges the errors of all ranks, and for each set
    5. joins its batches to this rank's part and drops them, evaluates it together with the other ranks,
    6. logs the values, so that checkpoints and early stopping read the same values on every rank,
    7. hands the whole set on the first rank to the callbacks that draw it, and drops it;
    8. `on_validation_end`: the pictures forget what they had kept of the batches.

    Args:
        source: Where embeddings come from: two keys of the mapping that the step returns (default
            `("embeddings", "labels")`), the name of a submodule whose output is the embedding, or a function of
            (outputs, batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also says where the labels
            and the ids of items are, what to do if the steps give no embeddings, and where large sets are kept. Monitors
            with equal sources share one copy of the embeddings.
        gallery: Index or name of the loader that holds the gallery; or, if no loader has that name, an entry of the step's
            output or of the batch, or a function of (outputs, batch), with a boolean for each item: whether it is of the
            gallery.
        loaders: Index or name of the loader that is measured, or several, such as `("retrieval",)` where the steps of
            another loader give no embeddings. By default all are measured. A gallery need not be named here. The keys of a
            single set have no ending.
        groups: Entries of the step's output or of the batch, such as `("person", "camera")`, or positions in the batch,
            such as `(1, 2)`: a candidate that equals the query in all of them is ignored, neither hit nor miss. They make
            the `query_groups` and `gallery_groups` of `evaluate_retrieval`.
        slices: Entries of the step's output or of the batch, such as `("camera", "light")`, each an attribute with an
            integer or a word for each item; or attribute -> entry, such as `{"camera": 2}` for a position in the batch. They
            make the `slices` of `evaluate_retrieval`. The first of `metrics` that has a value for each query is logged for
            the worst slice, as `val/mAP_worst_camera`. `report.of_slices("camera")` has all slices. An attribute with too
            many values, or without values in some batch, is left out with a warning, and its worst value is NaN.
        name: Part of the keys between the stage and the metric, such as `t2i` for `val/t2i/mAP` and `test/t2i/mAP`. Several
            monitors in one Trainer need different names; one of them may have none.
        dims: Numbers of dimensions, such as `(64, 256)`: the first of `metrics`, and `recall@1` if it is one of them, are
            also logged of embeddings that are truncated to so many dimensions, as `val/dims64/mAP`. See `compression_costs`.
        codes: `int8`, `binary` or both: the same of embeddings that are stored as codes, `val/int8/mAP`, and of truncated
            ones, `val/dims64_int8/mAP`.
        compare: Say after each validation whether it is better than a reference beyond chance. `best`: the reference is the
            last validation that was itself better beyond chance, at first the first one. `first`: the first validation of
            the training. A `RetrievalReport`, or the path of a saved one: that evaluation, of the same queries. The first
            of `metrics` that has a value for each query gives `val/mAP_gain`, its interval `val/mAP_gain_low` and
            `val/mAP_gain_high`, and `val/mAP_reference`. A line above the progress bar and the report say it as a sentence.
            The first validation logs a gain of 0. Checkpoints and early stopping should monitor `val/mAP`. An interval
            speaks of other classes of this kind, not of another seed.
        prog_bar: Show the first of the metrics in the progress bar.
        strict: Which errors end the run. None: a mistake in the settings or in what a step returns (no embeddings, no
            such loader) ends the run, at the sanity check if there is one; an error that may pass, such as a diverged
            batch, is a warning, once in a run, and the values are NaN. True: every error ends the run. False: no error
            does.
        **settings: See `RetrievalSettings`.

    Attributes:
        reports: The latest report of each set, by the suffix of its keys (`""` for a single loader), after the direction of
            two encoders (`"image_to_text"`); empty before the first evaluation.
        compression: The latest compression report of each set, by the same names: what `dims` and `codes` lose, with
            intervals. Empty without them.

    Raises:
        ValueError: If a setting is unknown or out of range, or `name` is empty.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> best = ModelCheckpoint(monitor="val/mAP", mode="max")
        >>> trainer = Trainer(callbacks=[RetrievalMonitor(), best], logger=False, accelerator="cpu")
    """

    _takes_label_sets = True
    _takes_two_encoders = True

    def __init__(
        self,
        *,
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        gallery: int | Entry | None = None,
        loaders: Loaders | None = None,
        groups: Sequence[Entry] | Entry | None = None,
        slices: Mapping[str, Entry] | Sequence[str] | str | Any | None = None,
        name: str | None = None,
        dims: int | Sequence[int] = (),
        codes: str | Sequence[str] = (),
        compare: Compare | None = None,
        prog_bar: bool = True,
        strict: bool | None = None,
        **settings: Unpack[RetrievalOptions],
    ) -> None:
        refuse_other_arguments("RetrievalMonitor", settings, _hints(source))
        groups = plain_list(groups)
        _refuse_groups_of_classes(groups)
        self._settings = from_keywords(RetrievalMonitor, settings)
        self._forms = Compression.checked("RetrievalMonitor", dims, codes, self._settings)
        self._forms.refuse_threshold(headline_metrics(request_of(self._settings).reported), self._settings)
        self._slices = _columns_of_slices(slices)
        if self._slices:
            _sliced_metric(request_of(self._settings).reported)
        super().__init__(
            source,
            columns=tuple(self._slices.values()),
            gallery=gallery,
            loaders=loaders,
            name=name,
            prog_bar=prog_bar,
            strict=strict,
            groups=groups,
        )
        self.compare = compare
        self._gains = None if compare is None else Gains(compare, self._settings.confidence, "RetrievalMonitor")
        self.reports: dict[str, RetrievalReport] = {}
        self.compression: dict[str, CompressionReport] = {}

    @property
    def report(self) -> RetrievalReport | None:
        """The latest report, if there is a single set; for several sets see `reports`."""
        return next(iter(self.reports.values())) if len(self.reports) == 1 else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: forget the run before."""
        # keys of metrics that the latest report of their set did not have
        self._undefined_keys: set[str] = set()
        # logged keys of numbers of queries without a match: there have been such queries, or the key is watched
        self._unmatched_keys: set[str] = set()
        if self._gains is not None and stage == "fit":
            self._gains.begin()
        super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what the next validations are compared with to a checkpoint."""
        if self._gains is not None and (state := self._gains.state()):
            checkpoint.setdefault(CHECKPOINT_ENTRY, {})[self._prefix("val")] = state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue with what a checkpoint says."""
        state = checkpoint.get(CHECKPOINT_ENTRY, {}).get(self._prefix("val"))
        if self._gains is None or not state or trainer.state.fn != "fit":
            return
        try:
            self._gains.load(state)
        except InputError as error:
            self._gains.begin()
            self._policy.warn(f"{self._policy.owner}(compare=...): {error} The next validation is the new reference.")

    def _see_batch(self, trainer: Trainer, loader: int, read: Batch, batch: Any) -> None:
        """Show a batch to the callbacks that draw.

        Raises:
            UsageError: If the embeddings have fewer dimensions than `dims`.
        """
        if read.embeddings is not None:
            try:
                self._forms.refuse_wide(read.embeddings.shape[1])
            except ValueError as error:
                raise UsageError(str(error)) from error
        prefix = self._prefix(stage_of(trainer))
        loader_name, dataloader = list(self._collection.dataloaders.items())[loader]
        for viewer in viewers_of(trainer, prefix):
            viewer.see_batch(prefix, loader_name, dataloader, range(read.first, read.first + read.items), batch)

    def _check(self, trainer: Trainer) -> None:
        super()._check(trainer)
        try:
            self._metrics()
        except ValueError as error:
            # A requested metric needs one class for each item.
            raise UsageError(str(error)) from error

    def _metrics(self) -> Sequence[RequestedMetric]:
        """Return the metrics, with or without a result."""
        settings = self._settings
        if self._has_label_sets:
            settings = without_classes(self._policy.owner, settings)
        return request_of(settings).reported

    def _better_of_names(self) -> dict[str, Better]:
        """Return name -> which values are better, with or without a result, for metrics and their compressed forms."""
        metrics = self._metrics()
        better: dict[str, Better] = {requested.key: requested.metric.better for requested in metrics}
        if self._gains is not None:
            better |= self._gains.better_of_names(self._gains.metric(metrics))
        if self._slices:
            sliced = _sliced_metric(metrics)
            better |= {_name_of_worst(sliced, attribute): sliced.metric.better for attribute in self._slices}
        for name, of_form in self._forms.metrics_by_name(headline_metrics(metrics)).items():
            better |= {f"{name}/{requested.key}": requested.metric.better for requested in of_form}
        return better

    def _names(self) -> Sequence[str]:
        return list(self._better_of_names())

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        """Evaluate the sets one after the other. *Collective*."""
        self.reports = {}
        self.compression = {}
        super()._measure(trainer, pl_module, stage, failed)

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Evaluate a set, and return the values that are logged. *Collective*."""
        name = measured_set.direction + measured_set.suffix
        arguments = self._arguments(trainer, measured_set.sides)
        self._leave_out_unread(set_name, measured_set, arguments["slices"])
        with evaluation_progress(trainer, f"Retrieval of {set_name}") as progress:
            report = self._evaluated(set_name, measured_set, arguments, progress)
        values = report.metrics() | self._worst_values(report)
        # Only validations of a training are compared with each other. A saved report is compared with any evaluation.
        if self._gains is not None and (trainer.state.fn == "fit" or not self._gains.is_of_training):
            gain = self._gain(trainer, self._gains, name, set_name, report)
            report = replace(report, gain=gain)
            values |= values_of_gain(self._gains.metric(self._metrics()).key, gain)
        self.reports[name] = report
        if not self._forms.are_none:
            compression = self._compress(trainer, set_name, report, arguments)
            self.compression[name] = compression
            values |= compression.metrics()
        prefix = set_name.removesuffix(measured_set.suffix)
        return self._logged(trainer, prefix, measured_set.suffix, report, values)

    def _evaluated(
        self,
        set_name: str,
        measured_set: MeasuredSet,
        arguments: dict[str, Any],
        progress: Callable[[int, int], None],
    ) -> RetrievalReport:
        """Return the report of a set; an attribute that cannot be sliced is left out of the arguments. *Collective*."""
        while True:
            try:
                with named(self._policy.owner, "evaluate_retrieval"):
                    return evaluate_retrieval(**arguments, progress=progress, **self._settings.arguments())
            except SlicesError as error:
                # Every process has the same error, before anything is compared.
                if error.attribute is None:
                    raise
                self._leave_out(set_name, measured_set, arguments["slices"], error.attribute, error)

    def _leave_out_unread(self, set_name: str, measured_set: MeasuredSet, slices: dict[str, Any]) -> None:
        """Leave out the attributes that a batch of some process lacked, although earlier batches had them. *Collective*."""
        if not slices:
            return
        failures = gather_errors(self._collection.failures_of_attributes(self._member))
        for name, column in self._slices.items():
            error = failures.get((measured_set.sides[0].loader, column))
            if error is not None:
                self._leave_out(set_name, measured_set, slices, name, error)

    def _leave_out(
        self, set_name: str, measured_set: MeasuredSet, slices: dict[str, Any], attribute: str, error: Exception
    ) -> None:
        """Leave out an attribute, and warn of the error, or raise it in a strict monitor."""
        del slices[attribute]
        name = _name_of_worst(_sliced_metric(self._metrics()), attribute)
        suffix = measured_set.suffix
        consequence = f"{set_name.removesuffix(suffix)}/{name}{suffix} is NaN; the other values are not affected."
        # A usage error would end the run, and with it lose the metrics that do not need the attribute.
        self._policy.handle(InputError(str(error)), consequence)

    def _worst_values(self, report: RetrievalReport) -> dict[str, float]:
        """Return name -> value of the worst slice of each attribute; NaN if the attribute was left out."""
        values = {}
        for attribute in self._slices:
            sliced = _sliced_metric(self._metrics())
            value = math.nan
            if attribute in report.slices:
                slices = report.of_slices(attribute, sliced.key)
                value = slices[slices.worst].value
            values[_name_of_worst(sliced, attribute)] = value
        return values

    def _gain(self, trainer: Trainer, gains: Gains, name: str, set_name: str, report: RetrievalReport) -> Gain | None:
        """Return the gain of a set, the same in every process: all have the same reports. None without a comparison."""
        gain, warning = gains.compare(name, gains.metric(self._metrics()), report)
        if warning is not None:
            self._policy.warn(f"{set_name}: {warning} (Shown once.)", kind="gain")
        if self.prog_bar and gain is not None:
            print_beside_bar(trainer, f"{set_name}: {gain.in_words()}")
        return gain

    def _after_set(self, trainer: Trainer, stage: str, measured_set: MeasuredSet, has_values: bool) -> None:
        """Hand an evaluated set to the callbacks that draw. *Collective*."""
        direction, suffix, sides = measured_set
        prefix = self._key(stage, direction)
        viewers = viewers_of(trainer, prefix)
        if not viewers or not has_values:
            return
        report = self.reports[direction + suffix]
        # If an image has several texts, rows of one side are not items of the loader, and viewers would read wrong
        # items.
        if direction and report.queries != report.gallery:
            return
        shards = [(self._shard(side), side.loader) for side in sides]
        show_set(viewers, trainer, prefix, suffix, report, shards)

    def _arguments(self, trainer: Trainer, sides: Sequence[Side]) -> dict[str, Any]:
        """Return the arguments of `evaluate_retrieval` for a set, except the settings. *Collective*."""
        shards = [self._shard(side) for side in sides]
        arguments: dict[str, Any] = dict(zip(GROUPS, (shard.groups for shard in shards), strict=False))
        if self._ids_are_shared(sides):
            arguments |= dict(zip(IDS, (shard.ids for shard in shards), strict=True))
        elif self.source.ids is not None and len(sides) == 1:
            # Each id is there once, so that ids change no value. By their digest, reports of other queries are refused.
            arguments["query_ids"] = shards[0].ids
        for rows, labels, shard in zip(("queries", "gallery"), LABELS, shards, strict=False):
            arguments |= {rows: shard.embeddings, labels: shard.labels}
        arguments["slices"] = {name: shards[0].columns[column] for name, column in self._slices.items()}
        return arguments | {"share": Share(all_processes(), *(shard.places for shard in shards))}

    def _compress(
        self, trainer: Trainer, key: str, report: RetrievalReport, arguments: Mapping[str, Any]
    ) -> CompressionReport:
        """Return the report on compressed forms of a set, the same in every process; warn of its notes. *Collective*."""
        sets = {name: array for name, array in arguments.items() if name not in ("queries", "share", "slices")}
        with evaluation_progress(trainer, f"Compression of {key}") as progress:
            compression = costs_beside(
                report,
                self._forms,
                arguments["queries"],
                sets,
                settings=self._settings,
                metrics=headline_metrics(self._metrics()),
                share=arguments["share"],
                progress=progress,
            )
        for note in compression.notes:
            self._policy.warn(f"{key}: {note} (Shown once.)", kind=without_digits(note))
        return compression

    def _names_of_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Sequence[str]:
        """Return the names that the latest report of a set had, or would have."""
        suffix = measured_set.suffix
        prefix = set_name.removesuffix(suffix)
        self._find_watched_unmatched(trainer, f"{prefix}/{UNMATCHED}{suffix}")
        names = [name for name in self._names() if f"{prefix}/{name}{suffix}" not in self._undefined_keys]
        if f"{prefix}/{UNMATCHED}{suffix}" in self._unmatched_keys:
            names.append(UNMATCHED)
        return names

    def _find_watched_unmatched(self, trainer: Trainer, key: str) -> None:
        """Log the number of queries without a match from now on, if it is watched."""
        if any(watcher.key == key for watcher in watchers(trainer)):
            self._unmatched_keys.add(key)

    def _logged(
        self, trainer: Trainer, prefix: str, suffix: str, report: RetrievalReport, values: dict[str, float]
    ) -> dict[str, float]:
        """Return name -> value of an evaluated set and its compressed forms, as they are logged."""
        values = dict(values)
        for note in report.messages:
            self._policy.warn(f"{prefix}{suffix}: {note}", kind=without_digits(note))
        unmatched_key = f"{prefix}/{UNMATCHED}{suffix}"
        self._find_watched_unmatched(trainer, unmatched_key)
        # Only zeros would be uninformative; a chart that has begun continues with zeros.
        if report.queries_without_match:
            self._unmatched_keys.add(unmatched_key)
        monitored_by = {watcher.key: watcher.name for watcher in watchers(trainer)}
        for name in self._names():
            key = f"{prefix}/{name}{suffix}"
            if name in values:
                self._undefined_keys.discard(key)
                continue
            if key in monitored_by:
                fact = f"{monitored_by[key]}(monitor={key!r}): this set has too few classes for it. "
                fact += report.fact_of_classes
                fix = "Monitor another value, or give the RetrievalMonitor a smaller label_groups."
                self._policy.handle(UsageError(f"{fact.rstrip()} {fix}"), f"{key} is NaN.")
                values[name] = math.nan
                self._undefined_keys.discard(key)
            else:
                self._undefined_keys.add(key)
        if unmatched_key in self._unmatched_keys:
            values[UNMATCHED] = float(report.queries_without_match)
        return values

    def _check_keys(self, trainer: Trainer) -> None:
        """Check the watched keys, and warn of one that watches a gain over the best validation."""
        had_checked = self._has_checked_keys
        super()._check_keys(trainer)
        if had_checked or not self._has_checked_keys or self._gains is None or not self._gains.is_over_best:
            return
        metric = self._gains.metric(self._metrics()).key
        gains = {
            self._key("val", measured_set.direction, name) + measured_set.suffix
            for measured_set in self._sets(trainer)
            for name in names_of_gain(metric)
        }
        for watcher in watchers(trainer):
            if watcher.key in gains:
                value_key = watcher.key.replace(f"{metric}_gain_low", metric).replace(f"{metric}_gain_high", metric)
                value_key = value_key.replace(f"{metric}_gain", metric)
                self._policy.warn(
                    f"{watcher.name}(monitor={watcher.key!r}) would keep the largest step between two validations, which is "
                    f"often an early one: with compare='best' the reference changes. Monitor {value_key!r}."
                )

    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        better = {**self._better_of_names(), UNMATCHED: None}
        keys: dict[str, Better] = {}
        for measured_set in self._sets(trainer):
            for name, direction in better.items():
                keys[self._key("val", measured_set.direction, name) + measured_set.suffix] = direction
        return keys


def viewers_of(trainer: Trainer, prefix: str) -> list[Viewer]:
    """Return the callbacks of a Trainer that want to see the sets of this epoch whose keys begin with the prefix."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    return [callback for callback in callbacks if isinstance(callback, Viewer) and callback.wants(prefix)]
