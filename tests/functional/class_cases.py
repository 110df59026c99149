"""Sets of embeddings and labels for the ratios of scatters: ordinary ones, small ones, and ones at the ends of a dtype."""

from fractions import Fraction

import torch
from hypothesis import strategies as st

LABEL_VALUES = st.sampled_from([0, 1, 2, 3, -1, -7, 2**24, 2**24 + 1, 2**61, 2**61 + 1, -(2**62), 2**63 - 1, -(2**63)])


def clustered_items(items=60, classes=5, dim=8, dtype=torch.float64):
    """Return (items, dim) embeddings around the centres of their classes, and (items,) labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(items) % classes
    centres = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    return (centres[labels] + torch.randn(items, dim, generator=generator, dtype=torch.float64)).to(dtype), labels


@st.composite
def batches(draw, dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64)):
    """Small batches on a grid, so that equal rows, collapsed classes and singletons occur; labels of any value."""
    items, dim = draw(st.integers(1, 10)), draw(st.integers(1, 4))
    values = draw(st.lists(st.integers(-4, 4), min_size=items * dim, max_size=items * dim))
    labels = draw(st.lists(LABEL_VALUES, min_size=items, max_size=items))
    return torch.tensor(values).view(items, dim).to(draw(st.sampled_from(dtypes))) / 2, torch.tensor(labels)


@st.composite
def extreme_sets(draw):
    """Random classes at any scale and offset, perhaps with a huge item that is alone in its class, or is not."""
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    items, classes, dim = draw(st.integers(2, 14)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    labels = torch.randint(0, classes, (items,), generator=generator)
    embeddings = torch.randn(classes, dim, generator=generator, dtype=torch.float64)[labels]
    embeddings += draw(st.sampled_from([0.0, 0.1, 1.0])) * torch.randn(embeddings.shape, generator=generator)
    embeddings += draw(st.sampled_from([0.0, 1.0, 1e3, 1e7, -1e12]))
    # float64 embeddings need squares of which float64 knows nothing
    widest = 290 if dtype == torch.float64 else 30
    exponents = [-widest, -8, 0, 3] if dtype == torch.float16 else [-widest, -30, -8, 0, 18, 30, widest]
    embeddings *= 10.0 ** draw(st.sampled_from(exponents))
    embeddings = embeddings.to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    outlier = draw(st.sampled_from([None, 1e3, 1e10, "largest"]))
    if outlier is not None:
        place = draw(st.integers(0, items - 1))
        limit = 1e300 if dtype == torch.float64 else torch.finfo(dtype).max
        embeddings[place] = limit if outlier == "largest" else min(outlier * embeddings.abs().max().item(), limit)
        labels[place] = draw(st.sampled_from([99, int(labels[place])]))
    order = torch.randperm(items, generator=generator)
    return embeddings[order], labels[order]


def exact_scatters(embeddings, labels, skip_singletons=False):
    """Sizes of the classes, and the scatter within them and that of all items in rational arithmetic, without a rounding."""
    members = {}
    for row, label in zip(embeddings.tolist(), labels.tolist(), strict=True):
        members.setdefault(label, []).append([Fraction(x) for x in row])
    classes = [own for own in members.values() if len(own) > skip_singletons]

    def scatter(rows):
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        return sum((x - m) ** 2 for row in rows for x, m in zip(row, means, strict=True))

    return [len(own) for own in classes], sum(map(scatter, classes)), scatter([row for own in classes for row in own])
