"""One side of the score matrix: its rows, and the data of each row that products and exact scores need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.budget import rows_at_once
from fewshot_callbacks.engine.scores import exact


class ChosenRows(NamedTuple):
    """Some rows in float64 and what belongs to each; all fields have the shape of the indices that chose them."""

    values: Float[Tensor, "*index dim"]
    scale: Float[Tensor, "*index"]
    factor: Float[Tensor, "*index"]
    square: Float[Tensor, "*index"]
    square_low: Float[Tensor, "*index"]

    def at(self, position: tuple[int, ...], shape: torch.Size) -> ChosenRows:
        """Return the row at one position of the broadcast shape."""
        values, *others = self
        return ChosenRows(
            values.expand(*shape, values.shape[-1])[position], *(field.expand(shape)[position] for field in others)
        )


@dataclass(frozen=True, eq=False)
class Vectors:
    """The rows of one side of the score matrix, and their scales and norms."""

    rows: Float[Tensor, "items dim"]
    """where they are stored, which may be another device than that of the scores"""
    scale: Float[Tensor, "items"]
    """powers of two; a row divided by its scale has its largest component in [1, 2)"""
    factor: Float[Tensor, "items"]
    """what a scaled row is multiplied by, so that products are scores"""
    square: Float[Tensor, "items"]
    """squared norm of the scaled row, rounded to float64"""
    square_low: Float[Tensor, "items"]
    """the part of it that this rounding left out"""
    norm: Float[Tensor, "items"]
    """norm in the unit of the scores; for cosines, that of the scaled row"""
    centred_norm: Float[Tensor, "items"]
    """distance to the centre in the unit of the scores, rounded up; the norm where nothing is centred"""
    device: torch.device
    """where scores are computed; all fields but the rows lie there"""

    def chosen(self, index: Int[Tensor, "some"]) -> Float[Tensor, "some dim"]:
        """Return a copy of some rows, on the device of the scores."""
        if self.rows.device == self.device:
            return self.rows.index_select(0, index)
        stored = index.to(self.rows.device)
        if self.device.type != "cuda":
            return self.rows[stored].to(self.device)
        # pinned memory lets the copy run beside other work of the device
        buffer = torch.empty((len(stored), self.rows.shape[1]), dtype=self.rows.dtype, pin_memory=True)
        return torch.index_select(self.rows, 0, stored, out=buffer).to(self.device, non_blocking=True)

    def scaled(self, index: Int[Tensor, "some"], dtype: torch.dtype) -> Float[Tensor, "some dim"]:
        """Return some rows divided by their scales, which are powers of two, so that only the conversion rounds."""
        rows, scale = self.chosen(index), self.scale[index]
        # float32 does not hold every scale; one that it lacks would turn its row into zeros or infinities
        wide = rows.dtype == torch.float64 or bool(((scale < 2.0**-100) | (scale > 2.0**100)).any())
        rows = rows.double() if wide else rows.float()
        return rows.div_(scale.to(rows.dtype).unsqueeze(1)).to(dtype)  # `chosen` made a copy

    def in_double(self, index: Int[Tensor, "*index"]) -> ChosenRows:
        """Return some rows in float64, with the shape of their indices."""
        values = self.chosen(index.flatten()).double().unflatten(0, index.shape)
        return ChosenRows(
            values, self.scale[index], self.factor[index], self.square[index], self.square_low[index]
        )  # fmt: skip

    def centred(self, centre: Float[Tensor, "dim"], unit: float) -> Vectors:
        """Return the same vectors with their distances to the centre, over `unit`."""
        lengths = []
        for index in torch.arange(len(self.rows), device=self.device).split(rows_at_once(self.rows)):
            rows = self.chosen(index).double()
            # a little more than the sum, which rounds
            lengths.append(((rows - centre) / unit).square().sum(dim=1).sqrt() * (1 + 1e-9))
        return replace(self, centred_norm=torch.cat(lengths))


def row_scales(rows: Float[Tensor, "items dim"], of_zeros: float, device: torch.device) -> Float[Tensor, "items"]:
    """Return for each row the largest power of two not above its largest component; `of_zeros` for a row of zeros."""
    largest = torch.cat([some.abs().amax(dim=1).double() for some in rows.split(rows_at_once(rows))]).to(device)
    mantissa, _ = torch.frexp(largest)
    # exact, unlike torch.ldexp, whose power of two is a float32
    return torch.where(largest == 0, of_zeros, largest / (2 * mantissa))


def scaled_squares(
    rows: Float[Tensor, "items dim"],
    scale: Float[Tensor, "items"],
    compiled: ModuleType | None,
    device: torch.device,
) -> exact.Sum:
    """Return the squared norms of the scaled rows as high + low, in about 106 bits.

    The sum with its rounding errors takes PyTorch about sixty times as long as the compiled kernel, a third of a second
    for 8,000 rows of 512 components: the one linear step that is compiled as well.
    """
    single = rows.dtype != torch.float64
    if compiled is not None:
        out = torch.empty(2, len(rows), dtype=torch.float64)
        compiled.squares(rows.numpy(), 1 / scale.numpy(), single, *out.numpy())
        return out[0], out[1]
    parts = []
    for some, of_row in zip(rows.split(rows_at_once(rows)), scale.split(rows_at_once(rows)), strict=True):
        values = some.to(device).double() / of_row.unsqueeze(1)
        parts.append(exact.dot(values, values, single=single)[:2])
    high, low = (torch.cat(part) for part in zip(*parts, strict=True))
    return high, low
