import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import evaluate_multilabel, evaluate_retrieval


def orders(scores):
    """All orders of the candidates by descending score."""
    groups = [[i for i, score in enumerate(scores) if score == value] for value in sorted(set(scores), reverse=True)]
    for parts in itertools.product(*(itertools.permutations(group) for group in groups)):
        yield [i for part in parts for i in part]


def ap(grades, cut, divisor):
    hits, total = 0, 0.0
    for rank, grade in enumerate(grades[:cut], start=1):
        if grade:
            hits += 1
            total += hits / rank
    relevant = sum(grade > 0 for grade in grades)
    by = {"min": min(relevant, cut), "relevant": relevant, "found": hits}[divisor]
    return total / by if by else 0.0


def dcg(grades, k):
    return sum((2**grade - 1) / math.log2(rank + 1) for rank, grade in enumerate(grades[:k], start=1))


def by_loops(scores, grades, ties):
    """Metrics of one query, averaged over all orders, or those of the best or worst."""
    if not any(grades):
        return None
    ideal = dcg(sorted(grades, reverse=True), 3)
    pick = {"expected": lambda values: sum(values) / len(values), "optimistic": max, "pessimistic": min}[ties]
    ordered = [[grades[i] for i in order] for order in orders(scores)]
    values = {
        "mAP": [ap(order, len(order), "relevant") for order in ordered],
        "map@2_relevant": [ap(order, 2, "relevant") for order in ordered],
        "map@2_found": [ap(order, 2, "found") for order in ordered],
        "ndcg@3": [dcg(order, 3) / ideal for order in ordered],
    }
    return {name: pick(value) for name, value in values.items()}


@st.composite
def cases(draw):
    n, m, labels = draw(st.integers(2, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    similarity = draw(st.sampled_from(["hamming", "cosine", "dot", "euclidean"]))
    dim = draw(st.integers(1, 4))

    def side(count):
        vectors = rng.choice([-1, 1], (count, dim)) if similarity == "hamming" else rng.integers(-1, 2, (count, dim))
        return torch.from_numpy(vectors).float(), torch.from_numpy(rng.integers(0, 2, (count, labels)))

    return (
        similarity,
        draw(st.sampled_from(["expected", "optimistic", "pessimistic"])),
        side(n),
        draw(st.none() | st.just(side(m))),
    )


def score(similarity, a, b):
    a, b = a.tolist(), b.tolist()
    product = sum(x * y for x, y in zip(a, b, strict=True))
    if similarity == "euclidean":
        return -sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    if similarity == "cosine":  # as a fraction, so that equal angles are equal
        square = sum(x * x for x in a) * sum(y * y for y in b)
        return round(math.copysign(product * product / square, product), 12) if square else 0.0
    return product


@settings(max_examples=200, deadline=None)
@given(cases())
def test_values_are_those_of_all_orders_written_out(case):
    similarity, ties, (queries, targets), other = case
    report = evaluate_multilabel(
        queries,
        targets,
        *(other or ()),
        similarity=similarity,
        ties=ties,
        map_k=((2, "relevant"), (2, "found")),
        ndcg_k=(3,),
    )
    items, item_targets = other or (queries, targets)
    without = 0
    for i, query in enumerate(queries):
        some = [j for j in range(len(items)) if other is not None or j != i]
        grades = [int((targets[i] & item_targets[j]).sum()) for j in some]
        wanted = by_loops([score(similarity, query, items[j]) for j in some], grades, ties)
        found = {name: float(values[i]) for name, values in report.per_query.items()}
        without += wanted is None
        if wanted is None:
            assert all(math.isnan(value) for value in found.values())
        else:
            assert found == pytest.approx(wanted, abs=1e-12)
    assert report.queries_without_match == without


@pytest.mark.parametrize("similarity", ["hamming", "cosine"])
def test_of_one_label_each_it_is_the_ordinary_evaluation(similarity):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (90,), generator=generator)
    codes = torch.randn(90, 16, generator=generator).sign()
    one_hot = torch.nn.functional.one_hot(labels)
    for memory_mb in (512, 0.02):  # many blocks
        several = evaluate_multilabel(
            codes, one_hot, similarity=similarity, map_k=((20, "found"),), ndcg_k=(20,), memory_mb=memory_mb
        )
        one = evaluate_retrieval(codes, labels, similarity=similarity, map_k=((20, "found"),), ndcg_k=(20,))
        for name, value in several.mean.items():
            assert value == pytest.approx(one.mean[name], abs=1e-12), name
            assert several.intervals[name] == pytest.approx(one.intervals[name], abs=1e-12)


def test_nobody_shares_a_label():
    report = evaluate_multilabel(torch.randn(3, 2), torch.eye(3))
    assert report.queries_without_match == 3
    assert math.isnan(report.mean["mAP"])


def test_progress_ends_with_all_pairs():
    seen = []
    evaluate_multilabel(torch.randn(9, 2), torch.ones(9, 1), memory_mb=0.002, progress=lambda *now: seen.append(now))
    assert seen[-1] == (81, 81)
    assert len(seen) > 1


GOOD = {"embeddings": torch.ones(3, 2), "targets": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": torch.ones(3)}, "targets have shape (3,); one row of zeros and ones for each of the 3 items"),
        ({"targets": torch.ones(2, 2)}, "targets have shape (2, 2)"),
        ({"targets": 2 * torch.ones(3, 2)}, "targets must hold zeros and ones only"),
        ({"gallery": torch.ones(3, 2)}, "gallery and gallery_targets belong together"),
        ({"gallery": torch.ones(1, 4), "gallery_targets": torch.ones(1, 2)}, "of 2 components cannot be compared"),
        ({"gallery": torch.ones(1, 2), "gallery_targets": torch.ones(1, 3)}, "targets have 2 labels, gallery_targets 3"),
        ({"ndcg_k": (0,)}, "k=0 is no positive rank"),
        ({"similarity": "hamming", "embeddings": torch.tensor([[0.5, 1.0]] * 3)}, "binary codes hold -1 and +1, or 0 and 1"),
        ({"embeddings": torch.full((3, 2), math.nan)}, "3 of 3 rows of embeddings hold NaN or Inf"),
        ({"memory_mb": 0}, "memory_mb=0 must be positive"),
        ({"confidence": 1.0}, "confidence=1.0"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        evaluate_multilabel(**(GOOD | change))


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
    gallery = torch.ones(len(grades), 1) if tied else torch.arange(len(grades)).float()[:, None]
    report = evaluate_multilabel(
        torch.zeros(1, 1), torch.ones(1, max(LABELS), dtype=torch.int64), gallery, targets, similarity="euclidean",
        ndcg_k=(k,),
    )  # fmt: skip
    gains = [Fraction(2**grade - 1) for grade in grades]
    discounts = [1 / Fraction(math.log2(rank + 1)) for rank in range(1, min(k, len(grades)) + 1)]
    mean = sum(gains) / len(gains)
    found = sum(d * (mean if tied else gain) for d, gain in zip(discounts, gains, strict=False))
    best = sum(d * gain for d, gain in zip(discounts, sorted(gains, reverse=True), strict=False))
    expected = float(found / best) if best else math.nan
    assert report.per_query[f"ndcg@{k}"].item() == pytest.approx(expected, rel=1e-13, abs=1e-300, nan_ok=True)
