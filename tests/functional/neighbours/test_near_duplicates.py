"""`near_duplicates` agrees with slow loops over all pairs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import near_duplicates
from tests.functional.neighbours.vectors import FOUR, whole_numbers


@settings(max_examples=40, deadline=None)
@given(
    similarity=st.sampled_from(FOUR),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    n=st.integers(2, 50),
    two=st.booleans(),
    most=st.sampled_from([0, 1, 20, 10**5]),
    threshold=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 10**6),
)
def test_agrees_with_loops(similarity, dtype, n, two, most, threshold, seed):
    a = whole_numbers(n, 4, similarity, seed, dtype)
    b = whole_numbers(n + 3, 4, similarity, seed + 1, dtype) if two else None
    min_score = {
        "cosine": (0.0, 0.5, 1.0),
        "dot": (-1.0, 0.0, 4.0),
        "euclidean": (-2.0, -1.0, 0.0),
        "hamming": (-2, -1, 0),
    }[similarity][threshold]
    left, right = a.double(), (a if b is None else b).double()
    expected = []
    for i in range(len(left)):
        for j in range(0 if two else i + 1, len(right)):
            x, y = left[i], right[j]
            dot, squares = float(x @ y), float((x @ x) * (y @ y))
            if similarity == "cosine":
                score = (
                    (1.0 if dot > 0 else -1.0) if squares and dot * dot == squares else dot / math.sqrt(squares or 1)
                )
                score = 0.5 if dot > 0 and 4 * dot * dot == squares else score
            elif similarity == "dot":
                score = dot
            elif similarity == "euclidean":
                score = -math.sqrt(float((x - y) @ (x - y)))
            else:
                score = -float((x != y).sum())
            if score >= min_score:
                expected.append((-round(score, 12), i, j))
    expected.sort()
    found = near_duplicates(a, b, min_score=min_score, similarity=similarity, most=most)
    assert (found.total, found.left_out) == (len(expected), max(0, len(expected) - most))
    assert found.first.tolist() == [i for _, i, _ in expected[:most]]
    assert found.second.tolist() == [j for *_, j in expected[:most]]
    assert [-round(score, 12) for score in found.scores.tolist()] == [score for score, *_ in expected[:most]]


def test_the_same_tensor_as_both_sets_is_two_sets():
    a = torch.eye(3)
    assert near_duplicates(a, a).first.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_score": 1.5}, "no cosine score is compared with min_score=1.5. Cosines lie in [-1, 1]"),
        ({"min_score": 0.1, "similarity": "euclidean"}, "minus the distance"),
        ({"min_score": 1, "similarity": "hamming", "a": torch.ones(3, 4)}, "minus the number of bits"),
        ({"min_score": math.inf, "similarity": "dot"}, "finite dot product"),
        ({"min_score": "high"}, "min_score='high'"),
        ({"most": -1}, "most=-1 must be a whole number of at least 0. Pass 0 to only count"),
        ({"b": torch.eye(3)}, "a have dimension 4, b 3"),
        ({"a": torch.tensor([[math.nan] * 4] * 2)}, "2 of 2 rows of a hold NaN"),
        ({"b": torch.full((2, 4), math.inf)}, "2 of 2 rows of b hold NaN"),
        ({"a": torch.ones(1, 4)}, "a single item, which has no pair"),
        ({"similarity": "near"}, "similarity='near' is unknown"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=r"^near_duplicates|similarity=") as caught:
        near_duplicates(**{"a": torch.eye(4)} | arguments)
    assert message in str(caught.value)
