"""Binary codes packed to bits, and their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

WORD = 64


@dataclass(frozen=True, eq=False)
class Codes:
    """Packed binary codes."""

    words: Int[Tensor, "items words"]
    """64 bits each; the last bits of the last word are zero where there are fewer"""
    bits: int

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: Tensor) -> Codes:
        """Some of them."""
        return Codes(self.words[index], self.bits)


@dataclass(frozen=True, eq=False)
class HammingScores:
    """Scores of codes: minus the number of bits in which they differ, which is exact."""

    queries: Codes
    gallery: Codes
    """the very codes of the queries for one set"""
    similarity: ClassVar[Literal["hamming"]] = "hamming"
    zero_vectors: ClassVar[tuple[int, int]] = (0, 0)
    longest_item: ClassVar[tuple[int, float]] = (-1, 1.0)

    @staticmethod
    def to_user_score(score: float) -> float:
        """Return the score itself."""
        return score

    @staticmethod
    def to_user_scores(scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the scores themselves."""
        return scores

    @staticmethod
    def to_exact_score(score: float) -> float:
        """Return the score itself."""
        return score


def pack_codes(codes: Tensor, name: str, call: str) -> Codes:
    """Pack codes of two values to one bit for each.

    Args:
        codes: (items, bits) of {0, 1}, {-1, +1} or booleans, of any dtype.
        name: What they are called, for messages.
        call: Who was given them.

    Raises:
        ValueError: For another shape, or values outside the two.
    """
    if codes.ndim != 2 or not codes.shape[0] or not codes.shape[1]:
        raise ValueError(
            f"{call}: {name} have shape {tuple(codes.shape)}; codes are (items, bits), with at least one of each."
        )
    codes = codes.detach().cpu()
    high, zero = codes == 1, codes == 0
    low = codes == -1 if codes.dtype != torch.uint8 else torch.zeros_like(zero)  # torch takes -1 for 255 there
    others = codes[~(high | zero | low)]
    if len(others):
        if codes.dtype == torch.uint8:
            values = codes.unique().tolist()
            shown = " and ".join(map(str, values)) if len(values) == 2 else f"{len(values)} values up to {values[-1]}"
            raise ValueError(
                f"{call}: {name} hold {shown}; binary codes hold 0 and 1. Pass {name} > 0 if each value is a bit, or "
                f"np.unpackbits({name}, axis=1) if each is a byte of 8 bits."
            )
        found = ", ".join(f"{value:g}" for value in others[:3].tolist()) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{call}: binary codes hold -1 and +1, or 0 and 1; {len(others):,} of {codes.numel():,} values of {name} are "
            f"neither ({found}). Pass {name}.sign(), or {name} > 0."
        )
    if bool(zero.any()) and bool(low.any()):
        raise ValueError(f"{call}: {name} hold -1 and 0; binary codes hold -1 and +1, or 0 and 1. Pass {name} > 0.")
    items, bits = codes.shape
    padded = np.zeros((items, math.ceil(bits / WORD) * WORD), bool)
    padded[:, :bits] = high.numpy()
    packed = np.packbits(padded, axis=1, bitorder="little").view("<i8")
    return Codes(torch.from_numpy(packed.copy()), bits)
