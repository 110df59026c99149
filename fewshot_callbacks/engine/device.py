"""What observers do with a tile that is a tensor on a device: the same counts, by PyTorch operations.

Products stay on the device; what comes to the CPU are counters, the pairs whose estimates lie too close to a
threshold, which the compiled loops decide, and pairs that were collected. Any device of PyTorch will do, the CPU too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.compiled import kernel
from fewshot_callbacks.engine.counting import Side, View, place_by_score
from fewshot_callbacks.engine.exact import Pairs
from fewshot_callbacks.engine.relevance import Relevance, place

# One in so many estimates may reach the lowest threshold of its query for only these to be looked at.
SURVIVING = 8
# Thresholds that are gathered at once for pairs that are looked at.
GATHERED = 2**24


def mask(estimates: Tensor, relevance: Relevance, row: int, column: int, *, once: bool) -> int:
    """Write -inf over the pairs of a tile that are no negatives; return how many negatives are left."""
    height, width = estimates.shape
    positions = []
    for lists in (relevance.relevant, relevance.ignored):
        starts, stops = lists.start[row : row + height], lists.stop[row : row + height]
        out = np.empty(int((stops - starts).sum()), np.int64)
        positions.append(out[: _positions(starts, stops, lists.items, column, width, out)])
    estimates.view(-1)[torch.from_numpy(np.concatenate(positions)).to(estimates.device)] = -torch.inf
    itself = torch.from_numpy(relevance.own[row : row + height] - column).to(estimates.device)[:, None]
    here = torch.arange(width, device=estimates.device)
    estimates.masked_fill_(here <= itself if once else here == itself, -torch.inf)
    for of_queries, of_items in relevance.numbered:
        left = torch.from_numpy(of_queries[row : row + height]).to(estimates.device)
        right = torch.from_numpy(of_items[column : column + width]).to(estimates.device)
        estimates.masked_fill_(left[:, None] == right, -torch.inf)
    return int((estimates > -torch.inf).sum())


@kernel
def _positions(start, stop, items, column, width, out):
    """List where the items of lists stand in a tile, row after row; return how many there are."""
    filled = 0
    for r in range(start.shape[0]):
        at = place(items, start[r], stop[r], column)
        while at < stop[r] and items[at] < column + width:
            out[filled] = r * width + items[at] - column
            filled += 1
            at += 1
    return filled


def count(view: View, side: Side, shared: bool, pairs: Pairs, *work: Any) -> None:
    """Place every candidate of a view among the thresholds of its query, as `count_tile` does."""
    estimates, first_row, first_column = view.estimates, view.query + view.start, view.item
    # a search warns of a turned tile that is not contiguous
    estimates = (estimates.T if view.turned else estimates)[view.start : view.stop].contiguous()
    rows = np.zeros(1, np.int64) if shared else np.arange(first_row, first_row + len(estimates))
    thresholds, margin = _padded(side, rows, estimates)
    if thresholds.shape[1] == 0:
        return
    passing = estimates >= thresholds[:, :1] - margin
    number = int(passing.sum())
    hits = torch.zeros(len(rows), thresholds.shape[1] + 1, dtype=torch.int64, device=estimates.device)
    opened: list[tuple[Tensor, Tensor, Tensor]] = []
    if shared or number * SURVIVING > estimates.numel():
        lists = thresholds[0] if shared else thresholds
        low = torch.searchsorted(lists, estimates - margin)
        high = torch.searchsorted(lists, estimates + margin, right=True)
        sure = (low == high) & (estimates > -torch.inf)
        _add(hits, low, sure, shared)
        r, c = ((low != high) & (estimates > -torch.inf)).nonzero(as_tuple=True)
        opened.append((r, c, estimates[r, c]))
    else:
        every = passing.nonzero()
        for some in every.split(max(1, GATHERED // thresholds.shape[1])):
            r, c = some.unbind(1)
            values, own, near = estimates[r, c], thresholds[r], margin[r]
            low = torch.searchsorted(own, values[:, None] - near)[:, 0]
            sure = low == torch.searchsorted(own, values[:, None] + near, right=True)[:, 0]
            hits.view(-1).index_add_(0, r[sure] * hits.shape[1] + low[sure], torch.ones_like(low[sure]))
            opened.append((r[~sure], c[~sure], values[~sure]))
    _add_counters(side, rows, hits.cpu().numpy())
    for r, c, values in opened:
        at = (r.cpu().numpy() + first_row, c.cpu().numpy() + first_column, values.double().cpu().numpy())
        _place(*at, side, shared, pairs, work[-1])


def _padded(side: Side, rows: NDArray[Any], estimates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the thresholds of some queries, ascending and padded with +inf, and their margins, where the tile is."""
    start, sizes = side.start[rows], side.start[rows + 1] - side.start[rows]
    width = int(sizes.max(initial=0))
    at = np.minimum(start[:, None] + np.arange(width), max(0, len(side.thresholds) - 1))
    values = np.where(np.arange(width) < sizes[:, None], side.thresholds[at] if width else 0.0, np.inf)
    margin = np.where(sizes > 0, side.margin[rows], 0.0)
    # in float64: thresholds in the precision of the estimates would be moved
    return torch.from_numpy(values).to(estimates.device), torch.from_numpy(margin[:, None]).to(estimates.device)


def _add(hits: Tensor, low: Tensor, sure: Tensor, shared: bool) -> None:
    if shared:
        hits[0] += torch.bincount(low[sure], minlength=hits.shape[1])
    else:
        hits.scatter_add_(1, low, sure.long())


@kernel
def _add_counters(side, rows, hits):
    for r in range(rows.shape[0]):
        s = rows[r]
        start = side.start[s] + s
        for k in range(side.start[s + 1] - side.start[s] + 1):
            side.hits[start + k] += hits[r, k]


@kernel
def _place(rows, columns, estimates, side, shared, pairs, work):
    for p in range(rows.shape[0]):
        i = rows[p]
        s = 0 if shared else i
        start, number = side.start[s], side.start[s + 1] - side.start[s]
        thresholds = side.thresholds[start : start + number]
        hits, ties = side.hits[start + s : start + s + number + 1], side.ties[start + s : start + s + number + 1]
        place_by_score(pairs, i, columns[p], estimates[p], thresholds, hits, ties, work)


def collect(estimates: Tensor, cut: float, top: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the estimates of a tile between two, with their rows and columns."""
    r, c = ((estimates >= cut) & (estimates <= top)).nonzero(as_tuple=True)
    return estimates[r, c].cpu().numpy(), r.cpu().numpy(), c.cpu().numpy()


def fill_histogram(estimates: Tensor, histogram: NDArray[Any], origin: float, scale: float) -> None:
    """Add the estimates of a tile to a histogram, in the bins of `counting.bin_of`."""
    first, by = (torch.tensor(number, dtype=estimates.dtype, device=estimates.device) for number in (origin, scale))
    position = ((estimates - first) * by).float().clamp(-1, len(histogram) - 2).long() + 1
    histogram += torch.bincount(position.view(-1), minlength=len(histogram)).cpu().numpy()
