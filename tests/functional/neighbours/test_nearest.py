"""`nearest` agrees with sorted scores and with the ranks of `evaluate_retrieval`."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import evaluate_retrieval, nearest
from tests.cases import made
from tests.engine.cases import cases
from tests.engine.oracles import prepared, scores_of


def codes_in(case):
    return {name: codes for name, codes in case.items() if "ids" in name or "groups" in name}


@settings(max_examples=60, deadline=None)
@given(case=cases(), k=st.sampled_from([1, 3, 10, 100]))
def test_agrees_with_sorting_the_exact_scores(case, k):
    truth, (vectors, _) = scores_of(case), prepared(case)
    if not truth.candidate.any():
        return  # nobody has a candidate, which is refused
    found = nearest(
        case["queries"], gallery=case.get("gallery"), k=k, similarity=case["similarity"], **codes_in(case)
    )  # fmt: skip
    for query, (scores, allowed) in enumerate(zip(truth.scores, truth.candidate, strict=True)):
        order = np.lexsort((np.arange(len(scores)), -scores))
        order = order[allowed[order]]
        first, rest = order[:k], order[k:]
        missing = k - len(first)
        assert found.indices[query].tolist() == [*first, *[-1] * missing]
        np.testing.assert_array_equal(found.scores[query], [*vectors.to_user(scores[first]), *[np.nan] * missing])
        assert int(found.left_out[query]) == (scores[rest] == scores[first[-1:]]).sum()
        tied = [(scores[order] == scores[item]).sum() > 1 for item in first]
        assert found.tied[query].tolist() == [*tied, *[False] * missing]


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_agrees_with_the_ranks_of_evaluate_retrieval(case):
    """Without ties the first relevant neighbour is where MRR has it, and each metric of the first k follows."""
    try:
        report = evaluate_retrieval(
            case["queries"], case["query_labels"], case.get("gallery"), case.get("gallery_labels"),
            **codes_in(case), similarity=case["similarity"], label_groups=None, ties="pessimistic", metrics="mrr",
        )  # fmt: skip
    except ValueError:
        return
    found = nearest(
        case["queries"], case["query_labels"], case.get("gallery"), case.get("gallery_labels"), k=200,
        similarity=case["similarity"], **codes_in(case),
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
