"""Fingerprints of weights tell other weights."""

import pytest
import torch
from torch import nn

from fewshot_callbacks.trainer.weights import weight_fingerprints

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def fingerprint(values):
    module = nn.Module()
    module.weight = nn.Parameter(values, requires_grad=False)
    return weight_fingerprints(module)


CHANGES = {
    "one value": lambda w: w.index_fill(0, torch.tensor(3), 0.5),
    "one sign": lambda w: torch.cat([-w[:1], w[1:]]),
    "all signs": lambda w: -w,
    "two exchanged": lambda w: w[[1, 0, *range(2, len(w))]],
    "transposed": lambda w: w.reshape(6, 6).T.reshape(-1),
    "reversed": lambda w: w.flip(0),
    "one bit": lambda w: torch.cat([torch.nextafter(w[:1], w[:1] + 1), w[1:]]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["real", "whole numbers", "ones"])
def test_other_weights_have_another_number(change, dtype, kind):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(36, generator=generator) if kind == "real" else torch.arange(36.0) + 1
    if kind == "ones":
        weights = torch.ones(36)
    weights = weights.to(dtype)
    changed = CHANGES[change](weights.clone())
    same = fingerprint(weights) == fingerprint(changed)
    assert same == torch.equal(weights, changed)


def test_equal_weights_have_one_number():
    weights = torch.randn(5, 7)
    assert fingerprint(weights) == fingerprint(weights.clone())
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0))
