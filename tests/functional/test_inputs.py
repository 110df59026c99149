"""Inputs that no function may take for something else."""

import re

import numpy as np
import pytest
import torch

from fewshot_callbacks.functional import evaluate_retrieval, grouped_recall
from fewshot_callbacks.functional._reading import non_finite_rows

CALLS = {
    "evaluate_retrieval": lambda **given: evaluate_retrieval(label_groups=None, **given),
    "grouped_recall": lambda **given: grouped_recall(label_groups=2, **given),
}


def inputs():
    generator = np.random.default_rng(0)
    labels = np.arange(12) % 4
    sets = {"embeddings": generator.normal(size=(12, 3)), "labels": labels}
    return sets | {"gallery": generator.normal(size=(12, 3)), "gallery_labels": labels, "query_groups": labels * 0,
                   "gallery_groups": labels * 0 + 1, "query_ids": labels, "gallery_ids": labels + 20}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", inputs())
def test_masked_values_are_refused(call, name):
    given = inputs()
    given[name] = np.ma.masked_array(given[name], mask=np.zeros(given[name].shape, bool))
    expected = CALLS[call](**inputs())
    assert CALLS[call](**given) == expected  # nothing is masked
    given[name][3] = np.ma.masked
    masked = given[name][3:4].size
    with pytest.raises(
        ValueError, match=rf"^{call}: {name} is a masked array with {masked} masked values, .*filled\(0\)"
    ):
        CALLS[call](**given)
    given[name] = list(given[name])  # rows, or numbers and the constant `masked`
    with pytest.raises(ValueError, match=f"{name} is a masked array with {masked} masked values"):
        CALLS[call](**given)


def test_the_proposed_mend_works():
    given = {name: value for name, value in inputs().items() if name in ("embeddings", "labels")}
    embeddings = np.ma.masked_array(given["embeddings"], mask=np.zeros((12, 3), bool))
    embeddings[5, 1] = np.ma.masked
    with pytest.raises(ValueError, match=re.escape("keep = ~np.ma.getmaskarray(embeddings)")):
        evaluate_retrieval(embeddings, given["labels"])
    keep = ~np.ma.getmaskarray(embeddings).reshape(len(embeddings), -1).any(axis=1)
    dropped = evaluate_retrieval(embeddings.data[keep], given["labels"][keep], label_groups=None)
    assert dropped.queries == 11
    assert evaluate_retrieval(embeddings.filled(0), given["labels"], label_groups=None).queries == 12


def test_masked_targets_are_refused():
    targets = np.ma.masked_array(np.eye(3, dtype=int)[[0, 0, 1]], mask=np.eye(3, dtype=bool))
    with pytest.raises(ValueError, match=r"^evaluate_retrieval: labels is a masked array with 3 masked values"):
        evaluate_retrieval(torch.eye(3), targets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_that_are_not_finite_are_found_also_where_their_sum_is_not(dtype):
    largest = torch.finfo(dtype).max
    rows = torch.full((70_000, 2), largest, dtype=dtype)  # more than are looked at at once
    assert non_finite_rows(rows).tolist() == []
    rows[[3, 69_999], 1] = torch.tensor([torch.inf, torch.nan], dtype=dtype)
    rows[5] = -torch.inf
    assert non_finite_rows(rows).tolist() == [3, 5, 69_999]
