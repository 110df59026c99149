"""What the engine must find, by slow roads that share no code with it: integers of any size, comparisons of all pairs."""

import itertools
import math
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from fewshot_callbacks.engine.evaluation import Evaluation
from fewshot_callbacks.engine.options import computing, engine_options
from fewshot_callbacks.engine.relevance import Lists, PairRelevance
from fewshot_callbacks.engine.vectors import Vectors

TABLES = ("negatives_above", "negatives_tied", "relevant_above", "relevant_tied", "position_in_tie")


def exact_rows(vectors):
    """The scores of all queries with all items."""
    queries, items = len(vectors.pairs.queries), len(vectors.pairs.gallery)
    rows, columns = np.divmod(np.arange(queries * items), max(1, items))
    return vectors.exact(rows, columns).reshape(queries, items)


def quotient(numerator, denominator):
    """The quotient of two integers, rounded once; infinite beyond float64."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.copysign(math.inf, numerator)


def root(numerator, denominator):
    """The square root of a quotient of integers, rounded once: 128 bits of it, and whether more follow."""
    shift = max(0, 128 + denominator.bit_length() - numerator.bit_length())
    whole = math.isqrt((numerator << 2 * shift) // denominator)
    inexact = whole * whole * denominator != numerator << 2 * shift
    return quotient(2 * whole + inexact, 1 << shift + 1)


def integers(*sides):
    """Rows as integers, and the power of two by which all are to be multiplied."""
    parts = [np.frexp(side.astype(np.float64)) for side in sides]
    low = min(int(exponent[mantissa != 0].min(initial=1100)) for mantissa, exponent in parts)
    whole = [(mantissa * 2.0**53).astype(np.int64).astype(object) for mantissa, _ in parts]
    shifts = [np.maximum(exponent - low, 0).astype(object) for _, exponent in parts]
    return [some << shift for some, shift in zip(whole, shifts, strict=True)], low - 53


def true_scores(queries, gallery, similarity):
    """The similarity of each query with each item by its definition, rounded once to float64."""
    if similarity == "hamming":
        return -(queries[:, None] != gallery[None, :]).sum(2).astype(np.float64)
    (left, right), power = integers(np.asarray(queries), np.asarray(gallery))
    up, down = 1 << max(0, 2 * power), 1 << max(0, -2 * power)
    dots, lefts, rights = left @ right.T, (left * left).sum(1), (right * right).sum(1)
    scores = np.zeros(dots.shape)
    for i, j in np.ndindex(dots.shape):
        dot, square, other = int(dots[i, j]), int(lefts[i]), int(rights[j])
        if similarity == "dot":
            scores[i, j] = quotient(dot * up, down)
        elif similarity == "euclidean":
            scores[i, j] = -root((square + other - 2 * dot) * up, down)
        elif dot:
            scores[i, j] = math.copysign(root(dot * dot, square * other), dot)
    return scores


class Truth(NamedTuple):
    """Of every query and item: the score, whether the item is relevant, whether it may be ranked."""

    scores: np.ndarray
    relevant: np.ndarray
    candidate: np.ndarray

    @property
    def positives(self):
        return np.sort(self.scores[self.relevant & self.candidate])

    @property
    def negatives(self):
        return np.sort(self.scores[~self.relevant & self.candidate])

    def counts(self):
        """For each query the tables of its relevant items, by ascending scores."""
        found = {}
        for query, (scores, relevant, candidate) in enumerate(zip(*self, strict=True)):
            own, others = np.sort(scores[relevant & candidate]), scores[~relevant & candidate]
            above = [int((others > score).sum()) for score in own]
            tied = [int((others == score).sum()) for score in own]
            better = [int((own > score).sum()) for score in own]
            equal = [int((own == score).sum()) for score in own]
            found[query] = [above, tied, better, equal, [int((own[:n] == own[n]).sum()) + 1 for n in range(len(own))]]
        return found


def truth_of(case, scores=None):
    """The truth of a case of `tests.engine.cases`; scores may be given in other units."""
    labels, gallery = case["query_labels"], case.get("gallery", case["queries"])
    one = "gallery" not in case
    relevant = labels[:, None] == (labels if one else case["gallery_labels"])[None, :]
    candidate = ~np.eye(len(labels), dtype=bool) if one else np.ones(relevant.shape, bool)
    for of_queries, of_items in codes_of(case):
        candidate &= of_queries[:, None] != of_items[None, :]
    if scores is None:
        scores = true_scores(case["queries"].numpy(), gallery.numpy(), case["similarity"])
    return Truth(scores, relevant.numpy(), candidate)


def codes_of(case):
    of_items = "query" if "gallery" not in case else "gallery"
    kinds = [kind for kind in ("ids", "groups") if f"query_{kind}" in case]
    return [(case[f"query_{kind}"].numpy(), case[f"{of_items}_{kind}"].numpy()) for kind in kinds]


def prepared(case, threads=1):
    """Vectors and relevance of a case."""
    labels, one = case["query_labels"].numpy(), "gallery" not in case
    others = labels if one else case["gallery_labels"].numpy()
    own = np.arange(len(labels), dtype=np.int32) if one else np.full(len(labels), -1, np.int32)
    relevance = PairRelevance(Lists.of_labels(labels, others), own, codes_of(case), symmetric=one)
    return Vectors.of(case["queries"], case.get("gallery"), case["similarity"], threads=threads), relevance


def scores_of(case):
    """The truth in the engine's own units, by exact scores, which `test_exact_scores` proves."""
    with computing():
        vectors, _ = prepared(case)
        return truth_of(case, exact_rows(vectors))


@contextmanager
def evaluated(case, request=None, memory=10**8, progress=None, relevance=None, placed=False, **options):
    """The result of an evaluation, and the counts of each query, while the engine's options hold; or its places in lists."""
    with engine_options(**options), computing() as threads:
        vectors, of_labels = prepared(case, threads)
        questions = None if request is None else request.questions()
        evaluation, found = Evaluation(vectors, relevance or of_labels, memory, progress=progress), {}
        tables = ("places",) if placed else TABLES

        def consume(block):
            for row, query in enumerate(block.queries.tolist()):
                assert query not in found
                assert int(block.valid[row].sum()) == int(block.relevant[row])
                found[query] = [getattr(block, name)[row][block.valid[row]].tolist() for name in tables]
                found[query] = found[query][0] if placed else found[query]

        yield evaluation.run(consume, questions=questions, places=placed), found


def counted(case, **setting):
    """The counts of each query; the progress never falls and ends with all pairs, best matches have the highest scores."""
    told = []
    with evaluated(case, progress=lambda *now: told.append(now), **setting) as (result, found):
        whole = len(case["queries"]) * len(case.get("gallery", case["queries"]))
        assert told[-1] == (whole, whole)
        assert all(before <= after and total == whole for (before, _), (after, total) in itertools.pairwise(told))
        best, tied = result.matches.best
        assert np.isfinite(best).tolist() == [len(found[query][0]) > 0 for query in sorted(found)]
        assert tied.tolist() == [(found[query][3] or [0])[-1] for query in sorted(found)]
    return found
