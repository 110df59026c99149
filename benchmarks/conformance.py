"""Compute the same small cases with several libraries, and check each library against its documentation and itself.

    pip install -e ".[test-integrations,bench]"   # all libraries of the table
    python benchmarks/conformance.py              # prints the table; libraries that are not installed are listed
    python benchmarks/conformance.py --write      # writes it to docs/metrics/agreement.md, if all are installed

The cases are in `conformance.json`: embeddings are small integers, scores are dot products, values are exact fractions, and
each case explains its values in one sentence. A library is judged by its own documented rule. There are two questions: does
the library return the value of its rule, and does the value stay the same if the items come in another order or in other
chunks, or if labels and ids have other names?
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import fewshot_callbacks

CASES = Path(__file__).with_name("conformance.json")
PAGE = Path(__file__).parents[1] / "docs" / "metrics" / "agreement.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
COMMAND = "python benchmarks/conformance.py --write"
TOLERANCE = 1e-6  # some libraries average in float32
CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """Queries and a gallery, or one set in which every item is a query, with the value of each rule."""

    name: str
    title: str
    metric: str
    queries: list[list[float]]
    query_labels: list[int]
    values: dict[str, Fraction]
    derivation: str
    gallery: list[list[float]] | None = None
    gallery_labels: list[int] = field(default_factory=list)
    gallery_ids: list[str] = field(default_factory=list)
    reads: str = "scores"
    chunk: int | None = None

    @property
    def scores(self) -> np.ndarray:
        """The dot products of queries and gallery in float64, which represents them exactly."""
        return np.array(self.queries, dtype=np.float64) @ np.array(self.gallery, dtype=np.float64).T

    @property
    def relevant(self) -> np.ndarray:
        """Whether query and item have the same label."""
        return np.equal.outer(np.array(self.query_labels), np.array(self.gallery_labels))

    @property
    def ids(self) -> list[str]:
        """The ids of the gallery; the row numbers if the case has no ids."""
        return self.gallery_ids or [f"item{number}" for number in range(len(self.gallery or []))]


@dataclass(frozen=True)
class Library:
    """A library: how it is called, what it accepts, and its documented rule in each case.

    Attributes:
        name: Its name.
        distribution: The name of the package that installs it.
        evaluate: Returns its value for a case. The `chunk` of the case is the size of the chunks.
        takes: What it accepts in addition to scores: `labels`, `ids`, `chunks`, `one set`.
        rules: For each case, the names of the values that the documentation allows, and the source. A source that begins
            with "nothing" means that the library has no rule: any order of equal scores is allowed.
        metrics: The metrics that it computes.
    """

    name: str
    distribution: str
    evaluate: Callable[[Case], float]
    takes: tuple[str, ...]
    rules: dict[str, tuple[tuple[str, ...], str]]
    metrics: str


@dataclass(frozen=True)
class Verdict:
    """The answer of a library in a case: its values, whether they follow its rule, and what changes them."""

    values: list[float | str]
    is_right: str  # "yes", "no" or "no rule"
    changed_by: list[str]


def load_cases() -> list[Case]:
    """Read the cases."""
    entries = json.loads(CASES.read_text(encoding="utf-8"))
    return [
        Case(**entry | {"values": {rule: Fraction(value) for rule, value in entry["values"].items()}})
        for entry in entries
    ]


def vectors(rows: Any) -> torch.Tensor:
    """Return embeddings in float32, which represents all numbers of the cases exactly."""
    return torch.tensor(rows, dtype=torch.float32)


# Adapters: each calls one library as its documentation shows.


def ask_ours(case: Case) -> float:
    return _evaluate_at_once(case) if case.chunk is None else _evaluate_in_chunks(case, case.chunk)


def _our_settings(case: Case) -> dict[str, Any]:
    return {"similarity": "dot", "metrics": ("mAP" if case.metric == "ap" else case.metric,)}


def _evaluate_at_once(case: Case) -> float:
    sets = [vectors(case.queries), torch.tensor(case.query_labels)]
    if case.gallery is not None:
        sets += [vectors(case.gallery), torch.tensor(case.gallery_labels)]
    ids = {}
    if case.gallery_ids:
        ids = {"query_ids": [f"query{number}" for number in range(len(case.queries))], "gallery_ids": case.gallery_ids}
    report = fewshot_callbacks.evaluate_retrieval(*sets, **ids, **_our_settings(case))
    return next(iter(report.values.values()))


def _evaluate_in_chunks(case: Case, size: int) -> float:
    """Add queries and gallery to the metric class in chunks."""
    metric = fewshot_callbacks.RetrievalEvaluation(**_our_settings(case))
    embeddings = vectors([*case.queries, *(case.gallery or [])])
    labels = torch.tensor([*case.query_labels, *case.gallery_labels])
    ids = [*(f"query{number}" for number in range(len(case.queries))), *case.ids]
    is_gallery = torch.arange(len(embeddings)) >= len(case.queries)
    for start in range(0, len(embeddings), size):
        part = slice(start, start + size)
        metric.update(
            embeddings[part],
            labels[part],
            ids[part] if case.gallery_ids else None,
            is_gallery=None if case.gallery is None else is_gallery[part],
        )
    return float(next(iter(metric.compute().values())))


def ask_pytorch_metric_learning(case: Case) -> float:
    from pytorch_metric_learning.distances import DotProductSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    search = CustomKNN(DotProductSimilarity(normalize_embeddings=False), batch_size=case.chunk)
    calculator = AccuracyCalculator(
        include=("mean_average_precision",), knn_func=search, kmeans_func=lambda *_: None, device=torch.device("cpu")
    )
    sets = [vectors(case.queries), torch.tensor(case.query_labels)]
    if case.gallery is not None:
        sets += [vectors(case.gallery), torch.tensor(case.gallery_labels)]
    return calculator.get_accuracy(*sets)["mean_average_precision"]


def ask_torchmetrics(case: Case) -> float:
    from torchmetrics.retrieval import RetrievalMAP, RetrievalPrecision

    metric = RetrievalMAP() if case.metric == "ap" else RetrievalPrecision(top_k=5)
    scores, relevant = torch.from_numpy(case.scores), torch.from_numpy(case.relevant)
    queries = torch.arange(len(scores))[:, None].expand(scores.shape)
    size = case.chunk or scores.shape[1]
    for start in range(0, scores.shape[1], size):
        part = slice(start, start + size)
        metric.update(scores[:, part], relevant[:, part], indexes=queries[:, part])
    return float(metric.compute())


def ask_scikit_learn(case: Case) -> float:
    from sklearn.metrics import average_precision_score

    pairs = zip(case.relevant, case.scores, strict=True)
    return float(np.mean([average_precision_score(relevant, scores) for relevant, scores in pairs]))


def _judgements(case: Case) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """Return relevance and scores by the ids of query and item."""
    relevance, run = {}, {}
    for number, (scores, relevant) in enumerate(zip(case.scores, case.relevant, strict=True)):
        run[f"query{number}"] = dict(zip(case.ids, scores.tolist(), strict=True))
        relevance[f"query{number}"] = dict(zip(case.ids, relevant.astype(int).tolist(), strict=True))
    return relevance, run


def ask_pytrec_eval(case: Case) -> float:
    import pytrec_eval

    name = "map" if case.metric == "ap" else "P_5"
    relevance, run = _judgements(case)
    found = pytrec_eval.RelevanceEvaluator(relevance, {"map", "P_5"}).evaluate(run)
    return float(np.mean([values[name] for values in found.values()]))


def ask_ranx(case: Case) -> float:
    from ranx import Qrels, Run, evaluate

    relevance, run = _judgements(case)
    return float(evaluate(Qrels(relevance), Run(run), "map" if case.metric == "ap" else "precision@5"))


def ask_sentence_transformers(case: Case) -> float:
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    rows = {f"query{number}": row for number, row in enumerate(case.queries)}
    rows |= dict(zip(case.ids, case.gallery or [], strict=True))
    relevance, _ = _judgements(case)

    def encode(names: list[str], **_: Any) -> torch.Tensor:
        return vectors([rows[name] for name in names])

    relevant_ids = {query: {name for name in items if items[name]} for query, items in relevance.items()}
    evaluator = InformationRetrievalEvaluator(
        queries={name: name for name in relevance},
        corpus={name: name for name in dict.fromkeys(case.ids)},
        relevant_docs=relevant_ids,
        corpus_chunk_size=case.chunk or 50_000,
        precision_recall_at_k=[5],
        score_functions={"dot": lambda queries, corpus: queries @ corpus.T},
        write_csv=False,
    )
    model = SimpleNamespace(encode=encode, encode_query=encode, encode_document=encode)
    found = evaluator.compute_all_metrics(model)["dot"]
    return float(found["map@k"][100] if case.metric == "ap" else found["precision@k"][5])


ANY_ORDER = ("best order", "worst order", "mean over orders")
UNSTATED_TIES = (("best order", "worst order"), "nothing is said of equal scores")
IN_FLOAT32 = (("exact scores", *ANY_ORDER), "nothing is said of the precision in which scores are compared")
BY_RANK = (("by rank",), "the textbook's average precision, by descending score")
ONE_ENTRY = (("counted once",), "items are the keys of a dict, so that an id has one entry")
OVER_K = (("over k",), "relevant items among the first k, over k")

LIBRARIES = [
    Library(
        "fewshot_callbacks", "fewshot-callbacks", ask_ours, ("labels", "ids", "chunks", "one set"),
        {
            "ties": (("mean over orders",), "docs/metrics/index.md, Equal scores: the mean over their orders"),
            "no_match": (("left out",), "docs/metrics/index.md, Queries without a match: left out and counted"),
            "repeated_ids": (("counted once",), "the first item of each id counts"),
            "large_k": (("over k",), "docs/metrics/index.md: relevant items among the first K, over K"),
            "near_ties": (("exact scores",), "docs/research/exactness.md: a score is the true value, rounded once"),
        },
        "`evaluate_retrieval`; `RetrievalEvaluation` for chunks",
    ),
    Library(
        "pytorch-metric-learning", "pytorch-metric-learning", ask_pytorch_metric_learning,
        ("labels", "chunks", "one set"),
        {
            "ties": UNSTATED_TIES,
            "no_match": (("left out",), "its page Accuracy Calculation: lone query labels are excluded"),
            "large_labels": (("by rank",), "its page Accuracy Calculation: each label should be an integer"),
            "near_ties": IN_FLOAT32,
        },
        "`AccuracyCalculator`, `mean_average_precision`, with `CustomKNN(DotProductSimilarity(normalize_embeddings=False))`",
    ),
    Library(
        "torchmetrics", "torchmetrics", ask_torchmetrics, ("chunks",),
        {
            "ties": UNSTATED_TIES,
            "no_match": (("counted as 0",), "`empty_target_action=\"neg\"`, the default: counted as 0"),
            "negative_scores": (
                ("by rank",),
                "the class takes \"float predictions\"; the function of the same name calls them estimated probabilities",
            ),
            "large_k": (("over k",), "`adaptive_k=False`, the default: over k"),
            "near_ties": IN_FLOAT32,
        },
        "`RetrievalMAP`, `RetrievalPrecision(top_k=5)`, with their defaults",
    ),
    Library(
        "scikit-learn", "scikit-learn", ask_scikit_learn, (),
        {
            "ties": (("one step",), "a sum over thresholds, so that equal scores are one step"),
            "no_match": (("left out", "counted as 0"), "nothing but a warning says what a query without a match counts as"),
            "near_ties": (("exact scores",), "scores are compared as they are given, in float64"),
        },
        "`average_precision_score` of each query, and the mean",
    ),
    Library(
        "pytrec_eval", "pytrec-eval-terrier", ask_pytrec_eval, ("ids",),
        {
            "ties": (("best order", "worst order"), "trec_eval: equal scores are ordered by the id of the document"),
            "no_match": (("counted as 0",), "trec_eval: average precision is 0 where nothing is relevant"),
            "repeated_ids": ONE_ENTRY,
            "near_ties": (("best order", "worst order"), "trec_eval: scores are floats, equal ones ordered by id"),
        },
        "`RelevanceEvaluator`, `map` and `P_5`",
    ),
    Library(
        "ranx", "ranx", ask_ranx, ("ids",),
        {
            "ties": UNSTATED_TIES,
            "no_match": (("left out", "counted as 0"), "nothing is said of queries without a relevant document"),
            "repeated_ids": ONE_ENTRY,
            "near_ties": (("exact scores",), "scores are any float, and serve for sorting alone"),
        },
        "`evaluate`, `map` and `precision@5`",
    ),
    Library(
        "sentence-transformers", "sentence-transformers", ask_sentence_transformers, ("ids", "chunks"),
        {
            "ties": (("best order", "worst order"), "a comment of its source: equal scores are ordered by id"),
            "no_match": (("left out", "counted as 0"), "nothing is said of queries without a relevant document"),
            "repeated_ids": ONE_ENTRY,
            "near_ties": IN_FLOAT32,
        },
        "`InformationRetrievalEvaluator`, `map@100` and `precision@5`",
    ),
]  # fmt: skip


def rule_of(library: Library, case: Case) -> tuple[tuple[str, ...], str]:
    """Return the values that the documentation of a library allows in a case, and the source."""
    default = OVER_K if case.metric != "ap" else BY_RANK
    return library.rules.get(case.name, default)


def applies(library: Library, case: Case) -> bool:
    """Whether the library accepts the input of a case."""
    if library.name in ("pytorch-metric-learning", "scikit-learn") and case.metric != "ap":
        return False  # they have no precision@5
    return case.reads == "scores" or case.reads in library.takes


def variants(library: Library, case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case in other orders, chunks and names, each with the word for the change."""
    for order in orders(len(case.gallery if case.gallery is not None else case.queries)):
        yield "order", _in_order(case, order)
    if "chunks" in library.takes:
        yield from (("chunks", replace(case, chunk=size)) for size in CHUNKS)
    if "labels" in library.takes:
        numbers = {label: number for number, label in enumerate(sorted({*case.query_labels, *case.gallery_labels}))}
        for names in (numbers, {label: 10 * number + 7 for label, number in numbers.items()}):
            yield "names", _with_labels(case, names)
    if "ids" in library.takes and case.gallery is not None:
        names = dict(zip(dict.fromkeys(case.ids), sorted({*case.ids}, reverse=True), strict=True))
        yield "names", replace(case, gallery_ids=[names[name] for name in case.ids])


Variants = Callable[[Library, Any], Iterator[tuple[str, Any]]]


def orders(items: int) -> list[tuple[int, ...]]:
    """Return all orders of a few items, or reversed and rotated orders of many items."""
    if items <= 4:
        return list(itertools.permutations(range(items)))
    places = tuple(range(items))
    return [places[::-1], *(places[start:] + places[:start] for start in range(1, items))]


def _in_order(case: Case, order: tuple[int, ...]) -> Case:
    if case.gallery is None:
        labels = [case.query_labels[place] for place in order]
        return replace(case, queries=[case.queries[place] for place in order], query_labels=labels)
    return replace(
        case,
        gallery=[case.gallery[place] for place in order],
        gallery_labels=[case.gallery_labels[place] for place in order],
        gallery_ids=[case.ids[place] for place in order],
    )


def _with_labels(case: Case, names: dict[int, int]) -> Case:
    return replace(
        case,
        query_labels=[names[label] for label in case.query_labels],
        gallery_labels=[names[label] for label in case.gallery_labels],
    )


def ask(library: Library, case: Case) -> float | str:
    """Return the value of a library, or the type of the error that it raises."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return library.evaluate(case)
        except Exception as error:  # any error is an answer
            return type(error).__name__


def judge(library: Library, case: Case, changed: Variants = variants) -> Verdict:
    """Return the verdict on a library for a case and all its variants."""
    first = ask(library, case)
    values, changed_by = [first], []
    for what, variant in changed(library, case):
        value = ask(library, variant)
        if not any(_equal(value, other) for other in values):
            values.append(value)
        if not _equal(value, first) and what not in changed_by:
            changed_by.append(what)
    allowed, source = rule_of(library, case)
    in_rule = all(any(_equal(value, float(case.values[name])) for name in allowed) for value in values)
    if not in_rule:
        return Verdict(values, "no", changed_by)
    return Verdict(values, "no rule" if source.startswith("nothing") else "yes", changed_by)


def _equal(value: float | str, other: float | str) -> bool:
    if isinstance(value, str) or isinstance(other, str):
        return value == other
    return math.isclose(value, other, abs_tol=TOLERANCE)


def installed(known: list[Library]) -> list[Library]:
    """Return the libraries that are installed."""
    found = []
    for library in known:
        with contextlib.suppress(PackageNotFoundError):
            version(library.distribution)
            found.append(library)
    return found


def version_of(library: Library) -> str:
    """Return the version of a library; for this package, the version of the checkout."""
    return fewshot_callbacks.__version__ if library.name == "fewshot_callbacks" else version(library.distribution)


def cell(verdict: Verdict) -> str:
    """Return both verdicts in a few words."""
    stable = f"no: {', '.join(verdict.changed_by)}" if verdict.changed_by else "yes"
    return f"{verdict.is_right} / {stable}"


def text_of(values: list[float | str]) -> str:
    """Return values as fractions, and errors by their names."""
    return " or ".join(value if isinstance(value, str) else fraction_of(value) for value in values)


def fraction_of(value: float) -> str:
    """Return a value as a fraction with a small denominator if it is one, else with four places."""
    fraction = Fraction(value).limit_denominator(100)
    return str(fraction) if _equal(value, float(fraction)) else f"{value:.4f}"


def report(
    libraries: list[Library], cases: list[Any], known: list[Library], command: str, changed: Variants = variants
) -> str:
    """Return the tables: both verdicts, the values that break a rule or change, the rules, and the versions.

    A known library that was not called is listed as not installed.
    """
    verdicts = {
        (library.name, case.name): judge(library, case, changed)
        for library in libraries
        for case in cases
        if applies(library, case)
    }
    header = [library.name for library in libraries]
    lines = [f"| case | {' | '.join(header)} |", "| --- " * (len(header) + 1) + "|"]
    for case in cases:
        cells = [cell(verdicts[key]) if (key := (name, case.name)) in verdicts else "–" for name in header]
        lines.append(f"| {case.title} | {' | '.join(cells)} |")
    lines += ["", "Where a value is not that of the rule, or changes:", ""]
    lines += ["| library | case | values | the rule's | rule, and who states it |", "| --- | --- | --- | --- | --- |"]
    for library, case in itertools.product(libraries, cases):
        verdict = verdicts.get((library.name, case.name))
        if verdict is None or (verdict.is_right != "no" and not verdict.changed_by):
            continue
        allowed, source = rule_of(library, case)
        expected = " or ".join(dict.fromkeys(str(case.values[name]) for name in allowed))
        lines.append(f"| {library.name} | {case.title} | {text_of(verdict.values)} | {expected} | {source} |")
    lines += ["", "The cases:", "", "| case | values | why |", "| --- | --- | --- |"]
    for case in cases:
        values = ", ".join(f"{value} {rule}" for rule, value in case.values.items())
        lines.append(f"| {case.title} | {values} | {case.derivation} |")
    lines += ["", "Asked for:", ""]
    lines += [f"- {library.name} {version_of(library)}: {library.metrics}" for library in libraries]
    lines += [
        f"- {library.name}: not asked, because it is not installed (`pip install {library.distribution}`)"
        for library in known
        if library not in libraries
    ]
    return "\n".join([*lines, "", f"`{command}` made this."])


def write_page(table: str, marks: tuple[str, str]) -> None:
    """Write the table between its marks in docs/metrics/agreement.md."""
    begin, end = marks
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}", encoding="utf-8")


def run(
    description: str | None,
    cases: list[Any],
    known: list[Library],
    command: str,
    marks: tuple[str, str],
    changed: Variants = variants,
) -> None:
    """Print the tables, and write them to the page with `--write`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to docs/metrics/agreement.md")
    options = parser.parse_args()
    libraries = installed(known)
    missing = [library.distribution for library in known if library not in libraries]
    if missing and options.write:
        parser.error(
            f"docs/metrics/agreement.md covers all libraries. Run pip install {' '.join(missing)}, or leave --write out."
        )
    table = report(libraries, cases, known, command, changed)
    print(table)
    if options.write:
        write_page(table, marks)


def main() -> None:
    run(__doc__, load_cases(), LIBRARIES, COMMAND, (BEGIN, END))


if __name__ == "__main__":
    main()
