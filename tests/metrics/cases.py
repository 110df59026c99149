"""Sets that come to a metric in batches."""

import copy
import pickle

import torch
from hypothesis import strategies as st

LABEL_VALUES = torch.tensor([0, 3, -7, 2**61, 2**63 - 1, -(2**63)])


@st.composite
def cut_sets(draw):
    """Draw items with labels, and the bounds of batches, some of them empty."""
    items = draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    labels = LABEL_VALUES[torch.randint(0, draw(st.integers(1, 6)), (items,), generator=generator)]
    embeddings = torch.randn(items, 3, generator=generator) + draw(st.sampled_from([0.0, 1e4]))
    cuts = sorted(draw(st.lists(st.integers(0, items), max_size=5)))
    return embeddings, labels, list(zip([0, *cuts], [*cuts, items], strict=True))


def fill(metric, embeddings, labels, cuts):
    for start, stop in cuts:
        metric.update(embeddings[start:stop], labels[start:stop])
    return metric


def clustered_items(items=40, classes=4):
    generator = torch.Generator().manual_seed(items)
    labels = torch.arange(items) % classes
    centres = torch.randn(classes, 5, generator=generator)
    return centres[labels] + torch.randn(items, 5, generator=generator), labels


def reloaded(metric):
    """Return a metric with the state of another one, through a state dictionary as in a checkpoint."""
    other = metric.clone()
    other.reset()
    for each in (metric, other):
        each.persistent(True)
    other.load_state_dict(metric.state_dict())
    return other


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda metric: pickle.loads(pickle.dumps(metric))}
WRONG_BATCHES = [
    (torch.ones(4), torch.arange(4), ("(4,)", "(items, dim)", "embeddings[None]")),
    (torch.ones(4, 2, 2), torch.arange(4), ("(4, 2, 2)", "(items, dim)", "embeddings.flatten(1)")),
    (torch.ones(4, 2), torch.ones(4), ("torch.float32", "integer", "labels.long()")),
    (torch.ones(4, 2), torch.arange(3), (4, "embeddings", 3, "labels")),
]
"""Batches that no metric takes, and the facts of the message beside the name of the metric."""
