"""The counting kernels for CUDA: a tile of scores is made in registers, and compared with the thresholds there.

They give the counts of `pytorch.count`, to the last one. `count_tiles` multiplies two tiles of operands and compares the
estimates with the lowest threshold of each item. Most pairs stay below, and change no counter. The others are listed. A tile
whose pairs no longer fit into the list leaves no trace but its mark in `todo`, and is made again when the list has been
worked off. `place_pairs` does that: it places a pair by its estimate or else by a float64 product, and lists what is still
open.

The search among the thresholds has a separate kernel because one for a whole tile holds 64 estimates, addresses and
float64 thresholds in each thread: compiled for the H100 (sm_90, Triton 3.9), 9 kB of a thread go to memory and back.

Nothing here needs more than Triton 3.2, and all of it runs in Triton's interpreter, which tests it. The interpreter
multiplies in full float32, whatever `input_precision` says. Operands of TF32 products are therefore rounded before
(`sides.to_tf32`): both multiply the same numbers, and differ in the order and the rounding of the sums alone.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, HISTOGRAM = 1, 2, 4
"""What a tile is still to be counted for, in `todo`: its rows, its columns, the pool."""
RESERVED, END, PRODUCTS, LEFT = 0, 1, 2, 3
"""Of a list: entries that were asked for; the first that did not fit; float64 products; pairs that these left open."""


@triton.jit
def _list_side(estimate, candidate, asker, other, lowest, askers, others, estimates, filled, capacity):
    """List the pairs of a tile that reach the lowest threshold of the item along one side; return whether they fitted."""
    listed = (candidate & (estimate >= tl.load(lowest + asker))).to(tl.int32)
    in_row = tl.sum(listed, 1)
    number = tl.sum(in_row, 0)
    position = tl.atomic_add(filled, number, sem="relaxed")
    fits = position + number <= capacity
    if fits & (number > 0):
        before = position + tl.cumsum(in_row, 0) - in_row
        entry = before[:, None] + tl.cumsum(listed, 1) - 1
        tl.store(askers + entry, asker, mask=listed != 0)
        tl.store(others + entry, other, mask=listed != 0)
        tl.store(estimates + entry, estimate, mask=listed != 0)
    if fits == 0:
        tl.atomic_min(filled + 1, position, sem="relaxed")
    return fits


@triton.jit
def count_tiles(
    tiles, todo,
    row_operand, row_shift, row_codes, row_weight, row_lowest, rows,
    column_operand, column_shift, column_codes, column_weight, column_lowest, columns,
    row_list, row_others, row_estimates, row_filled,
    column_list, column_others, column_estimates, column_filled,
    histogram, origin, scale, bins, copies, floor,
    dim, capacity,
    CODES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Make one tile for what `todo` says, and take from there what is done.

    tiles (tiles, 2): which rows and which columns, in units of TILE. todo (tiles,): see `ROWS`.
    Of the rows, and in the same way of the columns: operand (rows, dim); shift (rows,), added to each estimate; codes
    (CODES, rows), where a pair with one equal code is no candidate; weight (rows,), how many equal items each stands for;
    lowest (rows,), an estimate below which surely lies below all thresholds.
    Lists of `capacity` pairs: list, the item that asks; others, its candidate; estimates, of their score; filled (4,), see
    `RESERVED`.
    histogram (copies, bins): of all pairs with estimates from `floor` on, in the bins of a `ScoreGrid`; copies, so that
    few tiles add to one counter at once.
    """
    tile = tl.program_id(0)
    marked = tl.load(todo + tile)
    # a full list takes nothing more: what is multiplied for it would be multiplied again
    due = tl.where(tl.load(row_filled) < capacity, marked & 1, 0)
    due |= tl.where(tl.load(column_filled) < capacity, marked & 2, 0)
    if due != 0:
        row = tl.load(tiles + 2 * tile) * TILE + tl.arange(0, TILE)
        column = tl.load(tiles + 2 * tile + 1) * TILE + tl.arange(0, TILE)
        candidate = (row < rows)[:, None] & (column < columns)[None, :]
        row, column = tl.minimum(row, rows - 1), tl.minimum(column, columns - 1)
        left_at = row_operand + row.to(tl.int64)[:, None] * dim
        right_at = column_operand + column.to(tl.int64)[None, :] * dim
        estimate = tl.zeros((TILE, TILE), tl.float32)
        for start in range(0, dim, CHUNK):
            component = start + tl.arange(0, CHUNK)
            left = tl.load(left_at + component[None, :], mask=(component < dim)[None, :], other=0.0)
            right = tl.load(right_at + component[:, None], mask=(component < dim)[:, None], other=0.0)
            if TF32:
                estimate = tl.dot(left, right, estimate, input_precision="tf32")
            else:
                estimate = tl.dot(left, right, estimate, input_precision="ieee")
        estimate += tl.load(row_shift + row)[:, None]
        estimate += tl.load(column_shift + column)[None, :]
        for code in tl.static_range(CODES):
            one = tl.load(row_codes + code * rows + row)
            other = tl.load(column_codes + code * columns + column)
            candidate = candidate & (one[:, None] != other[None, :])
        done = marked & 4
        if done != 0:
            row_times = tl.load(row_weight + row).to(tl.int64)[:, None]
            column_times = tl.load(column_weight + column)[None, :]
            place = tl.minimum(tl.maximum((estimate - origin) * scale, -1.0), bins - 2.0) + 1.0
            place = tl.maximum(place.to(tl.int32), 1) + (tile % copies) * bins
            both = tl.where((marked & 2) != 0, 2, 1)
            recorded = candidate & (estimate >= floor)
            tl.atomic_add(histogram + place, row_times * column_times * both, mask=recorded, sem="relaxed")
        if (due & 1) != 0:
            fits = _list_side(
                estimate, candidate, row[:, None], column[None, :], row_lowest, row_list, row_others, row_estimates,
                row_filled, capacity,
            )  # fmt: skip
            done |= tl.where(fits, 1, 0)
        if (due & 2) != 0:
            fits = _list_side(
                estimate, candidate, column[None, :], row[:, None], column_lowest, column_list, column_others,
                column_estimates, column_filled, capacity,
            )  # fmt: skip
            done |= tl.where(fits, 2, 0)
        tl.store(todo + tile, marked & ~done)


@triton.jit
def _place(thresholds, hits, width, value, reach, searching, weight, BITS: tl.constexpr):
    """Count pairs whose scores are known up to `reach`; return which are still open.

    Each item has fewer than 2**BITS thresholds, ascending, perhaps padded with infinity.
    """
    beaten = tl.zeros_like(searching.to(tl.int32))
    for bit in tl.static_range(BITS):
        further = beaten + (1 << (BITS - 1 - bit))
        threshold = tl.load(thresholds + further - 1, mask=searching & (further <= width), other=float("inf"))
        beaten = tl.where(threshold + reach < value, further, beaten)
    threshold = tl.load(thresholds + beaten, mask=searching & (beaten < width), other=float("inf"))
    is_open = searching & (threshold - reach <= value)
    tl.atomic_add(hits + beaten, weight, mask=searching & (is_open == 0), sem="relaxed")
    return is_open


@triton.jit
def place_pairs(
    askers, others, estimates, number,
    thresholds, hits, widths, reaches, roundings, operand, other_operand, other_weight, components,
    left, left_others, filled,
    BITS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Place listed pairs by their estimates, else by float64 products of their operands, else list them once more.

    Of the list: askers, others, estimates (number,).
    Of the items that ask: thresholds and hits (items,), the addresses of their thresholds and counters; widths (items,), how
    many thresholds there are; reaches (items,), an estimate further than this from a threshold is surely on its side of it;
    roundings (items,), the same for a float64 product; operand (items, components) in float32.
    Of the others: other_operand, other_weight. Of the pairs that stay open: left, left_others (number,), filled[LEFT].
    """
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < number
    asker, other = tl.load(askers + pair, mask=inside, other=0), tl.load(others + pair, mask=inside, other=0)
    width, weight = tl.load(widths + asker), tl.load(other_weight + other)
    own = tl.load(thresholds + asker).to(tl.pointer_type(tl.float64))
    counters = tl.load(hits + asker).to(tl.pointer_type(tl.int32))
    value = tl.load(estimates + pair, mask=inside, other=0.0).to(tl.float64)
    is_open = _place(own, counters, width, value, tl.load(reaches + asker), inside, weight, BITS)
    products = tl.sum(is_open.to(tl.int32), 0)
    if products > 0:
        value = tl.zeros((PAIRS,), tl.float64)
        for start in range(0, components, CHUNK):
            component = start + tl.arange(0, CHUNK)
            wanted = is_open[:, None] & (component < components)[None, :]
            at = asker.to(tl.int64)[:, None] * components + component[None, :]
            other_at = other.to(tl.int64)[:, None] * components + component[None, :]
            one = tl.load(operand + at, mask=wanted, other=0.0).to(tl.float64)
            two = tl.load(other_operand + other_at, mask=wanted, other=0.0).to(tl.float64)
            value += tl.sum(one * two, 1)
        is_open = _place(own, counters, width, value, tl.load(roundings + asker), is_open, weight, BITS)
        still = is_open.to(tl.int32)
        position = tl.atomic_add(filled + 3, tl.sum(still, 0), sem="relaxed") + tl.cumsum(still, 0) - 1
        tl.store(left + position, asker, mask=is_open)
        tl.store(left_others + position, other, mask=is_open)
        tl.atomic_add(filled + 2, products, sem="relaxed")


@triton.jit
def _add_one(counter):
    tl.atomic_add(counter, 1)


def try_out(device: torch.device) -> None:
    """Raise if Triton cannot compile, or run, a kernel for this device."""
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _add_one[(1,)](counter)
    if int(counter) != 1:
        raise RuntimeError("a kernel that adds 1 to 0 did not return 1")
