"""A Parquet file with one row per query of an evaluation, for tools that show items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import Neighbours, RetrievalReport, Suspects
from fewshot_callbacks.system.extras import required_extra


def write_rows(
    path: str | PathLike[str],
    report: RetrievalReport,
    *,
    suspects: Suspects | None = None,
    neighbours: Neighbours | None = None,
    coordinates: Any | None = None,
    paths: Sequence[str | PathLike[str]] | None = None,
) -> None:
    """Write a Parquet file with one row per query of an evaluation; an existing file is replaced.

    | column | value |
    | --- | --- |
    | `position` | index of the query among the passed queries |
    | `label` | the label, an integer or a string; missing if relevance is not defined by a single label |
    | `average_precision` | missing for a query without a match |
    | `is_suspect` | with `suspects`: whether the label may be wrong |
    | `suggested_label` | with `suspects`: the label that the neighbours suggest; missing if the item is not a suspect |
    | `neighbors` | with `neighbours`: `ids`, which are indices in the gallery, the closest first, and `distances` |
    | `scores` | with `neighbours`: the scores of the neighbours |
    | `x`, `y` | with `coordinates` |
    | `path` | with `paths` |

    A distance is 1 minus the score for `cosine`, and minus the score for all other similarities.

    Args:
        path: The file to write.
        report: The result of `evaluate_retrieval`.
        suspects: The suspects of the same embeddings, in the same order.
        neighbours: The neighbours of the same queries. The row of a query that is not in it has no neighbours.
        coordinates: (queries, 2), positions on a map, for example the points of `plots.project`.
        paths: The file of each query.

    Raises:
        ValueError: The number of coordinates or paths differs from the number of passed queries.
        ModuleNotFoundError: pyarrow is not installed.

    Examples:
        >>> import tempfile, torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> report = evaluate_retrieval(torch.eye(4), ["owl", "owl", "heron", "heron"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_rows(f"{folder}/rows.parquet", report, paths=["a.png", "b.png", "c.png", "d.png"])
        ...     print(len(Path(folder, "rows.parquet").read_bytes()) > 0)
        True
    """
    with required_extra("files", "write_rows"):
        arrow = import_module("pyarrow")
        parquet = import_module("pyarrow.parquet")
    positions = _positions(report)
    average_precision = report.per_query["mAP"].double()
    columns: dict[str, Any] = {
        "position": positions.tolist(),
        "label": _labels(report, len(positions)),
        "average_precision": [None if math.isnan(value) else value for value in average_precision.tolist()],
    }
    if suspects is not None:
        columns |= _suspect_columns(positions, suspects)
    if neighbours is not None:
        columns |= _neighbour_columns(positions, neighbours, report.similarity)
    if coordinates is not None:
        places = np.asarray(torch.as_tensor(coordinates), dtype=np.float64)
        if places.ndim != 2 or places.shape[1] != 2:
            raise InputError(f"write_rows: coordinates have the shape {places.shape}. Pass (queries, 2).")
        _check_length("coordinates", len(places), report, positions)
        columns["x"] = places[positions.numpy(), 0]
        columns["y"] = places[positions.numpy(), 1]
    if paths is not None:
        _check_length("paths", len(paths), report, positions)
        columns["path"] = [str(paths[position]) for position in positions.tolist()]
    parquet.write_table(arrow.table(columns), Path(path))


def _positions(report: RetrievalReport) -> Tensor:
    """Return the index of each query of a report among the passed queries."""
    queries = len(report.per_query["mAP"])
    positions = torch.arange(queries) if report.drawn is None else report.drawn
    return positions if report.counted is None else report.counted[positions]


def _labels(report: RetrievalReport, queries: int) -> list[Any]:
    """Return the passed label of each query; None if there is not a single label each."""
    if not report.classes:
        return [None] * queries
    labels = report.query_labels.tolist()
    return labels if report.label_names is None else [report.label_names[label] for label in labels]


def _suspect_columns(positions: Tensor, suspects: Suspects) -> dict[str, Any]:
    """Return whether each query is a suspect, and its suggested label."""
    labels = suspects.suggested.tolist()
    if suspects.label_names is not None:
        labels = [suspects.label_names[label] for label in labels]
    suggested = dict(zip(suspects.index.tolist(), labels, strict=True))
    return {
        "is_suspect": [position in suggested for position in positions.tolist()],
        "suggested_label": [suggested.get(position) for position in positions.tolist()],
    }


def _neighbour_columns(positions: Tensor, neighbours: Neighbours, similarity: str) -> dict[str, Any]:
    """Return each query's neighbours with distances, and their scores; None without neighbours."""
    rows = {query: row for row, query in enumerate(neighbours.query_indices.tolist())}
    pairs: list[Any] = []
    scores: list[Any] = []
    for position in positions.tolist():
        if position not in rows:
            pairs.append(None)
            scores.append(None)
            continue
        indices = neighbours.indices[rows[position]]
        is_neighbour = indices >= 0
        values = neighbours.scores[rows[position]][is_neighbour].double()
        distances = 1 - values if similarity == "cosine" else -values
        pairs.append({"ids": indices[is_neighbour].tolist(), "distances": distances.tolist()})
        scores.append(values.tolist())
    return {"neighbors": pairs, "scores": scores}


def _check_length(name: str, length: int, report: RetrievalReport, positions: Tensor) -> None:
    """Raise an error unless there is one value per passed query."""
    least = int(positions.max()) + 1
    is_exact = report.drawn is None and report.counted is None
    if length < least or (is_exact and length != least):
        raise InputError(
            f"write_rows: there are {length} {name}, but the report has {least} queries or more. Pass one per query, in the "
            "order of evaluate_retrieval."
        )
