"""Cases that are hard on an engine, and settings that send small data along the paths of large data."""

import numpy as np
import torch
from hypothesis import strategies as st

from tests.cases import clustered_items

SIMILARITIES = ("cosine", "dot", "euclidean")
PRECISIONS = ("int8", "float16", "float32", "float64")


@st.composite
def engines(draw):
    """Options that send small data along the roads of large data; all of them are to give the same."""
    height = draw(st.sampled_from([None, 1, 5, 16, 17, 64]))
    return {
        "precision": draw(st.sampled_from([None, *PRECISIONS])),
        "height": height,
        "width": None if height is None else height * draw(st.sampled_from([1, 3])),
        "batch_counters": draw(st.sampled_from([None, None, 1, 40])),
        "grid_size": draw(st.sampled_from([None, None, 2, 20])),
        "buffer_pairs": draw(st.sampled_from([None, None, 4, 60])),
        "threads": draw(st.sampled_from([1, 2, 3])),
        "as_on_device": draw(st.sampled_from([False, False, True])),
    }


def vectors(kind, n, dim, seed=0, *, gallery=False):
    """Rows that are hard on an engine: they tie, vanish, cancel or span all magnitudes."""
    rng = np.random.default_rng(2 * seed + gallery)
    normal = rng.normal(size=(n, dim))
    if kind == "grid":
        normal = rng.integers(-1, 2, (n, dim))
    elif kind == "codes":
        normal = rng.choice([-1.0, 1.0], (n, dim))
    elif kind == "equal":
        normal = np.full((n, dim), 0.3)
    elif kind == "repeated":
        normal = np.random.default_rng(seed).normal(size=(7, dim))[rng.integers(0, 7, n)]
    elif kind == "some-equal":
        normal[::9] = normal[0]
    elif kind == "denormal":
        normal = rng.integers(-3, 4, (n, dim)) * 1e-40
    elif kind == "negative-zero":
        normal = rng.choice([0.0, -0.0, 1.0], (n, dim))
    elif kind == "negative":  # with two sets every product is negative
        normal = np.abs(normal) * (-1 if gallery else 1)
    elif kind == "zeros":
        normal[rng.random(n) < 0.4] = 0
    elif kind == "mixed":
        normal = normal * 10.0 ** rng.uniform(-6, 6, (n, 1))
    elif kind == "spiked":  # one component beside which all others are rounded away
        normal[np.arange(n), rng.integers(0, dim, n)] = 1e7
    elif kind == "offset":
        normal = normal + 1000
    elif kind == "near-collapsed":
        normal = np.random.default_rng(seed).normal(size=(1, dim)) + 1.5e-4 * 10.0 ** -(seed % 13) * normal
        normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    elif kind == "tiny":
        normal = normal * 1e-30
    elif kind == "wide":  # every component has a magnitude of its own
        normal *= 10.0 ** rng.uniform(-18, 18, (n, dim))
    elif kind == "outlier":
        normal[0] = 3e38
    elif kind == "cancelling":  # rows whose halves agree are orthogonal to others, up to their last bits
        half = dim // 2
        normal[:, :half] *= 10.0 ** rng.uniform(-8, 8, (n, half))
        normal[::2, half : 2 * half] = normal[::2, :half]
        normal[1::2, half : 2 * half] = -normal[1::2, :half] * (1 + 1e-7 * (rng.random((n // 2, half)) < 0.3))
    return normal


KINDS = (
    "real", "grid", "codes", "equal", "repeated", "some-equal", "denormal", "negative-zero", "negative", "zeros", "mixed",
    "spiked", "offset", "near-collapsed", "tiny", "wide", "outlier", "cancelling",
)  # fmt: skip


def labels_of(kind, n, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "one-class":
        return np.zeros(n, np.int64)
    if kind == "one-pair":  # all others are alone
        return np.maximum(np.arange(n), 1)
    if kind == "pairs":
        return np.arange(n) // 2
    if kind == "all-but-one":
        return (np.arange(n) == n - 1).astype(np.int64)
    if kind == "uneven":  # with some that are alone
        return np.minimum(rng.geometric(0.2, n), 30) * np.where(rng.random(n) < 0.1, rng.integers(50, 10**6, n), 1)
    return rng.integers(0, 6, n)


LABELS = ("one-class", "one-pair", "pairs", "all-but-one", "uneven", "few")


@st.composite
def cases(draw):
    seed, kind, of_labels = draw(st.integers(0, 2**31)), draw(st.sampled_from(KINDS)), draw(st.sampled_from(LABELS))
    n, dim = draw(st.integers(2, 90)), draw(st.sampled_from([1, 2, 3, 16, 130]))
    dtype = draw(st.sampled_from([np.float32, np.float32, np.float64]))
    similarity = draw(st.sampled_from((*SIMILARITIES, "hamming")))
    if similarity == "hamming":
        kind, dtype = "codes", np.int8
    rng = np.random.default_rng(seed)
    queries = vectors(kind, n, dim, seed).astype(dtype)
    case = {"queries": queries, "query_labels": labels_of(of_labels, n, seed), "similarity": similarity}
    form = draw(st.sampled_from(["one", "one", "one-with-groups", "two", "two-with-ids", "two-with-both"]))
    if form == "one-with-groups":
        case["query_groups"] = rng.integers(0, 20, n)
    if form.startswith("two"):
        m = draw(st.sampled_from([1, 2, 33, 90]))
        case["gallery"] = vectors(kind, m, dim, seed, gallery=True).astype(dtype)
        case["gallery_labels"] = labels_of(of_labels, m, seed + 1)
        if form != "two":
            case |= {"query_ids": rng.permutation(n + m)[:n], "gallery_ids": rng.permutation(n + m)[:m]}
        if form == "two-with-both":
            case |= {"query_groups": rng.integers(0, 20, n), "gallery_groups": rng.integers(0, 20, m)}
    return {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in case.items()}


def pooled_case(kind, similarity, n=150, classes=10):
    labels = torch.arange(n) % classes
    if kind in ("separated", "hard"):
        queries = clustered_items(n, classes, 12, noise=0.5 if kind == "separated" else 2.0)[0]
    elif kind == "few-values":  # positives and negatives tie
        queries = (torch.nn.functional.one_hot(labels, 12).float() + 0.45 * torch.randn(n, 12)).round()
    else:
        queries = torch.from_numpy(vectors(kind, n, 12).astype(np.float32))
    return {"queries": queries, "query_labels": labels, "similarity": similarity}


POOLED = ("separated", "hard", "few-values", "codes", "equal", "repeated", "near-collapsed", "mixed", "zeros")
