"""Compute the recall of small search results with several libraries, and check each library against its documentation.

    pip install -e ".[test-integrations]"          # all libraries of the table
    python benchmarks/search_conformance.py        # prints the table
    python benchmarks/search_conformance.py --write   # writes it to docs/metrics/agreement.md, if all are installed

The cases are in `search_cases.json`: embeddings are small numbers, scores are dot products, each case has the found lists,
and values are exact fractions that one sentence explains. The questions are the same as in `conformance.py`, and the items
come in all orders.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from conformance import Library, cell, judge, orders, run

import fewshot_callbacks

__all__ = ["LIBRARIES", "cell", "judge", "load_cases", "main", "variants"]

CASES = Path(__file__).with_name("search_cases.json")
BEGIN, END = "<!-- begin of the table of search -->", "<!-- end of the table of search -->"
COMMAND = "python benchmarks/search_conformance.py --write"


@dataclass(frozen=True)
class FoundCase:
    """Queries and a gallery (or one set in which every item is a query) and found lists, with the value of each rule."""

    name: str
    title: str
    queries: list[list[float]]
    gallery: list[list[float]] | None
    found: list[list[int]]
    k: int
    values: dict[str, Fraction]
    derivation: str
    gallery_ids: list[int] | None = None
    metric: str = "recall"
    reads: str = "scores"

    @property
    def items(self) -> np.ndarray:
        """The rows of the gallery."""
        return np.array(self.queries if self.gallery is None else self.gallery, np.float32)

    @property
    def ids(self) -> np.ndarray:
        """The id of each item; its index if the case has no ids."""
        return np.array(self.gallery_ids or range(len(self.items)))

    @property
    def columns(self) -> int:
        """The number of items that the search returns: k, or k + 1 in one set."""
        return len(self.found[0])


def load_cases() -> list[FoundCase]:
    """Read the cases."""
    entries = json.loads(CASES.read_text(encoding="utf-8"))
    return [
        FoundCase(**entry | {"values": {rule: Fraction(value) for rule, value in entry["values"].items()}})
        for entry in entries
    ]


# Adapters: each calls one library as its documentation shows.


def ask_ours(case: FoundCase) -> float:
    gallery = None if case.gallery is None else case.items
    ids: dict[str, Any] = {}
    if case.gallery_ids:
        ids = {"query_ids": list(range(len(case.queries))), "gallery_ids": case.gallery_ids}
    quality = fewshot_callbacks.search_quality(
        case.found, np.array(case.queries, np.float32), gallery, k=case.k, similarity="dot", **ids
    )
    return quality.recall[case.k]


def ask_faiss(case: FoundCase) -> float:
    import faiss  # noqa: PLC0415
    from faiss.contrib.evaluation import knn_intersection_measure  # noqa: PLC0415

    index = faiss.IndexFlatIP(case.items.shape[1])
    index.add(case.items)
    _, nearest = index.search(np.array(case.queries, np.float32), case.columns)
    exact = np.where(nearest >= 0, case.ids[nearest], -1)
    return float(knn_intersection_measure(np.array(case.found), exact))


def ask_usearch(case: FoundCase) -> float:
    from usearch.index import BatchMatches, MetricKind, search  # noqa: PLC0415

    first = 0 if case.gallery is not None else 1  # an item itself is its own nearest neighbour
    exact = search(case.items, np.array(case.queries, np.float32), first + 1, MetricKind.IP, exact=True)
    nearest = case.ids[np.atleast_2d(exact.keys).astype(np.int64)[:, first]]
    lists = np.array(case.found)
    counts = (lists >= 0).sum(axis=1)
    found = BatchMatches(keys=lists, distances=np.zeros(lists.shape, np.float32), counts=counts)
    return float(found.mean_recall(nearest))


def ask_pytrec_eval(case: FoundCase) -> float:
    import pytrec_eval  # noqa: PLC0415

    order = np.argsort(-(np.array(case.queries, np.float64) @ case.items.T), axis=1, kind="stable")
    judgements, lists = {}, {}
    for query, (nearest, found) in enumerate(zip(order, case.found, strict=True)):
        name = f"query{query}"
        judgements[name] = {str(item): 1 for item in case.ids[nearest[: case.columns]]}
        lists[name] = {str(item): float(-rank) for rank, item in enumerate(found) if item >= 0}
    evaluated = pytrec_eval.RelevanceEvaluator(judgements, {f"recall.{case.columns}"}).evaluate(lists)
    return float(np.mean([values[f"recall_{case.columns}"] for values in evaluated.values()]))


AS_A_SET = dict.fromkeys(("order", "negative_scores"), (("as a set",), "recall of the k nearest"))
AS_INTEGERS = {"large_ids": (("as integers",), "ids are integers of 64 bits, or strings")}
INTERSECTION = "its docstring: the intersection measure of two result tables"
OF_THE_FIRST = (("of the first",), "its docstring: contains the expected entry anywhere among results")

LIBRARIES = [
    Library(
        "fewshot_callbacks", "fewshot-callbacks", ask_ours, (),
        {
            "ties": (("ties count as found",), "docs/evaluate/search_quality.md, Definitions: a score of at least s_k"),
            "repeated": (("counted once",), "docs/evaluate/search_quality.md, Definitions: distinct candidates"),
            "missing": (("not found",), "docs/evaluate/search_quality.md, Pitfalls: an entry of -1 counts as not found"),
            "self": (("left out",), "docs/evaluate/search_quality.md, Pitfalls: the query itself is left out"),
            "large_k": (("over the items there are",), "docs/evaluate/search_quality.md: k is the number of candidates"),
            "near_ties": (("exact scores",), "docs/research/exactness.md: a score is the true value, rounded once"),
            **AS_A_SET, **AS_INTEGERS,
        },
        "`search_quality`",
    ),
    Library(
        "faiss", "faiss-cpu", ask_faiss, (),
        {
            "ties": (("by ids", "by ids, in another order"), "nothing is said of equal scores"),
            "repeated": (("counted once",), INTERSECTION),
            "missing": (("not found",), INTERSECTION),
            "self": (("counted in both lists",), INTERSECTION),
            "large_k": (("over k", "-1 in both lists counts as found"), "nothing is said of -1"),
            "near_ties": (("exact scores", "in float32"), "nothing is said of the precision in which scores are compared"),
            **AS_A_SET, **AS_INTEGERS,
        },
        "`contrib.evaluation.knn_intersection_measure` of the lists and those of `IndexFlatIP`",
    ),
    Library(
        "usearch", "usearch", ask_usearch, (),
        {
            **dict.fromkeys(("ties", "repeated", "missing", "self", "large_k", "order"), OF_THE_FIRST),
            **dict.fromkeys(("negative_scores", "large_ids"), OF_THE_FIRST),
            "near_ties": (("of the first", "in float32"), "nothing is said of the precision in which scores are compared"),
        },
        "`BatchMatches.mean_recall` of the first of `search(..., exact=True)`: another question, whether the nearest item "
        "is among the k",
    ),
    Library(
        "pytrec_eval", "pytrec-eval-terrier", ask_pytrec_eval, (),
        {
            "ties": (("by ids", "by ids, in another order"), "nothing is said of equal scores: who is relevant is given"),
            "repeated": (("counted once",), "items are the keys of a dict, so that an id has one entry"),
            "missing": (("not found",), "relevant items that were found, over relevant items"),
            "self": (("counted in both lists",), "relevant items that were found, over relevant items"),
            "large_k": (("over the items there are",), "relevant items that were found, over relevant items"),
            "near_ties": (("exact scores",), "who is relevant is given: the lists of NumPy in float64"),
            **AS_A_SET, **AS_INTEGERS,
        },
        "`RelevanceEvaluator`, `recall.k`, where the k nearest by NumPy are relevant",
    ),
]  # fmt: skip


def variants(library: Library, case: FoundCase) -> Iterator[tuple[str, FoundCase]]:
    """Yield the case with its items in all other orders."""
    for order in orders(len(case.items)):
        yield "order", _in_order(case, order)


def _in_order(case: FoundCase, order: tuple[int, ...]) -> FoundCase:
    if case.gallery_ids is not None:
        ids = [case.gallery_ids[place] for place in order]
        return replace(case, gallery=case.items[list(order)].tolist(), gallery_ids=ids)
    found = [[order.index(item) if item >= 0 else item for item in items] for items in case.found]
    rows = case.items[list(order)].tolist()
    if case.gallery is None:
        return replace(case, queries=rows, found=[found[place] for place in order])
    return replace(case, gallery=rows, found=found)


def main() -> None:
    run(__doc__, load_cases(), LIBRARIES, COMMAND, (BEGIN, END), variants)


if __name__ == "__main__":
    main()
