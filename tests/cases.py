"""Cases that tests of several folders have in common, and how many of a long list of them `make test` runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch


def sampled(cases: Iterable[Any], count: int, seed: int = 0) -> list[Any]:
    """Mark all cases but a seeded sample as exhaustive: `make test` runs the sample, `make test-all` every case.

    Args:
        cases: the parameters of each case; a tuple stands for several.
        count: how many are in the sample.
        seed: of the sample.
    """
    cases = list(cases)
    chosen = set(random.Random(seed).sample(range(len(cases)), count))
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.exhaustive] * (i not in chosen)
        )
        for i, case in enumerate(cases)
    ]


def sampled_product(*axes: Iterable[Any], count: int, seed: int = 0) -> list[Any]:
    """A `sampled` of all combinations, whose sample holds every value of every axis: it is drawn until it does."""
    axes = tuple(tuple(axis) for axis in axes)
    cases = list(itertools.product(*axes))
    for draw in itertools.count(seed):
        found = sampled(cases, count, draw)
        kept = [case.values for case in found if not case.marks]
        if all({case[i] for case in kept} == set(axis) for i, axis in enumerate(axes)):
            return found
    raise AssertionError("never reached")


def made(n=600, classes=40, dim=24, noise=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, dim, generator=generator)
    return centres[labels] + noise * torch.randn(n, dim, generator=generator), labels
