"""`compression_costs`: the metrics of truncated and quantised embeddings, compared with the whole embedding."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack, cast, get_args

import torch

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.options import Progress, part_of_progress
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._arrow import without_arrow
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._reading import as_tensor, default_mode, named
from fewshot_callbacks.functional._table import table
from fewshot_callbacks.functional.item_reader import with_stored_arrays
from fewshot_callbacks.functional.items import EVERYTHING, Share
from fewshot_callbacks.functional.retrieval.compare import compare_reports
from fewshot_callbacks.functional.retrieval.compressed_rows import (
    LOWEST_CODE,
    Ranges,
    StorageFormat,
    find_ranges,
    is_read,
    refuse_wide_ranges,
    storage_formats,
)
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.relevance import Relevance
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.retrieval.settings import (
    OF_PAIRS,
    RetrievalSettings,
    from_keywords,
    request_of,
    several,
)
from fewshot_callbacks.functional.statistics import Difference
from fewshot_callbacks.settings import Code, RequestedMetric, RetrievalOptions, takes
from fewshot_callbacks.system.words import counted, verb

_CALL = "compression_costs"
CODES: tuple[Code, ...] = get_args(Code)
# A note reports dimensions that are equal in all gallery items if they exceed this share of all dimensions.
NOTED_SHARE = 0.05
# The default metrics.
COMPARED_METRICS = ("mAP", "recall@1")
# Names of the codes in `quantize_embeddings` and in databases.
_OTHER_NAMES: Mapping[str, Code] = {"ubinary": "binary", "bit": "binary", "sign": "binary", "uint8": "int8"}


@equal_with_nan
@dataclass(frozen=True)
class CompressionVariant:
    """A compressed form of the embeddings, and the metrics that it reaches.

    Attributes:
        dims: Number of dimensions, which are the first ones.
        code: Code of each dimension, `int8` or `binary`; None if the numbers are stored unchanged.
        bytes_per_item: Size of an item's vector in bytes.
        report: Report of the compressed embeddings.
        differences: Metric -> compressed minus whole, with the interval of the paired difference (see `compare_reports`).

    Examples:
        >>> import torch
        >>> labels = torch.arange(100) % 20
        >>> noise = torch.randn(100, 20, generator=torch.Generator().manual_seed(0))
        >>> report = compression_costs(torch.eye(20)[labels] + 0.3 * noise, labels, codes="binary")
        >>> variant = report.variants["binary"]
        >>> variant.dims, variant.bytes_per_item, variant.report.similarity, round(variant.report.mAP, 4)
        (20, 3, 'hamming', 0.1162)
    """

    dims: int
    code: Code | None
    bytes_per_item: int
    report: RetrievalReport
    differences: dict[str, Difference]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON (NaN becomes None)."""
        return {
            "dims": self.dims,
            "code": self.code,
            "bytes_per_item": self.bytes_per_item,
            "similarity": self.report.similarity,
            **self.report.tables(),
            "differences": {key: difference.to_dict() for key, difference in self.differences.items()},
        }


@equal_with_nan
@dataclass(frozen=True)
class CompressionReport:
    """The result of `compression_costs`. `print` shows a table for each metric.

    Attributes:
        whole: Report of the whole embedding.
        dims: Number of dimensions of the whole embedding.
        bytes_per_item: Size of the whole embedding of an item, in bytes.
        variants: Name, such as `dims64`, `int8` or `dims64_int8` -> compressed form, from most to fewest bytes.
        notes: What you should know when you read the differences.

    Examples:
        >>> import torch
        >>> labels = torch.arange(100) % 20
        >>> noise = torch.randn(100, 20, generator=torch.Generator().manual_seed(0))
        >>> embeddings = torch.eye(20)[labels] + 0.3 * noise
        >>> report = compression_costs(embeddings, labels, dims=10, codes="int8", metrics="mAP")
        >>> list(report.variants)
        ['dims10', 'int8', 'dims10_int8']
        >>> print(report)  # doctest: +NORMALIZE_WHITESPACE
                mAP  bytes per item   value  minus whole            interval  significant
              whole              80  0.4911
             dims10              40  0.2534      -0.2377  -0.3730 to -0.1067          yes
               int8              20  0.4696      -0.0215  -0.0796 to +0.0283           no
        dims10_int8              10  0.2359      -0.2552  -0.3713 to -0.1449          yes
    """

    whole: RetrievalReport
    dims: int
    bytes_per_item: int
    variants: dict[str, CompressionVariant]
    notes: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """Return logged name, such as `int8/mAP` -> value, for the compressed forms."""
        return {
            f"{name}/{key}": value
            for name, variant in self.variants.items()
            for key, value in variant.report.metrics().items()
        }

    def compared(self) -> tuple[str, ...]:
        """Return the keys of the metrics that a compressed form and the whole embedding have in common."""
        keys = [key for variant in self.variants.values() for key in variant.differences]
        return tuple(dict.fromkeys(keys))

    def __str__(self) -> str:
        """Return a table for each metric, with one form per line, and the notes."""
        tables = ["\n".join(table(*self._table(key))) for key in self.compared()]
        return "\n\n".join([*tables, *self.notes])

    def _table(self, key: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the column titles and the rows of the table of a metric."""
        columns = (key, "bytes per item", "value", "minus whole", "interval", "significant")
        rows = [("whole", f"{self.bytes_per_item:,}", f"{self.whole[key]:.4f}", "", "", "")]
        for name, variant in self.variants.items():
            if key in variant.differences:
                value, _, loss, interval, is_beyond_chance = variant.differences[key].in_words()
                rows.append((name, f"{variant.bytes_per_item:,}", value, loss, interval, is_beyond_chance))
        return columns, rows

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON (NaN becomes None). The whole embedding has only the compared metrics."""
        whole = self.whole.tables()
        return {
            "dims": self.dims,
            "bytes_per_item": self.bytes_per_item,
            "similarity": self.whole.similarity,
            **{
                name: {key: value for key, value in values.items() if key in self.compared()}
                for name, values in whole.items()
            },
            "confidence": self.whole.confidence,
            "variants": {name: variant.to_dict() for name, variant in self.variants.items()},
            "notes": list(self.notes),
        }


@takes(RetrievalOptions, metrics=COMPARED_METRICS)
def compression_costs(
    queries: Any,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    dims: int | Sequence[int] = (),
    codes: str | Sequence[str] = CODES,
    relevance: Relevance | Any | None = None,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    share: Share = EVERYTHING,
    progress: Progress | None = None,
    **settings: Unpack[RetrievalOptions],
) -> CompressionReport:
    """Return what truncated and quantised embeddings lose compared with the whole embedding, with confidence intervals.

    The whole embedding is evaluated first, then each compressed form of queries and gallery: the first dimensions (for
    Matryoshka embeddings), codes of all dimensions, and codes of the first dimensions. The comparison is paired, query by
    query, so that small losses show.

    `int8` stores a dimension in one byte. The range of each dimension over all gallery items (with one set: over the set) is
    divided into 255 steps. The code of a number is the number of whole steps above the lowest value, minus 128. Queries
    beyond the range have the code -128 or 127. A dimension that is equal in all items has the code -128 everywhere. Codes
    are compared directly, with the similarity of the whole embedding. `binary` stores in one bit whether a number is above
    zero, and compares by Hamming distance. Both codes are equal to `sentence_transformers.util.quantize_embeddings` with the
    gallery as calibration embeddings. Rows are coded as you pass them, so normalise them if they are normalised in your
    index. In a form with dimensions and code, the first dimensions have the same codes as in the code of all dimensions.

    One form is in memory at a time, in addition to the embeddings and `memory_mb`: a copy of the first dimensions, or one
    byte per dimension for a code. Rows in files are truncated and coded as they are read, except for `binary`.

    Args:
        queries: (queries, dim) embeddings. Arguments with a short explanation here are as in `evaluate_retrieval`.
        query_labels: Labels of the queries.
        gallery: Items to retrieve from; by default the queries themselves, leave-one-out.
        gallery_labels: Labels of the gallery items.
        dims: Numbers of dimensions, each at most the dimension of the embeddings, such as (64, 256).
        codes: `int8`, `binary` or both; `()` for no codes.
        relevance: Which items are relevant to each query, instead of labels.
        query_ids: Identity of each query.
        gallery_ids: Identity of each gallery item.
        query_groups: Group of each query.
        gallery_groups: Group of each gallery item.
        share: Which part of the sets this process has, if several processes make this call together.
        progress: Called with the number of pairs done and the number of all pairs, over all forms together.
        **settings: `metrics`, `similarity`, `ties` and more: see `RetrievalSettings`.

    Returns:
        A frozen report: the report of the whole embedding, and the report, the bytes and the differences of each compressed
        form. `binary` has no `prototype_accuracy`, since bits have no mean.

    Raises:
        ValueError: As `evaluate_retrieval`; if `dims` and `codes` are empty, contain a value twice or do not fit the
            embeddings; for `similarity="hamming"`, since the embeddings are then codes already; or if a threshold is set
            together with codes, since codes have other scores.

    Examples:
        >>> import torch
        >>> labels = torch.arange(200) % 20
        >>> noise = torch.randn(200, 20, generator=torch.Generator().manual_seed(0))
        >>> embeddings = torch.eye(20)[labels] + 0.3 * noise
        >>> report = compression_costs(embeddings, labels, dims=10, codes="int8", metrics=("mAP",))
        >>> report.bytes_per_item, report.variants["int8"].bytes_per_item
        (80, 20)
        >>> print(report.variants["dims10"].differences["mAP"])
        0.2566 - 0.4591 = -0.2025 (-0.3319 to -0.0817), significant
    """
    options = cast(RetrievalOptions, {"metrics": COMPARED_METRICS, **settings})
    arguments: dict[str, Any] = {
        "gallery": gallery,
        "query_labels": query_labels,
        "gallery_labels": gallery_labels,
        "query_ids": query_ids,
        "gallery_ids": gallery_ids,
        "query_groups": query_groups,
        "gallery_groups": gallery_groups,
        "relevance": relevance,
    }
    with default_mode(), share.processes.together(), named(_CALL, "evaluate_retrieval"):
        checked = from_keywords(compression_costs, options)
        compression = Compression.checked(_CALL, dims, codes, checked)
        if compression.are_none:
            raise InputError(
                f"{_CALL}: dims and codes are empty, so there is nothing to compare. Pass dims=(64, 256), or "
                "codes=('int8', 'binary')."
            )
        metrics = request_of(checked).reported
        compression.refuse_threshold(metrics, checked)
        # Refuse a wrong number before the whole embedding is evaluated. A process without items cannot check.
        shape = _shape(queries)
        if len(shape) == 2 and shape[0]:
            compression.refuse_wide(int(shape[1]))
        share.processes.refuse_other_calls(_CALL, {"dims": compression.dims, "codes": compression.codes})
        evaluations = 1 + compression.count
        whole = evaluate_retrieval(
            queries,
            **arguments,
            share=share,
            progress=part_of_progress(progress, 0, evaluations),
            **options,
        )
        return costs_beside(
            whole,
            compression,
            queries,
            arguments,
            settings=checked,
            metrics=metrics,
            share=share,
            progress=progress,
        )


# ------------------------------------------------------------------------------------------- forms that a caller asks for


@dataclass(frozen=True)
class Compression:
    """The compressed forms that a caller requests, checked as far as possible without the embeddings."""

    call: str
    """the public function or class, for messages"""
    dims: tuple[int, ...]
    codes: tuple[Code, ...]

    @classmethod
    def checked(cls, call: str, dims: Any, codes: Any, settings: RetrievalSettings) -> Compression:
        """Return the checked request.

        `dims` and `codes` are one value or several. `settings` are of the whole embedding.
        """
        numbers = tuple(_number_of_dims(call, number) for number in several(dims))
        names = several(codes)
        for name in names:
            _check_code(call, name)
        _refuse_repeated(call, "dims", numbers)
        _refuse_repeated(call, "codes", names)
        compression = cls(call, numbers, names)
        if settings.similarity == "hamming" and not compression.are_none:
            raise InputError(
                f"{call}: with similarity='hamming' the embeddings are binary codes already. Pass the original embeddings "
                "without similarity='hamming', or leave out dims and codes."
            )
        return compression

    @property
    def are_none(self) -> bool:
        """Whether nothing is requested."""
        return not self.dims and not self.codes

    @property
    def count(self) -> int:
        """Number of forms."""
        return (1 + len(self.dims)) * (1 + len(self.codes)) - 1

    def metrics_by_name(self, metrics: Sequence[RequestedMetric]) -> dict[str, list[RequestedMetric]]:
        """Return name of each form -> the metrics that it has."""
        return {
            storage.name: metrics_of_code(metrics, storage.code)
            for storage in storage_formats(0, self.dims, self.codes)
        }

    def refuse_wide(self, dim: int) -> None:
        """Refuse more dimensions than the embeddings have."""
        wide = [number for number in self.dims if number > dim]
        if wide:
            raise InputError(
                f"{self.call}: dims contain {', '.join(map(str, wide))}, but the embeddings have "
                f"{counted(dim, 'dimension')}. Pass numbers up to {dim}."
            )

    def refuse_threshold(self, metrics: Sequence[RequestedMetric], settings: RetrievalSettings) -> None:
        """Refuse a threshold of the whole embedding for codes, if a metric depends on it.

        `metrics` are of the compressed forms, `settings` of the whole embedding.
        """
        if not self.codes or not any(metric.metric.input in OF_PAIRS for metric in metrics):
            return
        for name in ("threshold", "threshold_bounds"):
            value = getattr(settings, name)
            if value is not None:
                raise InputError(
                    f"{self.call}: {name}={value!r} is a score of the embeddings, but codes have other scores. Leave out "
                    f"{name}, so that each form uses the threshold of its best F1, or pass codes=()."
                )


def _number_of_dims(call: str, number: Any) -> int:
    """Return a number of dimensions as a Python integer; refuse anything else."""
    if not hasattr(number, "__index__") or isinstance(number, bool) or number.__index__() < 1:
        raise InputError(
            f"{call}: dims contain {number!r}, which is not a whole number from 1 on. Pass how many of the first dimensions "
            "to keep, such as dims=(64, 256)."
        )
    return int(number.__index__())


def _check_code(call: str, name: Any) -> None:
    if name in CODES:
        return
    meant = _OTHER_NAMES.get(name) if isinstance(name, str) else None
    if meant is None and isinstance(name, str):
        near = difflib.get_close_matches(name.lower(), CODES, n=1)
        meant = cast(Code, near[0]) if near else None
    fix = f"Did you mean {meant!r}?" if meant else f"Pass {' or '.join(map(repr, CODES))}."
    raise InputError(f"{call}: codes contain {name!r}, but there is no such code. {fix}")


def _refuse_repeated(call: str, argument: str, values: Sequence[Any]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"{call}: {argument}={tuple(values)!r} contain {value!r} more than once. Pass it once.")


def headline_metrics(metrics: Sequence[RequestedMetric]) -> list[RequestedMetric]:
    """Return the default metrics of compressed forms: the first metric, and recall@1 if it is requested."""
    return [metric for number, metric in enumerate(metrics) if number == 0 or metric.key == "recall@1"]


def metrics_of_code(metrics: Sequence[RequestedMetric], code: Code | None) -> list[RequestedMetric]:
    """Return the metrics that a form with this code has. Bits have no mean, and so no prototype."""
    return [metric for metric in metrics if code != "binary" or metric.metric.input != "prototypes"]


# ----------------------------------------------------------------------------------------------------------- evaluation


class _CompressionInputs(NamedTuple):
    """The rows of this process, before they are truncated and coded."""

    queries: Any
    gallery: Any | None
    """None if the queries are the gallery"""
    dim: int
    bytes_per_number: int
    are_bytes: bool
    """whether the numbers are integers of one byte"""


def costs_beside(
    whole: RetrievalReport,
    compression: Compression,
    queries: Any,
    arguments: Mapping[str, Any],
    *,
    settings: RetrievalSettings,
    metrics: Sequence[RequestedMetric],
    share: Share = EVERYTHING,
    progress: Progress | None = None,
) -> CompressionReport:
    """Return the report on compressed forms of embeddings that were already evaluated. *Collective*.

    `whole` is the report of the embeddings with these arguments and settings; it may have more metrics. `arguments` are
    named as in `evaluate_retrieval`. There is at least one form. The whole embedding counts as the first evaluation in
    `progress`.
    """
    arrays = dict(arguments)
    gallery = arrays.pop("gallery", None)
    relevance = arrays.pop("relevance", None)
    queries, gallery, arrays = with_stored_arrays(_CALL, queries, gallery, arrays, labelled=relevance is None)
    sets = _read(queries, gallery, share.processes)
    compression.refuse_wide(sets.dim)
    if sets.are_bytes and "int8" in compression.codes:
        raise InputError(
            f"{compression.call}: the embeddings are integers of one byte already. Pass the original embeddings, or leave "
            "'int8' out of codes."
        )
    ranges = _ranges(compression, sets, share.processes)
    variants = {}
    for number, storage in enumerate(storage_formats(sets.dim, compression.dims, compression.codes)):
        of_storage = metrics_of_code(metrics, storage.code)
        if not of_storage:
            continue
        report = evaluate_retrieval(
            storage.of(sets.queries, ranges),
            gallery=None if sets.gallery is None else storage.of(sets.gallery, ranges),
            relevance=relevance,
            **arrays,
            share=share,
            progress=part_of_progress(progress, 1 + number, 1 + compression.count),
            **_settings_of(storage, settings, of_storage).arguments(),
        )
        differences = compare_reports(report, whole, settings.confidence)
        size = storage.bytes_per_item(sets.bytes_per_number)
        variants[storage.name] = CompressionVariant(storage.dims, storage.code, size, report, differences)
    by_bytes = sorted(variants.items(), key=lambda entry: (-entry[1].bytes_per_item, -entry[1].dims))
    notes = _notes(compression, ranges, sets.dim)
    return CompressionReport(whole, sets.dim, sets.dim * sets.bytes_per_number, dict(by_bytes), notes)


def _read(queries: Any, gallery: Any | None, processes: Processes) -> _CompressionInputs:
    """Return tensors on the CPU, or other arrays, with the dimension and type over all processes. *Collective*."""
    queries = without_arrow(queries, "queries", _CALL)
    gallery = without_arrow(gallery, "gallery", _CALL)
    query_rows = _rows("queries", queries)
    item_rows = query_rows if gallery is None else _rows("gallery", gallery)
    given = [(query_rows, queries), (item_rows, queries if gallery is None else gallery)]
    held = [(rows, getattr(array, "dtype", rows.dtype)) for rows, array in given if rows.shape[0]]
    own_dim = max((rows.shape[1] for rows, _ in held), default=0)
    own_bytes = max((dtype.itemsize for _, dtype in held), default=0)
    own_bytes_are_codes = any(str(dtype).endswith(("int8", "bool")) for _, dtype in held)
    numbers = processes.largest([own_dim, own_bytes, float(own_bytes_are_codes)])
    dim, bytes_per_number, are_bytes = (int(number) for number in numbers)
    query_rows = _of_dim(query_rows, dim)
    item_rows = None if gallery is None else _of_dim(item_rows, dim)
    return _CompressionInputs(query_rows, item_rows, dim, bytes_per_number, bool(are_bytes))


def _shape(rows: Any) -> Sequence[int]:
    """Return the shape of an array; empty for anything else, and for nested tensors."""
    if isinstance(rows, torch.Tensor) and rows.is_nested:
        return ()
    shape: Sequence[int] = getattr(rows, "shape", ())
    return shape


def _rows(name: str, rows: Any) -> Any:
    return rows if is_read(rows) else as_tensor(rows, name, _CALL).cpu()


def _of_dim(rows: Any, dim: int) -> Any:
    """Return the rows. A process without items gets an empty tensor with this dimension."""
    return rows if rows.shape[0] else torch.empty(0, dim)


def _ranges(compression: Compression, sets: _CompressionInputs, processes: Processes) -> Ranges | None:
    """Return the ranges of the gallery; None if no code needs them. *Collective*."""
    if not compression.codes:
        return None
    gallery = sets.queries if sets.gallery is None else sets.gallery
    ranges = find_ranges(gallery, sets.dim, processes)
    if "int8" in compression.codes:
        refuse_wide_ranges(compression.call, ranges)
    return ranges


def _settings_of(
    storage: StorageFormat, settings: RetrievalSettings, metrics: Sequence[RequestedMetric]
) -> RetrievalSettings:
    """Return the settings of a form: with its metrics, and without settings that these do not need."""
    changes: dict[str, Any] = {"metrics": tuple(metrics)}
    if not any(metric.metric.input == "groups" for metric in metrics):
        changes["label_groups"] = "auto"
    if not any(metric.metric.input in OF_PAIRS for metric in metrics):
        changes["threshold"] = None
    if storage.code == "binary":
        changes |= {"similarity": "hamming", "device": "cpu"}
    return replace(settings, **changes)


def _notes(compression: Compression, ranges: Ranges | None, dim: int) -> tuple[str, ...]:
    """Return notes on dimensions that codes cannot use."""
    if ranges is None:
        return ()
    notes = []
    same_dims = ranges.constant_dims()
    same_bits = ranges.constant_bits()
    if "int8" in compression.codes and same_dims > NOTED_SHARE * dim:
        notes.append(
            f"{same_dims:,} of {counted(dim, 'dimension')} {verb(same_dims, 'is', 'are')} equal in all gallery items. int8 "
            f"codes each as {LOWEST_CODE}, which makes all codes more similar."
        )
    untold_dims = ranges.untold_dims() if "int8" in compression.codes else 0
    if untold_dims:
        notes.append(
            f"{untold_dims:,} of {counted(dim, 'dimension')} {verb(untold_dims, 'has', 'have')} a tiny range, or a narrow "
            "range far from 0. int8 codes are computed in float32, which cannot distinguish these values, so the codes "
            "carry little information. Subtract the mean of the gallery from all embeddings, and divide them by their "
            "largest number."
        )
    if "binary" in compression.codes and same_bits > NOTED_SHARE * dim:
        notes.append(
            f"{same_bits:,} of {counted(dim, 'bit')} {verb(same_bits, 'is', 'are')} equal in all gallery items and "
            f"{verb(same_bits, 'carries', 'carry')} no information. If the embeddings are not centred around zero, subtract "
            "the mean of the training set before you code them."
        )
    return tuple(notes)
