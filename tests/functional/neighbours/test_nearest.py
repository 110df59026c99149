"""`nearest` lists what sorting the exact scores of all pairs finds, on every road of the engine."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks import nearest
from fewshot_callbacks.engine.options import engine_options
from tests.cases import clustered_items, examples, sampled_product
from tests.engine.cases import PRECISIONS, SIMILARITIES, cases, engines
from tests.engine.oracles import prepared, scores_of
from tests.messages import refused


def codes_in(case):
    return {name: codes for name, codes in case.items() if "ids" in name or "groups" in name}


def check(case, k, memory_mb=None, **road):
    """Compare with a list of all candidates of each query, sorted by score and then by the number of the item."""
    truth, (vectors, _) = scores_of(case), prepared(case)
    if not truth.candidate.any():
        return  # nobody has a candidate, which is refused
    codes = {name: codes for name, codes in case.items() if "ids" in name or "groups" in name}
    sets = case["queries"], case["query_labels"], case.get("gallery"), case.get("gallery_labels")
    with engine_options(**road):
        found = nearest(*sets, k=k, similarity=case["similarity"], memory_mb=memory_mb, **codes)
    for query, (scores, relevant, allowed) in enumerate(
        zip(truth.scores, truth.relevant, truth.candidate, strict=True)
    ):
        order = np.lexsort((np.arange(len(scores)), -scores))
        order = order[allowed[order]]
        first, rest = order[:k], order[k:]
        missing, hits = k - len(first), relevant[first].tolist()
        assert found.indices[query].tolist() == [*first, *[-1] * missing]
        np.testing.assert_array_equal(found.scores[query], [*vectors.scale.to_user(scores[first]), *[np.nan] * missing])
        assert int(found.unlisted_ties[query]) == (scores[rest] == scores[first[-1:]]).sum()
        tied = [(scores[order] == scores[item]).sum() > 1 for item in first]
        assert found.tied[query].tolist() == [*tied, *[False] * missing]
        assert found.relevant[query].tolist() == [*hits, *[False] * missing]
        assert int(found.found[query]) == len(first)
        assert int(found.first_relevant[query]) == (hits.index(True) + 1 if any(hits) else 0)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines(), st.sampled_from([1, 3, 10, 100]))
def test_agrees_with_sorting_the_exact_scores(case, road, k):
    check(case, k, **road)


@pytest.mark.parametrize(("similarity", "precision"), sampled_product(SIMILARITIES, [None, *PRECISIONS], count=6))
def test_many_items_in_a_small_budget(similarity, precision):
    rows, labels = clustered_items(300, 20, 16)
    case = {"queries": rows, "query_labels": labels, "similarity": similarity}
    check(case, 3, memory_mb=0.1, precision=precision, threads=2)


def test_chosen_queries_are_rows_of_all():
    vectors, labels = clustered_items(80, 8, 6)
    every, some = nearest(vectors, labels, k=3), nearest(vectors, labels, query_indices=[70, 2, 2], k=3)
    assert some.query_indices.tolist() == [70, 2, 2]
    assert torch.equal(some.indices, every.indices[[70, 2, 2]])
    assert torch.equal(some.relevant, every.relevant[[70, 2, 2]])
    assert torch.equal(nearest(vectors, query_indices=torch.arange(80) == 5, k=3).indices, every.indices[5:6])


def test_words_as_labels_of_two_sets():
    found = nearest(torch.eye(2), ["owl", "jay"], torch.eye(2) + 0.1, ["jay", "owl"], k=2)
    assert found.relevant.tolist() == [[False, True], [False, True]]
    with refused(ValueError, "Neighbours.first_relevant", "labels", "nearest"):
        nearest(torch.eye(2), k=1).first_relevant  # noqa: B018
