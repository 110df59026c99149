"""`evaluate_identification` agrees with loops over all pairs and all orders of equal scores."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from fewshot_callbacks import evaluate_identification
from tests.cases import examples
from tests.messages import missing_facts

RATES, RANKS = (0.1, 0.25, 0.5, 1), (1, 2, 4)


def reference(queries, labels, gallery, gallery_labels):
    """TPIR at each rate and rank, and without a threshold: over all orders of equal scores, in fractions."""
    scores = [[float(query @ item) for item in gallery] for query in queries]
    mated = [n for n, label in enumerate(labels) if label in gallery_labels]
    others = [max(scores[n]) for n in range(len(labels)) if n not in mated]
    own = {n: max(s for s, label in zip(scores[n], gallery_labels, strict=True) if label == labels[n]) for n in mated}
    hits = {}
    for n, rank in itertools.product(mated, RANKS):
        shares = []
        for order in itertools.permutations(range(len(gallery))):  # equal ones stay in this order
            first = sorted(order, key=lambda item, n=n: -scores[n][item])[:rank]
            shares.append(any(gallery_labels[item] == labels[n] for item in first))
        hits[n, rank] = Fraction(sum(shares), len(shares))
    found = {f"recall@{rank}": sum(hits[n, rank] for n in mated) / len(mated) for rank in RANKS}
    thresholds = [*sorted({*others, *own.values()}), math.inf]
    for rate, rank in itertools.product(RATES, RANKS):
        share = math.nan
        if others:
            t = next(t for t in thresholds if sum(score >= t for score in others) / len(others) <= rate)
            share = sum(hits[n, rank] for n in mated if own[n] >= t) / Fraction(len(mated))
        found[f"tpir@fpir{rate}" + (f"_rank{rank}" if rank > 1 else "")] = share
    return found


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 5), st.integers(2, 4))
def test_agrees_with_loops(seed, queries, items, people):
    """Whole numbers have many equal scores."""
    generator = torch.Generator().manual_seed(seed)
    rows, gallery = (torch.randint(-1, 2, (n, 2), generator=generator).double() for n in (queries, items))
    labels, enrolled = (torch.randint(people, (n,), generator=generator).tolist() for n in (queries, items))
    labels[0] = enrolled[0]
    expected = reference(rows, labels, gallery, enrolled)
    found = evaluate_identification(rows, labels, gallery, enrolled, metrics=[*expected], similarity="dot")
    assert found.values == pytest.approx({key: float(value) for key, value in expected.items()}, rel=1e-12, nan_ok=True)
    mated = sum(label in enrolled for label in labels)
    assert (found.mated, found.non_mated) == (mated, queries - mated)


def test_many_items_in_little_memory_words_and_the_report():
    people = torch.arange(600) % 120
    centres = torch.randn(120, 16)
    gallery, queries = (centres[people] + 0.8 * torch.randn(600, 16) for _ in range(2))
    enrolled = people < 80
    words = np.array([f"p{one}" for one in people.tolist()])
    keys = ("tpir@fpir0.1", "tpir@fpir0.1_rank5", "recall@1")
    found = evaluate_identification(queries, words, gallery[enrolled], words[enrolled], metrics=keys, memory_mb=64)
    cosines = normalize(queries.double()) @ normalize(gallery[enrolled].double()).T
    best, who = cosines.max(1)
    right = people[enrolled][who] == people
    threshold = best[~enrolled].sort(descending=True).values[20].item()  # 20 of 200 lie above
    assert found["recall@1"] == pytest.approx(right[enrolled].double().mean().item())
    assert found["tpir@fpir0.1"] == pytest.approx((right & (best > threshold))[enrolled].double().mean().item())
    assert found["tpir@fpir0.1"] < found["tpir@fpir0.1_rank5"] < 1
    assert all(low < found[key] < high for key, (low, high) in found.intervals.items())
    assert str(found).startswith(
        "400 mated and 200 non-mated queries, 400 gallery items of 80 identities\ntpir@fpir0.1  "
    )
    assert json.loads(json.dumps(found.to_dict()))["metrics"]["recall@1"] == found["recall@1"]
    assert found.per_query["recall@1"].isnan().sum() == 200


def test_without_non_mated_probes_or_with_few():
    found = evaluate_identification(torch.eye(3), [0, 1, 2], torch.eye(3), [0, 1, 2])
    assert math.isnan(found["tpir@fpir0.1"])
    assert found["recall@1"] == 1
    assert not missing_facts(found.notes[0], ("query", "non-mated")), found.notes
    few = evaluate_identification(torch.eye(3), [0, 1, 9], torch.eye(3), [0, 1, 2])
    assert not missing_facts(few.notes[0], ("1 non-mated", "0.1, 0.01", "threshold")), few.notes


def test_it_may_be_asked_for_where_no_gradient_is_recorded():
    rows, labels = torch.randn(20, 4), torch.arange(20) % 7
    sets = rows, labels, rows[:15], labels[:15] % 5
    expected = evaluate_identification(*sets)
    with torch.inference_mode():
        assert evaluate_identification(*sets) == expected


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_only_the_first_item_of_each_id_counts_and_no_item_of_the_own_group(seed, groups_exclude):
    """Each query is evaluated on its own candidates by the loops; rates of false positives need them all at once."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-1, 2, (9, 3), generator=generator).double()
    labels = torch.randint(3, (9,), generator=generator)
    labels[:2] = 0
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 5, 1, 2])  # the last three are copies by their ids
    groups = torch.arange(9) % 4 if groups_exclude else torch.arange(9)
    found = evaluate_identification(
        rows, labels, query_ids=ids, query_groups=groups, metrics=("recall@1", "recall@2"), similarity="dot"
    )
    assert found.mated + found.non_mated == len(found.per_query["recall@1"]) == 6
    for query in range(6):
        others = [i for i in range(6) if i != query and groups[i] != groups[query]]
        enrolled = labels[others].tolist()
        if int(labels[query]) not in enrolled:
            assert math.isnan(found.per_query["recall@1"][query])
            continue
        expected = reference(rows[query : query + 1], labels[query : query + 1].tolist(), rows[others], enrolled)
        for rank in (1, 2):
            value = float(found.per_query[f"recall@{rank}"][query])
            assert value == pytest.approx(float(expected[f"recall@{rank}"]), rel=1e-12)


def test_a_query_without_a_candidate_is_never_accepted():
    groups = {"query_groups": [7, 8, 9], "gallery_groups": [9, 9]}
    sets = torch.eye(3), ["a", "b", "x"], torch.eye(3)[:2], ["a", "b"]
    found = evaluate_identification(*sets, **groups, metrics=("tpir@fpir0.5",))
    assert (found.non_mated, found["tpir@fpir0.5"]) == (1, 1.0)
    assert found.thresholds["tpir@fpir0.5"] == 1.0
