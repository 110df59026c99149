"""Reports of several processes, each with a part of the items."""

import warnings

import numpy as np
import torch

from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.items import Share
from tests.reports import assert_same
from tests.thread_processes import in_threads


def reports_of(parts, sets, gallery_parts=(), **options):
    """The reports of processes that hold these parts of queries and gallery, given as arguments by name."""

    def work(processes):
        own = parts[processes.rank]
        arguments, places = {}, [own]
        if "gallery" in sets:
            places.append(gallery_parts[processes.rank])
        for name, tensor in sets.items():
            arguments[name] = tensor[places[-1] if name.startswith("gallery") else own]
        return evaluate_retrieval(**arguments, share=Share(processes, *places), **options)

    return in_threads(len(parts), work)


def spread(items, count, seed):
    """Some items for each process, in no order; uneven, and perhaps none for some."""
    generator = np.random.default_rng(seed)
    owner = generator.choice(count, size=items, p=generator.dirichlet(np.full(count, 0.7)))
    return [torch.from_numpy(generator.permutation(np.flatnonzero(owner == rank))) for rank in range(count)]


def outcome(work):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return work()
        except ValueError as error:
            return error


def assert_like_one(parts, sets, gallery_parts=(), **options):
    """Every process has the report of one, or its error."""
    alone = outcome(lambda: evaluate_retrieval(**sets, **options))
    for other in outcome(lambda: reports_of(parts, sets, gallery_parts, **options)):
        if isinstance(alone, ValueError):
            assert isinstance(other, ValueError), other
            assert str(other) == str(alone)
        else:
            assert_same(alone, other)
    return alone
