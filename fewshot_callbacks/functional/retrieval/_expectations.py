"""Expected values over the orders of a tied group: harmonic sums, and means over hypergeometric distributions.

The module docstring of `rank_metrics` defines the letters. n is the number of negatives in a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional._reading import number_distinct

# Number of terms, one for each place in a tied group, that are computed at a time.
TERMS_AT_ONCE = 1024

# From this number on, the expansion of harmonic numbers is exact to float64 precision.
NEAR = 40


class _RatioMeans(NamedTuple):
    """Means over the number h of relevant items that are drawn. A term with m + h = 0 counts as 0."""

    # mean of 1 / (m + h)
    inverse: Tensor
    # mean of h / (m + h)
    share: Tensor
    # mean of h (h - 1) / (m + h)
    pairs: Tensor


def hypergeometric_means(
    m: Int[Tensor, "cases"], drawn: Int[Tensor, "cases"], size: Int[Tensor, "cases"], relevant: Int[Tensor, "cases"]
) -> _RatioMeans:
    """Return means over the number h of relevant items that are drawn from a group with m relevant items above it.

    The sums start at the most probable h and go outwards, down to 1e-30 of its probability.
    """
    lowest = (drawn - (size - relevant)).clamp(min=0)
    highest = drawn.minimum(relevant)
    mode = ((drawn + 1) * (relevant + 1)).div(size + 2, rounding_mode="floor").maximum(lowest).minimum(highest)
    # relative to the probability of the mode
    largest_weight = torch.ones_like(m, dtype=torch.float64)
    sums = _ratio_terms(m, mode, largest_weight)
    for step in (1, -1):
        h = mode
        weight = largest_weight
        while True:
            is_last = (h >= highest) if step == 1 else (h <= lowest)
            weight = weight * torch.where(is_last, 0.0, _weight_ratio(h, step, drawn, size, relevant))
            weight = weight.masked_fill(is_last | (weight < 1e-30), 0.0)
            if not bool(weight.any()):
                break
            h = (h + step).clamp(min=0)
            sums += _ratio_terms(m, h, weight)
    total, inverse, share, pairs = sums
    return _RatioMeans(inverse / total, share / total, pairs / total)


def _ratio_terms(
    m: Int[Tensor, "cases"], h: Int[Tensor, "cases"], weight: Float[Tensor, "cases"]
) -> Float[Tensor, "4 cases"]:
    """Return the weight of h, and the weighted terms 1 / (m + h), h / (m + h) and h (h - 1) / (m + h)."""
    inverse = weight / (m + h).clamp(min=1)
    return torch.stack([weight, inverse.masked_fill(m + h == 0, 0.0), inverse * h, inverse * (h * (h - 1))])


def _weight_ratio(
    h: Int[Tensor, "cases"],
    step: int,
    drawn: Int[Tensor, "cases"],
    size: Int[Tensor, "cases"],
    relevant: Int[Tensor, "cases"],
) -> Float[Tensor, "cases"]:
    """Return P(h + step) / P(h) of the hypergeometric distribution, for a step of 1 or -1."""
    lower = h if step == 1 else h - 1
    # P(lower + 1) / P(lower) = numerator / denominator
    numerator = ((relevant - lower) * (drawn - lower)).double()
    denominator = ((lower + 1) * (size - relevant - drawn + lower + 1)).double()
    return numerator / denominator if step == 1 else denominator / numerator


def chance_of_none(
    drawn: Int[Tensor, "cases"], n: Int[Tensor, "cases"], r: Int[Tensor, "cases"]
) -> Float[Tensor, "cases"]:
    """Return the probability that no relevant item is among those drawn from r relevant items and n negatives."""
    # C(n + r - drawn, r) / C(n + r, r), a product of min(drawn, r) factors
    fewer = drawn.minimum(r)
    more = drawn.maximum(r)
    chance = torch.ones_like(fewer, dtype=torch.float64)
    for step in range(int(fewer.max())):
        factor = (n + r - more - step).clamp(min=0).double() / (n + r - step).clamp(min=1)
        chance = torch.where(step < fewer, chance * factor, chance)
    return chance


def expected_reciprocal(
    a: Float[Tensor, "cases"], n: Float[Tensor, "cases"], r: Float[Tensor, "cases"]
) -> Float[Tensor, "cases"]:
    """Return E[1 / (a + X)], where X is the place of the first of r relevant items in a group with n negatives."""
    # a = 0: r / (n + 1) * (1 / r + ... + 1 / (r + n)); r = 1: each place is as likely as any other
    is_first_group = a == 0
    harmonic = harmonic_between(torch.where(is_first_group, r - 1, a), n + 1)
    value = torch.where(is_first_group, r, 1.0) / (n + 1) * harmonic
    rows = ((a > 0) & (r > 1)).nonzero().flatten()
    # Cases with similar numbers of terms are computed together.
    rows = rows[(n / r)[rows].argsort(stable=True)]
    for part in rows.split(TERMS_AT_ONCE):
        value[part] = sum_of_reciprocals(a[part], n[part], r[part])
    return value


def sum_of_reciprocals(
    a: Float[Tensor, "cases"],
    n: Float[Tensor, "cases"],
    r: Float[Tensor, "cases"],
    *,
    last: bool = False,
    within: int | None = None,
) -> Float[Tensor, "cases"]:
    """Return E[1 / rank] of the first or the last relevant item of a tied group, as a sum over its places.

    The sum ends when the remaining probability is negligible. The place x of the first relevant item has
    P(x + 1) / P(x) = (n - x + 1) / (s - x). The place of the last relevant item, counted from the end, has the same
    distribution. Ranks beyond `within` count as 0.
    """
    total = torch.zeros_like(a)
    s = n + r
    chance = r / s  # P(1)
    active = torch.arange(len(a), device=a.device)
    offset = torch.arange(TERMS_AT_ONCE, dtype=torch.float64, device=a.device)
    start = 1
    while len(active):
        place = start + offset
        sizes = s[active, None]
        ratio = (n[active, None] - place + 1).clamp_(min=0).div_(sizes - place)
        ratio[sizes <= place] = 0.0
        # There is one more column than places. The last column is P of the next start.
        probability = torch.cat([chance[active, None], ratio], dim=1).cumprod(dim=1)
        rank = a[active, None] + (sizes + 1 - place if last else place)
        terms = probability[:, :-1] / rank.clamp(min=1)
        if within is not None:
            terms.masked_fill_(rank > within, 0.0)
        total[active] = torch.cat([total[active, None], terms], dim=1).cumsum(dim=1)[:, -1]
        chance[active] = probability[:, -1]
        start += TERMS_AT_ONCE
        active = active[chance[active] * n[active] > 1e-20]
    return total


def distinct(*counts: Int[Tensor, "cases"]) -> tuple[list[Tensor], Int[Tensor, "cases"]]:
    """Return the distinct combinations of the counts, a tensor per count, and the index of each case's combination."""
    number = torch.zeros_like(counts[0])
    for values in counts:
        shifted = values - values.min()
        # Indices stay below the number of cases, so the product does not overflow.
        number, first = number_distinct(number * (shifted.max() + 1) + shifted)
    return [values[first] for values in counts], number


def harmonic_between(a: Float[Tensor, "groups"], d: Float[Tensor, "groups"]) -> Float[Tensor, "groups"]:
    """Return 1 / (a + 1) + ... + 1 / (a + d), without cancellation between two large sums."""
    # Most groups are far from 0, so computing all of them is faster than selecting these.
    value = _harmonic_far_from_0(a, d)
    near = (a < NEAR).nonzero().squeeze(1)
    first_near = a[near] + 1
    value[near] = torch.digamma(first_near + d[near]) - torch.digamma(first_near)
    # A single term needs no expansion and is rounded only once.
    return torch.where(d == 1, 1 / (a + 1), value)


def _harmonic_far_from_0(a: Float[Tensor, "groups"], d: Float[Tensor, "groups"]) -> Float[Tensor, "groups"]:
    """Return 1 / (a + 1) + ... + 1 / (a + d) by the expansion of the harmonic number H_x around ln(x + 1/2).

    For a >= `NEAR`, the omitted terms are below 1e-14.
    """
    start = 1 / (a + 0.5)
    end = 1 / (a + d + 0.5)
    total = torch.log1p(d * start)
    start_squared = start * start
    end_squared = end * end
    start_power = torch.ones_like(start)
    end_power = torch.ones_like(end)
    # Products are several times faster than `**`.
    for factor in (1 / 24, -7 / 960, 31 / 8064):
        start_power = start_power * start_squared
        end_power = end_power * end_squared
        total = total + factor * (end_power - start_power)
    return total
