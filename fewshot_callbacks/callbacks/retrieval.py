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

# Name of the number of queries without a match. It is logged from the first such query on.
UNMATCHED = "queries_without_match"
# Arguments of `evaluate_retrieval`.
GROUPS = ("query_groups", "gallery_groups")
IDS = ("query_ids", "gallery_ids")
LABELS = ("query_labels", "gallery_labels")

_GALLERY_HINT = "gallery=1, the index or the name of the loader, or gallery='is_gallery', an entry of the batch"


def _hints(source: Any) -> dict[str, Callable[[Any], str]]:
    """Return argument of `evaluate_retrieval` -> a function of its value: what to pass to a monitor instead."""
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
    """Return what to pass for groups."""
    entries = groups if is_entry(groups) else ("person", "camera")
    return f"groups={as_code(entries)}, entries of the batch or of the step's output that all items of a group share"


def _source_hint(value: Any) -> str:
    """Return what to pass for embeddings."""
    name = value if isinstance(value, str) else "encoder"
    return f"source={name!r}, a submodule, or source=('embeddings', 'labels'), keys of the step's output"


def _refuse_groups_of_classes(groups: Any) -> None:
    """Refuse lists of classes as `groups`: they are for Grouped Recall."""
    if isinstance(groups, list | tuple) and any(isinstance(entry, list | tuple) for entry in groups):
        raise InputError(
            f"RetrievalMonitor(groups={groups!r}): a list does not name a batch entry. Write {_groups_hint(None)}. "
            "To group classes for Grouped Recall, pass label_groups=[[0, 1, 2], [3, 4, 5]]."
        )


def _columns_of_slices(slices: Any) -> dict[str, Column]:
    """Return attribute -> the column with its values."""
    if slices is None:
        return {}
    slices = plain_list(slices)
    entries = slices if isinstance(slices, Mapping) else {name: name for name in several(slices)}
    if not all(isinstance(name, str) for name in entries):
        raise InputError(
            f"RetrievalMonitor(slices={slices!r}): an attribute needs a name. Pass names of entries, such as "
            "('camera',), or {'camera': 2} for a position in the batch."
        )
    return {name: Column(SLICES, entry) for name, entry in entries.items()}


def _sliced_metric(metrics: Sequence[RequestedMetric]) -> RequestedMetric:
    """Return the metric of slices that is logged: the first with a value for each query."""
    for requested in metrics:
        if requested.metric.is_of_queries:
            return requested
    raise InputError(
        "RetrievalMonitor(slices=...) needs a metric with a value for each query. Add one to metrics, such as mAP."
    )


def _name_of_worst(requested: RequestedMetric, attribute: str) -> str:
    """Return the name with which the worst slice of an attribute is logged."""
    return f"{requested.key}_worst_{attribute}"


@takes(RetrievalOptions)
class RetrievalMonitor(CollectingMonitor):
    """Logs mAP, Recall@K, F1 and other exact retrieval metrics of your embeddings after each validation and test.

    By default it logs these keys. A test logs them with `test/`.

    - `val/mAP`: mean average precision, which shows how early all relevant items are found
    - `val/map@r`: the same for the first R ranks, where R is the number of relevant items
    - `val/r_precision`: fraction of the first R items that are relevant
    - `val/mrr`: mean of 1 / rank of the first relevant item
    - `val/recall@1`, `val/recall@5`, `val/recall@10`: fraction of queries with a relevant item among the first 1, 5 or
      10
    - `val/grouped_recall@1`: Recall@1 in a search among 10 classes at a time; it needs 20 classes
    - `val/pair_precision`, `val/pair_recall`, `val/pair_f1`: precision, recall and F1 of "same class or not" over all
      pairs
    - `val/pair_threshold`: score with the best F1
    - `val/recall@precision0.95`: fraction of same-class pairs that you can accept at a precision of 95 %

    All values except the threshold are in [0, 1], and higher is better. Queries without a relevant item are left out of
    the means, and `val/queries_without_match` counts them. If a set cannot be evaluated, its values are NaN and a
    warning gives the reason. Every process logs the same values, before `ModelCheckpoint` and `EarlyStopping` read
    them. Nothing is evaluated in the sanity check. Your module is not changed.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.tensor([[0.0], [2.0], [5.0], [6.0], [9.0], [11.0]])
        >>> loader = DataLoader(TensorDataset(items, torch.tensor([0, 0, 0, 1, 1, 1])), batch_size=3)
        >>> monitor = RetrievalMonitor(source="encoder", metrics=("mAP", "recall@1"), similarity="euclidean")
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> {key: round(value.item(), 4) for key, value in trainer.callback_metrics.items()}
        {'val/mAP': 0.8333, 'val/recall@1': 0.6667}

    You can give queries and gallery in four ways:

    - One loader: each item searches all other items. Several loaders are evaluated separately, and their keys end in
      the name or index of the loader: `val/mAP/dataloader_idx_1`.
    - Two loaders: `gallery=1`, or a name, makes one loader the gallery. All other loaders have queries.
    - A flag: `gallery="is_gallery"` reads a boolean per item from the batch. True means that the item is in the
      gallery.
    - Two encoders: `source=("image_embeds", "text_embeds")` names two keys of the step's output. Each side searches the
      other: `val/image_to_text/recall@1`, `val/text_to_image/recall@1`. Row i of one side matches row i of the other,
      unless `labels` of an `EmbeddingSource` matches rows: one entry, or one per side if an image has several texts.

    If each item has several labels, pass them as zeros and ones of shape (items, labels). An item is relevant if it
    shares a label with the query. The default keys are then the metrics that do not need one class per item, such as
    `val/mAP`, `val/recall@1` and `val/ndcg@10`. Other metrics are refused.

    The arguments, by purpose:

    - what is evaluated: `source`, `gallery`, `loaders`, `groups`, `max_queries`
    - what is logged: `metrics`, `slices`, `compare`, `dims`, `codes`, `name`, `prog_bar`
    - how it is computed: `similarity`, `ties`, `threshold`, `threshold_bounds`, `label_groups`, `seed`, `confidence`
    - limits: `memory_mb`, `device`, `strict`

    Args:
        source: Where embeddings come from: the name of a submodule, such as `"encoder"`, whose output is the embedding;
            two keys of the mapping that the step returns (default `("embeddings", "labels")`); a function of (outputs,
            batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also names labels and ids. Monitors
            with equal sources share one copy of the embeddings.
        gallery: Index or name of the loader with the gallery. If no loader has that name: an entry of the step's output
            or of the batch, or a function of (outputs, batch), with a boolean for each item that is True for gallery
            items.
        loaders: Index or name of the loader that is measured, or several of them, such as `("retrieval",)` if the steps
            of another loader give no embeddings. By default all loaders are measured. You need not name a gallery here.
            With only one measured loader, its name is not part of the keys.
        groups: Entries of the step's output or of the batch, such as `("person", "camera")`, or positions in the batch,
            such as `(1, 2)`. A candidate that equals the query in all of them is ignored: it is neither a hit nor a
            miss.
        slices: Entries of the step's output or of the batch, such as `("camera", "light")`, or name -> entry, such as
            `{"camera": 2}` for a position in the batch. Each is an attribute with an integer or a string for each item.
            `val/mAP_worst_camera` is the value of the worst camera, for the first of `metrics` that has a value for
            each query. `report.of_slices("camera")` lists all of them. An attribute with too many values, or with
            missing values, is left out with a warning, and its worst value is NaN.
        name: Part of the keys between the stage and the metric: `t2i` gives `val/t2i/mAP` and `test/t2i/mAP`. Several
            monitors in one Trainer need different names; one of them may have no name.
        dims: Numbers of dimensions, such as `(64, 256)`. The first of `metrics`, and `recall@1` if you ask for it, are
            also logged for embeddings truncated to these numbers of dimensions, as `val/dims64/mAP`. See
            `compression_costs`.
        codes: `int8`, `binary` or both. The same metrics are logged for embeddings stored as such codes, as
            `val/int8/mAP`, and with `dims` for truncated codes, as `val/dims64_int8/mAP`.
        compare: Tests after each validation whether it is significantly better than a reference. `best`: the last
            validation that was itself significantly better, at first the first one. `first`: the first validation of
            the run. A `RetrievalReport`, or the path of a saved one: that evaluation, which must have the same queries.
            The first of `metrics` that has a value for each query gives `val/mAP_gain`, its interval `val/mAP_gain_low`
            and `val/mAP_gain_high`, and `val/mAP_reference`. The first validation logs a gain of 0. A line above the
            progress bar and the report state the result. Let checkpoints and early stopping monitor `val/mAP`. The
            interval covers other classes of this kind, but not another training seed.
        prog_bar: Show the first of the metrics in the progress bar.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, if
            possible in the sanity check. Any other error, such as NaN in one batch, becomes a warning, and the values
            are NaN. True: every error ends the run. False: none does.
        **settings: See `RetrievalSettings`.

    Attributes:
        reports: The latest report of each set. The key is `""` for a single loader, otherwise the end of its logged
            keys; with two encoders it begins with their direction, such as `"image_to_text"`. Empty before the first
            evaluation.
        compression: The latest compression report of each set, under the same keys: what `dims` and `codes` cost, with
            intervals. Empty without them.

    Raises:
        ValueError: If a setting is unknown or out of range, or `name` is empty.
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
        """The latest report of a single set; None before the first evaluation. With several sets, see `reports`."""
        return next(iter(self.reports.values())) if len(self.reports) == 1 else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: forget the run before."""
        # keys of metrics that the latest report of their set did not have
        self._undefined_keys: set[str] = set()
        # keys that count queries without a match: there was such a query, or something monitors the key
        self._unmatched_keys: set[str] = set()
        if self._gains is not None and stage == "fit":
            self._gains.begin()
        super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the references of `compare` in a checkpoint."""
        if self._gains is not None and (state := self._gains.state()):
            checkpoint.setdefault(CHECKPOINT_ENTRY, {})[self._prefix("val")] = state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue with the references in a checkpoint."""
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
        """Return the metrics that are reported, known before the first result."""
        settings = self._settings
        if self._has_label_sets:
            settings = without_classes(self._policy.owner, settings)
        return request_of(settings).reported

    def _better_of_names(self) -> dict[str, Better]:
        """Return name -> which values are better, for metrics and their compressed forms."""
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
        """Evaluate each set. *Collective*."""
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
        # Only validations of a fit are compared with each other. A saved report is compared with any evaluation.
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
        """Return the report of a set, without attributes that cannot be sliced. *Collective*."""
        while True:
            try:
                with named(self._policy.owner, "evaluate_retrieval"):
                    return evaluate_retrieval(**arguments, progress=progress, **self._settings.arguments())
            except SlicesError as error:
                # All processes get this error together, so all of them evaluate again.
                if error.attribute is None:
                    raise
                self._leave_out(set_name, measured_set, arguments["slices"], error.attribute, error)

    def _leave_out_unread(self, set_name: str, measured_set: MeasuredSet, slices: dict[str, Any]) -> None:
        """Leave out the attributes that some batch of some process lacked. *Collective*."""
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
        """Leave out an attribute, and warn of the error, or raise it if `strict` is True."""
        del slices[attribute]
        name = _name_of_worst(_sliced_metric(self._metrics()), attribute)
        suffix = measured_set.suffix
        consequence = f"{set_name.removesuffix(suffix)}/{name}{suffix} is NaN; the other values are not affected."
        # A usage error would end the run, although the other metrics do not need the attribute.
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
        """Return the gain of a set, the same in every process; None if the reference has other queries."""
        gain, warning = gains.compare(name, gains.metric(self._metrics()), report)
        if warning is not None:
            self._policy.warn(f"{set_name}: {warning} (Shown once.)", kind="gain")
        if self.prog_bar and gain is not None:
            print_beside_bar(trainer, f"{set_name}: {gain.in_words()}")
        return gain

    def _after_set(self, trainer: Trainer, stage: str, measured_set: MeasuredSet, has_values: bool) -> None:
        """Pass an evaluated set to the callbacks that draw. *Collective*."""
        direction, suffix, sides = measured_set
        prefix = self._key(stage, direction)
        viewers = viewers_of(trainer, prefix)
        if not viewers or not has_values:
            return
        report = self.reports[direction + suffix]
        # If an image has several texts, rows of one side are not items of the loader: viewers would read wrong items.
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
            # Each id occurs once, so ids change no value. A comparison recognises reports of other queries by them.
            arguments["query_ids"] = shards[0].ids
        for rows, labels, shard in zip(("queries", "gallery"), LABELS, shards, strict=False):
            arguments |= {rows: shard.embeddings, labels: shard.labels}
        arguments["slices"] = {name: shards[0].columns[column] for name, column in self._slices.items()}
        return arguments | {"share": Share(all_processes(), *(shard.places for shard in shards))}

    def _compress(
        self, trainer: Trainer, key: str, report: RetrievalReport, arguments: Mapping[str, Any]
    ) -> CompressionReport:
        """Return the report on compressed forms of a set, the same in every process. *Collective*."""
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
        """Return the names that the latest report of a set had, or all names before it."""
        suffix = measured_set.suffix
        prefix = set_name.removesuffix(suffix)
        self._find_watched_unmatched(trainer, f"{prefix}/{UNMATCHED}{suffix}")
        names = [name for name in self._names() if f"{prefix}/{name}{suffix}" not in self._undefined_keys]
        if f"{prefix}/{UNMATCHED}{suffix}" in self._unmatched_keys:
            names.append(UNMATCHED)
        return names

    def _find_watched_unmatched(self, trainer: Trainer, key: str) -> None:
        """Log the number of queries without a match from now on, if something monitors it."""
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
        # A chart of only zeros is useless. Once it has begun, it continues with zeros.
        if report.queries_without_match:
            self._unmatched_keys.add(unmatched_key)
        monitored_by = {watcher.key: watcher.name for watcher in watchers(trainer)}
        for name in self._names():
            key = f"{prefix}/{name}{suffix}"
            if name in values:
                self._undefined_keys.discard(key)
                continue
            if key in monitored_by:
                fact = f"{monitored_by[key]}(monitor={key!r}): this set has too few classes for this value. "
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
        """Check the monitored keys, and warn if something monitors a gain over the best validation."""
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
                    f"{watcher.name}(monitor={watcher.key!r}) keeps the validation with the largest gain, often an "
                    f"early one, because the reference changes with compare='best'. Monitor {value_key!r}."
                )

    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        better = {**self._better_of_names(), UNMATCHED: None}
        keys: dict[str, Better] = {}
        for measured_set in self._sets(trainer):
            for name, direction in better.items():
                keys[self._key("val", measured_set.direction, name) + measured_set.suffix] = direction
        return keys


def viewers_of(trainer: Trainer, prefix: str) -> list[Viewer]:
    """Return the callbacks of a Trainer that draw the sets of this epoch whose keys begin with the prefix."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    return [callback for callback in callbacks if isinstance(callback, Viewer) and callback.wants(prefix)]
