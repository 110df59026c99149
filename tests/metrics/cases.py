"""Sets that come to a metric in batches."""

import torch
from hypothesis import strategies as st

NAMES = torch.tensor([0, 3, -7, 2**61, 2**63 - 1, -(2**63)])


@st.composite
def cut_sets(draw):
    """Items with labels and where to cut them into batches, some of them empty."""
    items = draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    labels = NAMES[torch.randint(0, draw(st.integers(1, 6)), (items,), generator=generator)]
    embeddings = torch.randn(items, 3, generator=generator) + draw(st.sampled_from([0.0, 1e4]))
    cuts = sorted(draw(st.lists(st.integers(0, items), max_size=5)))
    return embeddings, labels, list(zip([0, *cuts], [*cuts, items], strict=True))


def fill(metric, embeddings, labels, cuts):
    for start, stop in cuts:
        metric.update(embeddings[start:stop], labels[start:stop])
    return metric


def made(items=40, classes=4):
    generator = torch.Generator().manual_seed(items)
    labels = torch.arange(items) % classes
    centres = torch.randn(classes, 5, generator=generator)
    return centres[labels] + torch.randn(items, 5, generator=generator), labels
