"""`nearest` agrees with slow loops and with the ranks of `evaluate_retrieval`."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import evaluate_retrieval, nearest
from tests.cases import made
from tests.engine.cases import cases
from tests.functional.brute_force import BruteForce
from tests.functional.neighbours.vectors import FOUR, whole_numbers


@settings(max_examples=40, deadline=None)
@given(
    similarity=st.sampled_from(FOUR),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    n=st.integers(2, 60),
    dim=st.sampled_from([1, 3, 8]),
    two=st.booleans(),
    grouped=st.booleans(),
    k=st.sampled_from([1, 3, 10, 100]),
    scale=st.sampled_from([0, -60, 60]),
    seed=st.integers(0, 10**6),
)
def test_agrees_with_loops(similarity, dtype, n, dim, two, grouped, k, scale, seed):
    wide = dtype in (torch.float32, torch.float64) and similarity != "hamming"
    factor = 2.0**scale if wide else 1
    queries = whole_numbers(n, dim, similarity, seed, dtype) * factor
    gallery = whole_numbers(n + 3, dim, similarity, seed + 1, dtype) * factor if two else None
    rng = np.random.default_rng(seed)
    groups = {"query_groups": torch.from_numpy(rng.integers(0, n, n))} if grouped else {}
    if grouped and two:
        groups["gallery_groups"] = torch.from_numpy(rng.integers(0, n, n + 3))
    everyone = queries if gallery is None else gallery

    def close(score, other):  # a cosine of whole numbers has one of few values; loops round it in another place
        return abs(score - other) <= (1e-12 if similarity == "cosine" else 0)

    if grouped:
        of_items = groups["gallery_groups"] if two else groups["query_groups"]
        if bool((groups["query_groups"][:, None] == of_items[None, :]).all()):
            return  # nobody has a candidate, which is refused
    found = nearest(queries, gallery=gallery, k=k, similarity=similarity, **groups)
    left, right = queries.double().numpy(), everyone.double().numpy()
    of_items = groups.get("gallery_groups", groups.get("query_groups"))
    for q in range(n):
        allowed = [
            j
            for j in range(len(right))
            if (two or j != q) and not (grouped and groups["query_groups"][q] == of_items[j])
        ]
        if similarity == "hamming":
            scores = {j: -float((left[q] != right[j]).sum()) for j in allowed}
        else:
            oracle = BruteForce(left[q : q + 1], np.zeros(1), right, np.zeros(len(right)), similarity)
            scores = {j: oracle.score(left[q], right[j]) for j in allowed}
        order = sorted(allowed, key=lambda j: (-round(scores[j], 12) if similarity == "cosine" else -scores[j], j))
        size = min(k, len(order))
        assert found.indices[q, :size].tolist() == order[:size]
        assert found.indices[q, size:].tolist() == [-1] * (k - size)
        assert found.scores[q, size:].isnan().all()
        np.testing.assert_allclose(
            found.scores[q, :size],
            [scores[j] for j in order[:size]],
            rtol=1e-14,
            atol=1e-14 if similarity == "cosine" else 0,
        )
        got = found.scores[q, :size]
        last = got[-1] if size else math.nan
        same = [j for j in order if size and close(scores[j], last)]
        assert int(found.left_out[q]) == sum(j not in order[:size] for j in same)
        for place, score in enumerate(got.tolist()):
            others = [j for j in order if close(scores[j], score)]
            assert bool(found.tied[q, place]) == (len(others) > 1)


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_agrees_with_the_ranks_of_evaluate_retrieval(case):
    """Without ties the first relevant neighbour is where MRR has it, and each metric of the first k follows."""
    try:
        report = evaluate_retrieval(
            case["queries"], case["query_labels"], case.get("gallery"), case.get("gallery_labels"),
            **{name: value for name, value in case.items() if "ids" in name or "groups" in name},
            similarity=case["similarity"], label_groups=None, ties="pessimistic", metrics="mrr",
        )  # fmt: skip
    except ValueError:
        return
    found = nearest(
        case["queries"], case["query_labels"], case.get("gallery"), case.get("gallery_labels"), k=200,
        similarity=case["similarity"],
        **{name: value for name, value in case.items() if "ids" in name or "groups" in name},
    )  # fmt: skip
    for query, first in enumerate(found.first_relevant.tolist()):
        rank = report.per_query["mrr"][query]
        if first == 0:
            assert math.isnan(rank)
            continue
        # the last place of its tie, all relevant ones of which come last
        score = found.scores[query, first - 1]
        same = found.scores[query] == score
        last = int((found.scores[query] > score).sum()) + int((same & ~found.relevant[query]).sum()) + 1
        assert float(rank) == pytest.approx(1 / last, rel=1e-12)


def test_chosen_queries_are_rows_of_all():
    vectors, labels = made(80, 8, 6)
    every, some = nearest(vectors, labels, k=3), nearest(vectors, labels, queries=[70, 2, 2], k=3)
    assert some.queries.tolist() == [70, 2, 2]
    assert torch.equal(some.indices, every.indices[[70, 2, 2]])
    assert torch.equal(some.relevant, every.relevant[[70, 2, 2]])
    assert torch.equal(nearest(vectors, queries=torch.arange(80) == 5, k=3).indices, every.indices[5:6])


def test_fewer_candidates_than_k():
    found = nearest(torch.eye(3), torch.tensor([0, 0, 1]), k=5)
    assert found.indices[2].tolist() == [0, 1, -1, -1, -1]
    assert found.found.tolist() == [2, 2, 2]
    assert found.first_relevant.tolist() == [1, 1, 0]
    assert not found.relevant[:, 2:].any()


def test_words_as_labels_of_two_sets():
    found = nearest(torch.eye(2), ["owl", "jay"], torch.eye(2) + 0.1, ["jay", "owl"], k=2)
    assert found.relevant.tolist() == [[False, True], [False, True]]


NAN = torch.tensor([[0.0, 1.0], [math.nan, 1.0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "nearest: k=0 must be a whole number of at least 1"),
        ({"k": 2.5}, "k=2.5 must be"),
        ({"queries": [0, 9]}, "queries holds 9, but embeddings has 4 items. Pass indices from 0 to 3"),
        ({"queries": [-1]}, "queries holds -1"),
        ({"queries": []}, "queries"),
        ({"queries": [0.5]}, "queries must be indices"),
        ({"gallery": torch.eye(3)}, "embeddings have dimension 4, gallery 3"),
        ({"embeddings": NAN}, "1 of 2 rows of embeddings hold NaN or Inf, the first at index 1"),
        ({"embeddings": torch.ones(1, 4)}, "none of the 1 queries has a candidate. Pass a second item"),
        ({"query_groups": [1, 1, 1, 1]}, "Ids or groups exclude the whole gallery"),
        ({"labels": [1, 2, 3]}, "4 embeddings, but 3 labels"),
        (
            {"gallery": torch.eye(4), "labels": [1, 2, 3, 4]},
            "labels, gallery and gallery_labels do not fit together",
        ),
        ({"similarity": "cos"}, "similarity='cos' is unknown"),
        ({"similarity": "hamming", "embeddings": 0.3 * torch.eye(4)}, "binary codes hold"),
        ({"memory_mb": 0}, "memory_mb=0 must be positive"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=r"^nearest|similarity=") as caught:
        nearest(**{"embeddings": torch.eye(4)} | arguments)
    assert message in str(caught.value)


def test_relevance_needs_labels():
    with pytest.raises(ValueError, match="needs labels"):
        nearest(torch.eye(2), k=1).first_relevant  # noqa: B018
