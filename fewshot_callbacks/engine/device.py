"""What observers do with a tile that is a tensor on a device: the same counts, by PyTorch operations.

Products, thresholds, lists and counters stay on the device; what comes to the CPU are the pairs whose estimates lie too
close to a threshold, which the compiled loops decide, and pairs that were collected. Any device of PyTorch will do, the
CPU too. Tiles are large, since each waits a few times for the device to say how many pairs something concerns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.compiled import kernel
from fewshot_callbacks.engine.counting import Side, View, place_by_score
from fewshot_callbacks.engine.exact import workspace
from fewshot_callbacks.engine.options import split, work_off
from fewshot_callbacks.engine.relevance import Lists, Relevance

# One in so many estimates of the queries that are looked at may pass for only those that pass to be placed.
SURVIVING = 8
# Share of a tile, and number of its pairs, that something is made of at once: up to five numbers of 8 bytes for each.
SHARE, AT_ONCE = 4, 2**24


def together(pairs: int) -> int:
    """Return for how many pairs of a tile something is made at once."""
    return max(1, min(AT_ONCE, pairs // SHARE))


class Masks:
    """Who is no negative, on a device.

    Args:
        relevance: Of all pairs.
        on: The device.
    """

    def __init__(self, relevance: Relevance, on: torch.device) -> None:
        self._on, self._own = on, relevance.own
        self._lists = [self._keyed(lists) for lists in (relevance.relevant, relevance.ignored) if lists.sizes.any()]
        self._codes = [tuple(torch.from_numpy(side).to(on) for side in pair) for pair in relevance.numbered]

    def _keyed(self, lists: Lists) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the items of lists, these as ascending keys (number of the list, item), and the number of each query's."""
        ends = np.unique(np.concatenate((lists.start, lists.stop)))
        span, some = int(lists.items.max()) + 1, lists.sizes > 0
        begun = np.bincount(np.unique(lists.start[some]), minlength=len(lists.items) + 1)
        inside = np.cumsum(begun - np.bincount(np.unique(lists.stop[some]), minlength=len(begun)))[:-1] > 0
        number = np.searchsorted(ends, np.arange(len(lists.items)), side="right")
        keys = number * span + np.where(inside, lists.items, 0)  # what is in no list is not ascending
        numbers = np.where(some, np.searchsorted(ends, lists.start, side="right"), -1)
        items, keys_there, numbers_there = (
            torch.from_numpy(each).to(self._on) for each in (lists.items, keys, numbers)
        )
        return items, keys_there, numbers_there, span

    def write(self, flat: Tensor, shape: tuple[int, int], row: int, column: int, *, once: bool) -> int:
        """Write -inf over the pairs of a tile that are no negatives; return how many negatives are left.

        Args:
            flat: Begins with the estimates of the tile, and ends with -inf.
            shape: Rows and columns of the tile.
            row: The query of its first row.
            column: The item of its first column.
            once: A pair of one set is met with the smaller number as the query.
        """
        height, width = shape
        estimates, masked = flat[: height * width].view(shape), torch.zeros((), dtype=torch.int64, device=self._on)
        itself, left = self._own[row : row + height].astype(np.int64) - column, height * width
        if once and itself.max(initial=-1) >= 0:
            left -= int((itself + 1).clip(0, width).sum())
            there = torch.from_numpy(itself).to(self._on)[:, None]
            estimates.masked_fill_(torch.arange(width, device=self._on) <= there, -torch.inf)
        elif not once:
            (rows,) = np.nonzero((itself >= 0) & (itself < width))
            left -= len(rows)
            flat[torch.from_numpy(rows * width + itself[rows]).to(self._on)] = -torch.inf
        for positions in self._positions(shape, row, column, len(flat) - 1):
            masked += (flat[positions] > -torch.inf).sum()
            flat[positions] = -torch.inf
        for of_queries, of_items in self._codes:
            equal = of_queries[row : row + height, None] == of_items[column : column + width]
            masked += (equal & (estimates > -torch.inf)).sum()
            estimates.masked_fill_(equal, -torch.inf)
        return left - int(masked)

    def _positions(self, shape: tuple[int, int], row: int, column: int, nowhere: int) -> Iterator[Tensor]:
        """Yield where the items of the lists stand in a tile, among places that stand for none."""
        height, width = shape
        for items, keys, numbers, span in self._lists:
            first = numbers[row : row + height] * span
            begin, end = (torch.searchsorted(keys, first + min(at, span)) for at in (column, column + width))
            longest = int((end - begin).max())
            rows = torch.arange(height, device=self._on)
            for some in rows.split(max(1, together(height * width) // longest)) if longest else ():
                at = begin[some, None] + torch.arange(longest, device=self._on)
                stands = some[:, None] * width + items[at.clamp(max=len(items) - 1)] - column
                yield torch.where(at < end[some, None], stands, nowhere).view(-1)


class Placing:
    """The thresholds of some queries on a device, and counters as those of a `Side`, which it completes.

    Args:
        side: The thresholds; counts of pairs that come to the CPU are added to its counters.
        on: The device.
        shared: The one list is that of all queries.
        threads: That decide what comes to the CPU.
    """

    def __init__(self, side: Side, on: torch.device, *, shared: bool, threads: int) -> None:
        self._side, self._on, self._shared, self._threads = side, on, shared, 1 if shared else threads
        dtype = torch.float64 if side.origin.dtype == np.float64 else torch.float32
        self._start = torch.from_numpy(side.start).to(on)
        thresholds = torch.from_numpy(side.thresholds).to(on)
        margin = torch.from_numpy(side.margin).to(on).repeat_interleave(self._start.diff())
        # an estimate below `low` is surely below a threshold, one above `high` above it: rounded outwards
        low, high = (thresholds - margin).to(dtype), (thresholds + margin).to(dtype)
        low = low.where(low <= thresholds - margin, low.nextafter(torch.full_like(low, -torch.inf)))
        high = high.where(high >= thresholds + margin, high.nextafter(torch.full_like(high, torch.inf)))
        self._low, self._high = (torch.cat((each, each.new_full((1,), torch.inf))) for each in (low, high))
        # of a threshold beyond float32 too, since -inf stands for what is no negative
        lowest = self._low[self._start[:-1]].clamp(min=torch.finfo(dtype).min)
        self._lowest = lowest.where(self._start.diff() > 0, torch.inf)
        self._hits = torch.zeros(len(side.hits), dtype=torch.int64, device=on)

    def count(self, view: View, pairs: Any) -> None:
        """Place every candidate of a view among the thresholds of its query, as `count_tile` does."""
        estimates = (view.estimates.T if view.turned else view.estimates)[view.start : view.stop]
        queries = view.query + torch.arange(view.start, view.stop, device=self._on)
        lists = torch.zeros_like(queries) if self._shared else queries
        some = (estimates.amax(1) >= self._lowest[lists]).nonzero()[:, 0]
        room = together(estimates.numel())
        for rows in some.split(max(1, room // estimates.shape[1])) if len(some) else ():
            for r, c, values in self._place(estimates.index_select(0, rows), lists[rows], room):
                at = (queries[rows[r]].cpu().numpy(), view.item + c.cpu().numpy(), values.double().cpu().numpy())
                self._decide(*at, pairs)

    def _place(self, estimates: Tensor, lists: Tensor, room: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Count the candidates of some queries with these lists; yield rows, columns and estimates of open pairs."""
        passing, last = estimates >= self._lowest[lists, None], len(self._hits)
        if self._shared:
            below = torch.searchsorted(self._high[:-1], estimates)
            opened = passing & (self._low[below] <= estimates)
            self._hits += torch.bincount(below.where(passing & ~opened, last).view(-1), minlength=last + 1)[:-1]
        elif int(passing.sum()) * SURVIVING > estimates.numel():
            opened = torch.zeros_like(passing)
            most = 1 + int((self._start[lists + 1] - self._start[lists]).max())
            for rows in torch.arange(len(lists), device=self._on).split(max(1, room // most)):
                low, high, counters = self._tables(lists[rows])
                below = torch.searchsorted(high, estimates[rows])
                opened[rows] = passing[rows] & (low.gather(1, below) <= estimates[rows])
                sure = (passing[rows] & ~opened[rows]).int()
                hits = torch.zeros(high.shape, dtype=torch.int32, device=self._on).scatter_add_(1, below, sure)
                self._hits.index_add_(0, counters.view(-1), hits.view(-1).long())
        else:
            for some in passing.nonzero().split(room):
                r, c = some.unbind(1)
                values, list_of = estimates[r, c], lists[r]
                below = self._below(values, list_of)
                near = (self._low[below] <= values) & (below < self._start[list_of + 1])
                sure = (below + list_of)[~near]
                self._hits.index_add_(0, sure, torch.ones_like(sure))
                yield r[near], c[near], values[near]
            return
        r, c = opened.nonzero(as_tuple=True)
        yield r, c, estimates[r, c]

    def _below(self, values: Tensor, lists: Tensor) -> Tensor:
        """Return where the first threshold stands in the list of each value that it is not surely above."""
        low, high = self._start[lists], self._start[lists + 1]
        for _ in range(int((high - low).max()).bit_length() if len(lists) else 0):
            middle = (low + high) >> 1
            above = (self._high[middle] < values) & (low < high)
            low, high = torch.where(above, middle + 1, low), torch.where(above, high, middle)
        return low

    def _tables(self, lists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return low and high ends of the thresholds of some queries, padded with +inf, and where their counters are."""
        start, stop = self._start[lists, None], self._start[lists + 1, None]
        at = start + torch.arange(int((stop - start).max()) + 1, device=self._on)
        valid = at < stop
        at = at.minimum(stop)
        low, high = (each[at].where(valid, torch.inf) for each in (self._low, self._high))
        return low, high, at + lists[:, None]

    def _decide(self, rows: NDArray[Any], columns: NDArray[Any], values: NDArray[Any], pairs: Any) -> None:
        """Place pairs, which are ordered by their queries, by their scores."""
        last = [some.stop - 1 for some in split(len(rows), max(2**12, len(rows) // (4 * self._threads) + 1))]
        # the counters of a query belong to one thread
        ends = [0, len(rows)] if self._shared else [0, *np.searchsorted(rows, rows[last], side="right").tolist()]

        def decide(span: tuple[int, int], work: NDArray[Any]) -> None:
            some = slice(*span)
            _place_open(rows[some], columns[some], values[some], self._side, self._shared, pairs, work)

        work_off([span for span in pairwise(ends) if span[0] < span[1]], decide, self._threads, workspace)

    def add_counters(self) -> None:
        """Add what was counted on the device to the counters of the side."""
        np.add(self._side.hits, self._hits.cpu().numpy(), out=self._side.hits, casting="same_kind")
        self._hits.zero_()


@kernel
def _place_open(rows, columns, estimates, side, shared, pairs, work):
    for p in range(rows.shape[0]):
        i = rows[p]
        s = 0 if shared else i
        start, number = side.start[s], side.start[s + 1] - side.start[s]
        thresholds = side.thresholds[start : start + number]
        hits, ties = side.hits[start + s : start + s + number + 1], side.ties[start + s : start + s + number + 1]
        place_by_score(pairs, i, columns[p], estimates[p], thresholds, hits, ties, work)


def collect(estimates: Tensor, cut: float) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Yield the estimates of a tile that reach a cut, with their rows and columns."""
    some = (estimates.amax(1) >= cut).nonzero()[:, 0]
    for rows in some.split(max(1, together(estimates.numel()) // estimates.shape[1])) if len(some) else ():
        looked_at = estimates.index_select(0, rows)
        r, c = (looked_at >= cut).nonzero(as_tuple=True)
        yield looked_at[r, c].cpu().numpy(), rows[r].cpu().numpy(), c.cpu().numpy()


def fill_histogram(estimates: Tensor, histogram: NDArray[Any], origin: float, scale: float) -> None:
    """Add the estimates of a tile to a histogram, in the bins of `counting.bin_of`."""
    first, by = (torch.tensor(number, dtype=estimates.dtype, device=estimates.device) for number in (origin, scale))
    for some in estimates.split(max(1, together(estimates.numel()) // estimates.shape[1])):
        position = ((some - first) * by).float().clamp(-1, len(histogram) - 2).int() + 1
        histogram += torch.bincount(position.view(-1), minlength=len(histogram)).cpu().numpy()


# ---------------------------------------------------------------------------------------------------------------- products


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Return in `out` the products of all pairs of rows; halves are summed up in float32."""
    if left.dtype == out.dtype:
        return torch.mm(left, right.T, out=out)
    if multiplies_halves(out.device):
        return torch.mm(left, right.T, out_dtype=out.dtype, out=out)
    return torch.mm(left.to(out.dtype), right.T.to(out.dtype), out=out)


@functools.cache
def multiplies_halves(on: torch.device) -> bool:
    """Return whether a device sums up products of halves in float32: CUDA, from torch 2.8 on."""
    halves, out = torch.ones(16, 16, dtype=torch.float16, device=on), torch.empty(16, 16, device=on)
    try:
        return on.type == "cuda" and bool((torch.mm(halves, halves, out_dtype=out.dtype, out=out) == 16).all())
    except (TypeError, RuntimeError):
        return False
