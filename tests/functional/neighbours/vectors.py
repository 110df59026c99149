"""Vectors with many ties, whose scores loops in float64 compute exactly."""

import torch

FOUR = ("cosine", "dot", "euclidean", "hamming")


def whole_numbers(n, dim, similarity, seed, dtype=torch.float32):
    """Rows of small whole numbers, or codes."""
    generator = torch.Generator().manual_seed(seed)
    if similarity == "hamming":
        return torch.randint(0, 2, (n, dim), generator=generator) * 2 - 1
    return torch.randint(-2, 3, (n, dim), generator=generator).to(dtype)
