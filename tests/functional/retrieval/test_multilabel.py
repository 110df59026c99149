"""Metrics of items with several labels each against all orders written out."""

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import evaluate_retrieval


def orders(scores, grades):
    """The grades in all different orders of the candidates by descending score, each of which is as likely."""
    pairs = list(zip(scores, grades, strict=True))
    groups = [[grade for score, grade in pairs if score == value] for value in sorted(set(scores), reverse=True)]
    for parts in itertools.product(*(set(itertools.permutations(group)) for group in groups)):
        yield [grade for part in parts for grade in part]


def ap(grades, cut, divisor):
    hits, total = 0, 0.0
    for rank, grade in enumerate(grades[:cut], start=1):
        if grade:
            hits += 1
            total += hits / rank
    relevant = sum(grade > 0 for grade in grades)
    by = {"min": min(relevant, cut), "relevant": relevant, "found": hits}[divisor]
    return total / by if by else 0.0


def dcg(grades, k, gain):
    worth = {"exponential": lambda grade: 2**grade - 1, "linear": lambda grade: grade}[gain]
    return sum(worth(grade) / math.log2(rank + 1) for rank, grade in enumerate(grades[:k], start=1))


ASKED = (
    *("mAP", "map@2_relevant", "map@2_found", "map@r", "r_precision", "mrr", "recall@2", "ir_recall@2", "precision@3"),
    *("ndcg@3", "ndcg@3_linear"),
)


def by_loops(scores, grades, ties):
    """Metrics of one query, averaged over all orders, or those of the best or worst."""
    if not any(grades):
        return None
    ideals = {gain: dcg(sorted(grades, reverse=True), 3, gain) for gain in ("exponential", "linear")}
    relevant = sum(grade > 0 for grade in grades)
    pick = {"expected": lambda values: sum(values) / len(values), "optimistic": max, "pessimistic": min}[ties]
    ordered = list(orders(scores, grades))
    values = {
        "mAP": [ap(order, len(order), "relevant") for order in ordered],
        "map@2_relevant": [ap(order, 2, "relevant") for order in ordered],
        "map@2_found": [ap(order, 2, "found") for order in ordered],
        "map@r": [ap(order, relevant, "relevant") for order in ordered],
        "r_precision": [sum(grade > 0 for grade in order[:relevant]) / relevant for order in ordered],
        "mrr": [1 / (1 + [grade > 0 for grade in order].index(True)) for order in ordered],
        "recall@2": [float(any(order[:2])) for order in ordered],
        "ir_recall@2": [sum(grade > 0 for grade in order[:2]) / relevant for order in ordered],
        "precision@3": [sum(grade > 0 for grade in order[:3]) / 3 for order in ordered],
        "ndcg@3": [dcg(order, 3, "exponential") / ideals["exponential"] for order in ordered],
        "ndcg@3_linear": [dcg(order, 3, "linear") / ideals["linear"] for order in ordered],
    }
    return {name: pick(value) for name, value in values.items()}


@st.composite
def cases(draw):
    n, m, labels = draw(st.integers(2, 6)), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    similarity = draw(st.sampled_from(["hamming", "cosine", "dot", "euclidean"]))
    dim = draw(st.integers(1, 4))

    def side(count):
        vectors = rng.choice([-1, 1], (count, dim)) if similarity == "hamming" else rng.integers(-1, 2, (count, dim))
        return torch.from_numpy(vectors).float(), torch.from_numpy(rng.integers(0, 2, (count, labels)))

    other = draw(st.none() | st.just(side(m)))
    codes = {}
    if other is not None and draw(st.booleans()):
        codes |= {"query_ids": rng.integers(0, 5, n), "gallery_ids": rng.integers(0, 5, m)}
    if draw(st.booleans()):
        codes |= {"query_groups": rng.integers(0, 4, n)}
        codes |= {} if other is None else {"gallery_groups": rng.integers(0, 4, m)}
    return {
        "similarity": similarity,
        "ties": draw(st.sampled_from(["expected", "optimistic", "pessimistic"])),
        "queries": side(n),
        "other": other,
        "codes": codes,
    }


def score(similarity, a, b):
    a, b = a.tolist(), b.tolist()
    product = sum(x * y for x, y in zip(a, b, strict=True))
    if similarity == "euclidean":
        return -sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    if similarity == "cosine":  # as a fraction, so that equal angles are equal
        square = sum(x * x for x in a) * sum(y * y for y in b)
        return round(math.copysign(product * product / square, product), 12) if square else 0.0
    return product


def candidates_of(i, items, other, codes):
    """Who may be retrieved for query i: not itself, nor what has its id or its group."""
    of_items = {"ids": codes.get("gallery_ids"), "groups": codes.get("gallery_groups", codes.get("query_groups"))}
    return [
        j
        for j in range(len(items))
        if not (other is None and j == i)
        and not any(f"query_{kind}" in codes and codes[f"query_{kind}"][i] == of_items[kind][j] for kind in of_items)
    ]


@settings(max_examples=200, deadline=None)
@given(cases())
def test_values_are_those_of_all_orders_written_out(case):
    (queries, targets), other, codes = case.pop("queries"), case.pop("other"), case.pop("codes")
    items, item_targets = other or (queries, targets)
    wanted = []
    for i, query in enumerate(queries):
        some = candidates_of(i, items, other, codes)
        scores = [score(case["similarity"], query, items[j]) for j in some]
        grades = [int((targets[i] & item_targets[j]).sum()) for j in some]
        wanted.append(by_loops(scores, grades, case["ties"]))

    def evaluate():
        return evaluate_retrieval(queries, targets, *(other or ()), **case, **codes, metrics=ASKED)

    if not any(wanted):
        with pytest.raises(ValueError, match=f"none of the {len(queries)} queries has a relevant candidate"):
            evaluate()
        return
    report = evaluate()
    for i, of_query in enumerate(wanted):
        found = {name: float(report.per_query[name][i]) for name in ASKED}
        if of_query is None:
            assert all(math.isnan(value) for value in found.values())
        else:
            assert found == pytest.approx(of_query, abs=1e-12)
    matched = [of_query for of_query in wanted if of_query is not None]
    assert report.queries_without_match == len(wanted) - len(matched)
    assert report.metrics() == pytest.approx(
        {name: sum(of_query[name] for of_query in matched) / len(matched) for name in matched[0]}, abs=1e-12
    )


@pytest.mark.parametrize("similarity", ["hamming", "cosine"])
@pytest.mark.parametrize("sets", [1, 2])
def test_of_one_label_each_it_is_the_ordinary_evaluation(similarity, sets):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (90,), generator=generator)
    labels[:2] = torch.tensor([5, 6])  # without a match
    codes = torch.randn(90, 16, generator=generator).sign()
    groups = torch.randint(0, 30, (90,), generator=generator)
    one_hot = torch.nn.functional.one_hot(labels, 8)
    settings = {
        "similarity": similarity,
        "metrics": (
            *("mAP", "map@20_found", "map@5_min", "recall@1", "recall@3"),
            "ir_recall@7",
            "precision@4",
            "ndcg@20",
        ),
        "query_groups": groups,
    }
    of_labels, of_targets = (codes, labels), (codes, one_hot)
    if sets == 2:
        settings |= {"query_groups": groups[:30], "gallery_groups": groups[30:]}
        settings |= {"query_ids": torch.arange(30), "gallery_ids": torch.arange(60)}
        of_labels, of_targets = ((codes[:30], y[:30], codes[30:], y[30:]) for y in (labels, one_hot))
    one = evaluate_retrieval(*of_labels, label_groups=None, **settings)
    for memory_mb in (512, 0.02):  # many blocks
        several = evaluate_retrieval(*of_targets, memory_mb=memory_mb, **settings)
        assert several.values.keys() == one.values.keys()
        for name, value in several.values.items():
            assert value == pytest.approx(one[name], abs=1e-12), name
            assert several.intervals[name] == pytest.approx(one.intervals[name], abs=1e-12)
        assert (several.queries_without_match, several.queries_with_ties) == (
            one.queries_without_match,
            one.queries_with_ties,
        )
        assert several.notes == one.notes


def test_a_linear_gain_is_in_the_name_and_of_one_label_each_the_same():
    embeddings, labels = torch.randn(40, 4), torch.arange(40) % 4
    one_hot = torch.nn.functional.one_hot(labels)
    report = evaluate_retrieval(embeddings, one_hot, metrics=("mAP", "ndcg@5_linear"))
    assert report["ndcg@5_linear"] == evaluate_retrieval(embeddings, one_hot, metrics=("mAP", "ndcg@5"))["ndcg@5"]


def test_half_of_the_vectors_in_another_precision():
    embeddings, targets = (
        torch.randn(20, 4).half(),
        torch.randint(0, 2, (20, 3), generator=torch.Generator().manual_seed(0)),
    )
    wanted = evaluate_retrieval(embeddings[:10].double(), targets[:10], embeddings[10:].double(), targets[10:])
    assert evaluate_retrieval(embeddings[:10], targets[:10], embeddings[10:].double(), targets[10:]) == wanted


GOOD = {"embeddings": torch.ones(3, 2), "labels": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": torch.ones(2, 2)}, "3 embeddings, but 2 labels"),
        ({"labels": 2 * torch.ones(3, 2)}, "labels have shape (3, 2), and 6 entries are neither 0 nor 1. Entry (i, j) is 1"),
        ({"gallery": torch.ones(1, 2), "gallery_labels": torch.ones(1, 3)},
         "some items have zeros and ones of 2 labels, others zeros and ones of 3 labels"),
        ({"gallery": torch.ones(1, 2), "gallery_labels": ["owl"]}, "some items have one label, others zeros and ones of 2"),
        ({"metrics": ("mAP", "macro_mAP", "grouped_recall@1", "prototype_accuracy")},
         "macro_mAP, grouped_recall@1, prototype_accuracy cannot be computed where items have several labels each"),
        ({"label_groups": [[0, 1], [2, 3]]}, "label_groups cannot be computed"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(change, words, as_users_run_it):
    with pytest.raises(ValueError, match=re.escape(words)):
        evaluate_retrieval(**(GOOD | change))


LABELS = (1, 2, 30, 54, 1022, 1023, 1024, 1074, 2500)


@settings(max_examples=60, deadline=None)
@given(
    grades=st.lists(st.sampled_from([0, *LABELS]) | st.integers(0, max(LABELS)), min_size=1, max_size=6),
    tied=st.booleans(),
    k=st.integers(1, 6),
)
def test_any_number_of_shared_labels_equals_rational_arithmetic(grades, tied, k):
    """The query has all labels, candidate j the first `grades[j]`: j shares so many, and lies further away the larger j."""
    targets = (torch.arange(max(LABELS)) < torch.tensor(grades)[:, None]).long()
    assume(any(grades))
    gallery = torch.ones(len(grades), 1) if tied else torch.arange(len(grades)).float()[:, None]
    report = evaluate_retrieval(
        torch.zeros(1, 1), torch.ones(1, max(LABELS), dtype=torch.int64), gallery, targets, similarity="euclidean",
        metrics=f"ndcg@{k}",
    )  # fmt: skip
    gains = [Fraction(2**grade - 1) for grade in grades]
    discounts = [1 / Fraction(math.log2(rank + 1)) for rank in range(1, min(k, len(grades)) + 1)]
    mean = sum(gains) / len(gains)
    found = sum(d * (mean if tied else gain) for d, gain in zip(discounts, gains, strict=False))
    best = sum(d * gain for d, gain in zip(discounts, sorted(gains, reverse=True), strict=False))
    expected = float(found / best)
    assert report.per_query[f"ndcg@{k}"].item() == pytest.approx(expected, rel=1e-13, abs=1e-300)
