import pytest
import torch

from fewshot_callbacks.functional import evaluate_retrieval

COLLAPSED = "The embeddings have collapsed: all are the same vector, and every ranking is at chance level."
LABELS = torch.arange(12) % 3


def rows(distinct: int) -> torch.Tensor:
    """Twelve items of so many different vectors of -1 and +1, spread over the classes."""
    vectors = torch.tensor([[1, 1, 1], [1, -1, 1], [-1, 1, 1], [-1, -1, 1]], dtype=torch.float32)
    return vectors[torch.arange(12) // 3 % distinct]


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "hamming"])
def test_a_collapse_is_one_vector_and_no_more(similarity):
    for distinct in (1, 2, 3, 4):
        notes = evaluate_retrieval(rows(distinct), LABELS, similarity=similarity, group_size=None).notes
        ties = "12 of 12 queries have relevant items that tie with irrelevant ones."
        assert (COLLAPSED in notes) == (distinct == 1), distinct
        assert (ties in notes) == (distinct > 1), distinct  # of a collapse it goes without saying


def test_ties_are_spoken_of_where_more_than_a_hundredth_of_the_queries_has_some():
    for items, said in ((200, False), (198, True)):
        embeddings = torch.randn(items, 8, generator=torch.Generator().manual_seed(0))
        embeddings[2] = embeddings[0]  # of two classes: each ties for the other of both
        notes = evaluate_retrieval(embeddings, torch.arange(items) // 2, group_size=None).notes
        assert notes == ((f"2 of {items} queries have relevant items that tie with irrelevant ones.",) if said else ())


def test_a_vector_of_length_zero_is_counted():
    embeddings = torch.randn(12, 4)
    embeddings[[3, 7]] = 0
    notes = evaluate_retrieval(embeddings, LABELS, group_size=None).notes
    assert "2 embeddings have length zero: their cosine similarity to everything is 0." in notes
    assert not [
        note
        for note in evaluate_retrieval(embeddings, LABELS, similarity="dot", group_size=None).notes
        if "zero" in note
    ]
