"""Cases that tests of several folders have in common, and how many of a long list of them `make test` runs."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

SHARE = float(os.environ.get("FEWSHOT_EXAMPLES", "1"))
"""Which share of the examples of a property test is drawn: all of them in `make test-all`, a fifth in `make test`."""


def examples(number: int) -> int:
    """How many examples a property test draws in this run: its share of the number, and at least five."""
    return max(min(number, 5), round(number * SHARE))


def sampled_product(*axes: Iterable[Any], count: int, seed: int = 0) -> list[Any]:
    """All combinations; those outside a seeded sample are marked as exhaustive: `make test` runs the sample alone.

    The sample has `count` of them, and is drawn until it holds every value of every axis.
    """
    axes = tuple(tuple(axis) for axis in axes)
    cases = list(itertools.product(*axes))
    for draw in itertools.count(seed):
        chosen = set(random.Random(draw).sample(range(len(cases)), count))
        kept = [cases[i] for i in chosen]
        if all({case[i] for case in kept} == set(axis) for i, axis in enumerate(axes)):
            marks = [[] if i in chosen else [pytest.mark.exhaustive] for i in range(len(cases))]
            return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]
    raise AssertionError("never reached")


def clustered_items(n=600, classes=40, dim=24, noise=1.0, seed=0):
    """Return (n, dim) items around the centres of their classes, and (n,) labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, dim, generator=generator)
    return centres[labels] + noise * torch.randn(n, dim, generator=generator), labels


def first_classes(number: int, images: int = 20) -> Any:
    """A drawing of the glyphs with the first classes of each split, and the first images of each: training takes seconds."""
    from fewshot_callbacks.data.glyphs import SCRIPTS_OF, DrawnGlyphs, load_drawing  # not for tests of the maths

    drawn = load_drawing()
    of_splits = [[c for c, script in enumerate(drawn.scripts) if script in scripts] for scripts in SCRIPTS_OF.values()]
    kept = sorted(c for classes in of_splits for c in classes[:number])
    first = torch.cat([torch.nonzero(drawn.classes == c).flatten()[:images] for c in kept])
    items = torch.zeros(len(drawn.classes), dtype=torch.bool).index_fill(0, first, True)
    return DrawnGlyphs(
        drawn.images[items],
        torch.searchsorted(torch.tensor(kept), drawn.classes[items]),
        drawn.faces[items],
        tuple(drawn.characters[c] for c in kept),
        tuple(drawn.scripts[c] for c in kept),
        drawn.look_alikes,
    )
