"""How often the 95 % intervals of reports cover the true value, on sets drawn from a population of classes.

    python benchmarks/interval_coverage.py [--quick] [--sets 2000] [--all | --long-tailed | --embeddings]

Classes differ: the true recall of a class is drawn from a Beta distribution around the true mean, with alpha + beta = 5
(some classes are far worse than others) or 50 (all classes are similar), or it equals the true mean. Queries are drawn from
their class. A set has 2 to 200 classes of 10 to 100 queries; the sizes are equal or vary by a factor of about two. A group
of Grouped Recall is 5 such classes of 8 queries. For differences, a second model errs on its own queries, or on many of the
queries that the first model misses. The intervals of all sets of a regime are computed at once, and the first intervals are
also computed by the functions that reports use: the two must agree. The values of Recall@K are drawn directly, because the
true value of a set of embeddings would have to be estimated; `--embeddings` does that for one population. `--long-tailed`
draws classes of very different sizes, and the size decides how difficult a class is: intervals of means over queries are
too narrow there.

The tables show the coverage (in brackets: the coverage of the normal interval, mean ± 1.96 standard errors), and how many
regimes are inside, below and above 93 to 97 %. If every class of a set is perfect with a probability of more than 3 %, no
interval can have a coverage near 95 %: either all of these sets cover the true value, or none does. Such regimes are marked
with * and counted separately.

The intervals follow MacKinnon and White (1985), Satterthwaite (1946), Gaffke (2005), Hall (1992) and Zou and Donner (2008);
see the module docstring of fewshot_callbacks/functional/statistics.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.special import betaincinv, expit, logit, ndtr, ndtri, stdtrit
from scipy.stats import binom

from fewshot_callbacks.functional import (
    EpisodeAccuracy,
    Interval,
    clustered_mean_interval,
    evaluate_retrieval,
    mean_interval,
    paired_difference_interval,
)
from fewshot_callbacks.functional.retrieval.grouped_recall import over_splits
from fewshot_callbacks.functional.statistics import UNITS_WITH_RANGE, independent_difference_interval

TRUTHS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.995)
UNITS = (2, 3, 5, 10, 20, 50, 200)
SPREADS = (5.0, 50.0, np.inf)
LOWEST, HIGHEST = 0.93, 0.97
DEGENERATE = 0.03

CHECKED = 3
"""sets of each regime whose interval is also computed by the function that reports use"""

Row = NDArray[np.float64]
Rows = NDArray[np.float64]
Sizes = NDArray[np.int64]
Ends = tuple[Row, Row]


@dataclass(frozen=True)
class Regime:
    """The population that the sets of one row are drawn from."""

    truth: float
    units: int
    """classes, or groups of classes"""
    spread: float
    """alpha + beta of the true recalls; infinite if all classes are equal"""
    queries: int
    """mean number of queries per class"""
    unequal: bool = False


@dataclass
class Count:
    """The coverage of one kind of interval in one regime."""

    share: float
    """fraction of sets with an interval that covers the true value"""
    share_of_normal: float
    perfect: float
    """fraction of sets in which all classes have the same value, so that the spread cannot be estimated"""

    @property
    def is_degenerate(self) -> bool:
        return self.perfect > DEGENERATE


class Draw(NamedTuple):
    """Many sets of one regime."""

    intervals: Ends
    normal: Ends
    """mean ± 1.96 standard errors, for comparison"""
    truth: float
    perfect: NDArray[np.bool_]
    one: Callable[[int], Interval]
    """the interval of one set, by the function that reports use"""


@dataclass
class Kind:
    """One kind of interval, and its coverage in each regime."""

    name: str
    draw: Callable[[Regime, int, np.random.Generator], Draw]
    regimes: list[Regime]
    counts: dict[Regime, Count] = field(default_factory=dict)

    def run(self, sets: int) -> None:
        for number, regime in enumerate(track(self.regimes, self.name, transient=True)):
            drawn = self.draw(regime, sets, np.random.default_rng(number))
            for index in range(CHECKED):
                assert np.allclose(drawn.one(index), [ends[index] for ends in drawn.intervals], atol=1e-9), regime
            held, held_by_normal = (
                float(((low <= drawn.truth) & (drawn.truth <= high)).mean())
                for low, high in (drawn.intervals, drawn.normal)
            )
            self.counts[regime] = Count(held, held_by_normal, float(drawn.perfect.mean()))


# ---------------------------------------------- the intervals of functional/statistics.py, of many sets (rows) at a time
def jackknife(means: Rows, sizes: Sizes) -> tuple[Ends, Ends]:
    """Return mean, standard error, degrees of freedom and skewness of each row."""
    units, shares = means.shape[1], sizes / sizes.sum(axis=1, keepdims=True)
    mean = (sizes * means).sum(axis=1) / sizes.sum(axis=1)
    moves = shares * (means - mean[:, None]) / (1 - shares)
    largest = np.maximum(np.abs(moves).max(axis=1), 1e-300)
    same = np.abs(means - mean[:, None]).max(axis=1) <= 1e-12
    second, third, fourth = (((moves / largest[:, None]) ** power).sum(axis=1) for power in (2, 3, 4))
    second, fourth = np.where(same, 1, second), np.where(same, 1, fourth)
    freedom = np.maximum(1, np.minimum(1 / (shares**2).sum(axis=1) - 1, 2 * second**2 / fourth))
    error = np.where(same, 0, largest * np.sqrt((units - 1) / units * second))
    return (mean, error), (freedom, np.where(same, 0, third / second**1.5))


def of_equal(mean: Row, units: int | Sizes) -> Ends:
    weight = 0.025 ** (1 / units)
    return mean * weight, 1 - (1 - mean) * weight


def of_metric(means: Rows, sizes: Sizes, parts: int = 1) -> Ends:
    (mean, error), (freedom, _) = jackknife(means, sizes)
    inside = np.where(error > 0, mean, 0.5)
    reach = stdtrit(freedom, 0.975) * error / (inside * (1 - inside))
    units = means.shape[1] * np.where((mean == 0) | (mean == 1), parts, 1)
    equal = of_equal(mean, units)
    low, high = (
        np.where(error > 0, expit(logit(inside) + sign * reach), e) for sign, e in zip((-1, 1), equal, strict=True)
    )
    return low, high


def of_differences(means: Rows, sizes: Sizes) -> Ends:
    (mean, error), (freedom, skewness) = jackknife(means, sizes)
    quantile, small = stdtrit(freedom, 0.975), np.abs(skewness) < 1e-6
    skewness = np.where(small, 1, skewness)

    def end(sign: int) -> Row:
        cubic = 3 / skewness * (np.cbrt(1 + skewness * (sign * quantile - skewness / 6)) - 1)
        return np.asarray(mean - error * np.where(small, sign * quantile, cubic))

    plain, ends = (mean - error * quantile, mean + error * quantile), (end(1), end(-1))
    beyond = (ends[0] < np.minimum(means.min(axis=1), plain[0])) | (ends[1] > np.maximum(means.max(axis=1), plain[1]))
    beyond &= means.shape[1] >= UNITS_WITH_RANGE
    corrected = [np.clip(np.where(beyond, *both), -1, 1) for both in zip(plain, ends, strict=True)]
    low, high = of_equal((1 + mean) / 2, means.shape[1])
    return np.where(error > 0, corrected[0], 2 * low - 1), np.where(error > 0, corrected[1], 2 * high - 1)


def of_independent(first: Row, interval: Ends, second: Row, other: Ends) -> Ends:
    value = first - second
    below, above = np.hypot(first - interval[0], other[1] - second), np.hypot(interval[1] - first, second - other[0])
    return value - below, value + above


def normal(means: Rows, sizes: Sizes) -> Ends:
    """Return the mean ± 1.96 standard errors of a ratio of two sums over clusters (Liang and Zeger, 1986)."""
    mean, units = (sizes * means).sum(axis=1) / sizes.sum(axis=1), means.shape[1]
    residuals = sizes * (means - mean[:, None])
    error = np.sqrt(units / (units - 1) * (residuals**2).sum(axis=1)) / sizes.sum(axis=1)
    return mean - 1.96 * error, mean + 1.96 * error


# ------------------------------------------------------------------------------------------------------------- the sets
def sizes_of(regime: Regime, sets: int, rng: np.random.Generator) -> Sizes:
    """Return the number of queries of each class."""
    if not regime.unequal:
        return np.full((sets, regime.units), regime.queries)
    sizes = regime.queries * np.exp(0.8 * rng.normal(size=(sets, regime.units)) - 0.32)
    return np.maximum(1, sizes.round()).astype(np.int64)


def recalls(truth: float, spread: float, positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the true recall of each class, given the fraction of classes that are worse."""
    if np.isinf(spread):
        return np.full(positions.shape, truth)
    quantiles = np.linspace(-8, 8, 20_001)  # of the normal distribution: dense at both ends of [0, 1]
    table = betaincinv(truth * spread, (1 - truth) * spread, ndtr(quantiles))
    return np.interp(ndtri(positions), quantiles, table)


def worse(truth: float) -> float:
    """Return the regime of the second model or second set: twice the errors."""
    return 2 * truth - 1 if truth > 0.5 else 0.4


def all_equal(means: Rows) -> NDArray[np.bool_]:
    return np.asarray(np.ptp(means, axis=1) == 0)


def queries_of(hits: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """The value and the class of each query of one set."""
    classes = np.arange(len(sizes)).repeat(sizes)
    first = np.cumsum(sizes) - sizes
    values = np.arange(len(classes)) - first[classes] < hits[classes]
    return torch.from_numpy(values.astype(np.float64)), torch.from_numpy(classes)


def micro(regime: Regime, sets: int, rng: np.random.Generator) -> Draw:
    """Recall@1 over the queries."""
    sizes = sizes_of(regime, sets, rng)
    hits = rng.binomial(sizes, recalls(regime.truth, regime.spread, rng.random(sizes.shape)))
    means = hits / sizes
    return Draw(
        of_metric(means, sizes),
        normal(means, sizes),
        regime.truth,
        all_equal(means),
        lambda index: clustered_mean_interval(*queries_of(hits[index], sizes[index])),
    )


def long_tailed(regime: Regime, sets: int, rng: np.random.Generator, *, easy: bool, most: int) -> tuple[Draw, Draw]:
    """Return Recall@1 over the queries, and over the classes, if the size of a class decides its recall.

    Sizes have a Pareto distribution with a shape of 1.1: the largest of 40 classes has a quarter of the queries if it is
    limited to 1,000 queries.

    Args:
        regime: Its number of queries is the size of the smallest class.
        sets: Number of sets.
        rng: Random generator.
        easy: Large classes are easy; otherwise they are difficult.
        most: Maximum number of queries per class.
    """

    def of_shares(smaller: NDArray[np.float64]) -> tuple[Sizes, NDArray[np.float64]]:
        sizes = np.minimum(regime.queries * (1 - smaller) ** (-1 / 1.1), most).round().astype(np.int64)
        return sizes, recalls(regime.truth, regime.spread, smaller if easy else 1 - smaller)

    sizes, of_classes = of_shares((np.arange(10**6) + 0.5) / 10**6)
    truth = float((sizes * of_classes).sum() / sizes.sum())
    sizes, of_classes = of_shares(rng.random((sets, regime.units)))
    hits = rng.binomial(sizes, of_classes)
    means = hits / sizes
    over_queries = Draw(
        of_metric(means, sizes),
        normal(means, sizes),
        truth,
        all_equal(means),
        lambda index: clustered_mean_interval(*queries_of(hits[index], sizes[index])),
    )
    return over_queries, over_units(means, regime.truth)


def long_tailed_table(sets: int) -> Table:
    """Print the coverage of means over queries and over classes with long-tailed sizes."""
    table = Table(title="share of sets that hold the truth, sizes with a Pareto distribution, difficulty by size")
    for name in ("classes", "large classes are", "largest class", "mean over queries", "mean over classes"):
        table.add_column(name, justify="right")
    for easy in (True, False):
        for most in (100, 1000):
            for units in (10, 20, 40, 200, 1000):
                drawn = long_tailed(
                    Regime(0.8, units, 5.0, 5), sets, np.random.default_rng(units), easy=easy, most=most
                )
                shares = []
                for draw in drawn:
                    for index in range(CHECKED):
                        assert np.allclose(draw.one(index), [ends[index] for ends in draw.intervals], atol=1e-9)
                    low, high = draw.intervals
                    shares.append(f"{((low <= draw.truth) & (draw.truth <= high)).mean():.1%}")
                table.add_row(str(units), "easy" if easy else "difficult", str(most), *shares)
    return table


def over_units(means: Rows, truth: float, parts: int = 1) -> Draw:
    """The mean of one value per class or group."""
    ones = np.ones(means.shape, dtype=np.int64)

    def one(index: int) -> Interval:
        return mean_interval(torch.from_numpy(means[index]), parts=parts)

    return Draw(of_metric(means, ones, parts), normal(means, ones), truth, all_equal(means), one)


def macro(regime: Regime, sets: int, rng: np.random.Generator) -> Draw:
    """Recall@1 over the classes."""
    sizes = sizes_of(regime, sets, rng)
    hits = rng.binomial(sizes, recalls(regime.truth, regime.spread, rng.random(sizes.shape)))
    return over_units(hits / sizes, regime.truth)


def groups_of(truth: float, regime: Regime, sets: int, rng: np.random.Generator) -> Rows:
    """Recall@1 of groups of 5 classes."""
    of_classes = recalls(truth, regime.spread, rng.random((sets, regime.units, 5)))
    return np.asarray(rng.binomial(regime.queries, of_classes).sum(axis=2) / (5 * regime.queries))


def grouped(regime: Regime, sets: int, rng: np.random.Generator) -> Draw:
    """Grouped Recall@1: the mean over groups of 5 classes."""
    return over_units(groups_of(regime.truth, regime, sets, rng), regime.truth, parts=5)


def splits(regime: Regime, sets: int, rng: np.random.Generator) -> Draw:
    """Grouped Recall@1 averaged over 4 splits of the same classes into groups of 5: the mean of the splits' intervals."""
    hits = rng.binomial(regime.queries, recalls(regime.truth, regime.spread, rng.random((sets, regime.units * 5))))
    of_splits = []
    for _ in range(4):
        order = rng.permuted(np.broadcast_to(np.arange(hits.shape[1]), hits.shape), axis=1)
        in_groups = np.take_along_axis(hits, order, axis=1).reshape(sets, regime.units, 5)
        of_splits.append(in_groups.sum(axis=2) / (5 * regime.queries))
    ones = np.ones(of_splits[0].shape, dtype=np.int64)
    low, high = np.mean([of_metric(means, ones, parts=5) for means in of_splits], axis=0)
    normal_low, normal_high = np.mean([normal(means, ones) for means in of_splits], axis=0)

    def one(index: int) -> Interval:
        return over_splits(mean_interval(torch.from_numpy(means[index]), parts=5) for means in of_splits)

    perfect = np.all([all_equal(means) for means in of_splits], axis=0)
    return Draw((low, high), (normal_low, normal_high), regime.truth, perfect, one)


def episodes(regime: Regime, sets: int, rng: np.random.Generator) -> Draw:
    """Accuracy of 5-way episodes with 8 queries per class; each episode draws new classes from a large set."""
    accuracy = groups_of(regime.truth, regime, sets, rng)
    ones = np.ones(accuracy.shape, dtype=np.int64)

    def one(index: int) -> Interval:
        values = accuracy[index]
        found = EpisodeAccuracy(
            values.mean(),
            values.std(ddof=1),
            0.0,
            len(values),
            5,
            1,
            regime.queries,
            "",
            per_episode=torch.from_numpy(values),
        )
        return found.interval

    return Draw(of_metric(accuracy, ones), normal(accuracy, ones), regime.truth, all_equal(accuracy), one)


def paired(regime: Regime, sets: int, rng: np.random.Generator) -> Draw:
    """The difference in Recall@1 between two models on the same queries; the second model errs twice as often.

    The models share half of the difficulty of the classes, and half of the queries that the better model misses.
    """
    sizes = sizes_of(regime, sets, rng)
    common, *own = rng.normal(size=(3, *sizes.shape))
    first, second = (
        recalls(truth, regime.spread, ndtr(np.sqrt(0.5) * (common + one)))
        for truth, one in zip((regime.truth, worse(regime.truth)), own, strict=True)
    )
    both = 0.5 * np.minimum(first, second) + 0.5 * first * second  # the probability that both models find it
    wins = rng.binomial(sizes, first - both)
    losses = rng.binomial(sizes - wins, (second - both) / np.maximum(1 - first + both, 1e-12))
    means = (wins - losses) / sizes

    def one(index: int) -> Interval:
        (up, classes), (down, _) = (queries_of(hits[index], sizes[index]) for hits in (wins, losses))
        return paired_difference_interval(up - down, classes)

    truth = regime.truth - worse(regime.truth)
    return Draw(of_differences(means, sizes), normal(means, sizes), truth, all_equal(means), one)


def paired_groups(regime: Regime, sets: int, rng: np.random.Generator) -> Draw:
    """The difference in Grouped Recall@1 between two models in the same groups; half of the difficulty is shared."""
    common, *own = rng.normal(size=(3, sets, regime.units, 5))
    truths = regime.truth, worse(regime.truth)
    first, second = (
        rng.binomial(regime.queries, recalls(truth, regime.spread, ndtr(np.sqrt(0.5) * (common + one)))).sum(axis=2)
        for truth, one in zip(truths, own, strict=True)
    )
    means = (first - second) / (5 * regime.queries)
    ones = np.ones(means.shape, dtype=np.int64)
    return Draw(
        of_differences(means, ones),
        normal(means, ones),
        truths[0] - truths[1],
        all_equal(means),
        lambda index: paired_difference_interval(torch.from_numpy(means[index])),
    )


def independent(regime: Regime, sets: int, rng: np.random.Generator) -> Draw:
    """The difference in Grouped Recall@1 between two sets of different classes; the second set is more difficult."""
    truths = regime.truth, worse(regime.truth)
    sides = [groups_of(truth, regime, sets, rng) for truth in truths]
    first, second = (side.mean(axis=1) for side in sides)
    one, other = (of_metric(side, np.ones(side.shape, dtype=np.int64), parts=5) for side in sides)
    error = 1.96 * np.sqrt(sum(side.var(axis=1, ddof=1) / regime.units for side in sides))

    def of_one(index: int) -> Interval:
        intervals = [mean_interval(torch.from_numpy(side[index]), parts=5) for side in sides]
        return independent_difference_interval(float(first[index]), intervals[0], float(second[index]), intervals[1])

    return Draw(
        of_independent(first, one, second, other),
        (first - second - error, first - second + error),
        truths[0] - truths[1],
        all_equal(sides[0]) | all_equal(sides[1]),
        of_one,
    )


def kinds(truths: tuple[float, ...], units: tuple[int, ...]) -> list[Kind]:
    """Return all kinds of intervals with their regimes."""

    def regimes(queries: tuple[int, ...], unequal: tuple[bool, ...]) -> list[Regime]:
        return [
            Regime(truth, count, spread, size, uneven)
            for truth in truths
            for count in units
            for spread in SPREADS
            for size in queries
            for uneven in unequal
        ]

    return [
        Kind("mean over queries, classes of one size", micro, regimes((10, 100), (False,))),
        Kind("mean over queries, classes of unequal size", micro, regimes((10, 100), (True,))),
        Kind("mean over classes (macro), unequal size", macro, regimes((10, 100), (True,))),
        Kind("Grouped Recall, mean over groups", grouped, regimes((8,), (False,))),
        Kind("Grouped Recall, four splits", splits, regimes((8,), (False,))),
        Kind("accuracy of episodes", episodes, regimes((8,), (False,))),
        Kind("paired difference, mean over queries", paired, regimes((10, 100), (False, True))),
        Kind("paired difference of Grouped Recall", paired_groups, regimes((8,), (False,))),
        Kind("difference of Grouped Recall of two sets", independent, regimes((8,), (False,))),
    ]


def summary(tried: list[Kind], by: str) -> Table:
    """Print the median, lowest and highest coverage over the regimes with each number of classes, or each true value."""
    entries: tuple[float, ...] = UNITS if by == "units" else TRUTHS
    present = [e for e in entries if any(getattr(regime, by) == e for kind in tried for regime in kind.counts)]
    table = Table(title=f"share of sets that hold the truth, %, by {'classes or groups' if by == 'units' else 'truth'}")
    table.add_column("interval")
    for entry in present:
        table.add_column(f"{entry:g}", justify="right", no_wrap=True)
    for kind in tried:
        cells = []
        for entry in present:
            found = [count for regime, count in kind.counts.items() if getattr(regime, by) == entry]
            shares = [100 * count.share for count in found if not count.is_degenerate]
            before = [100 * count.share_of_normal for count in found if not count.is_degenerate]
            cells.append(f"{min(shares):.0f}-{max(shares):.0f} ({min(before):.0f})" if shares else "*")
        table.add_row(kind.name, *cells)
    return table


def verdicts(tried: list[Kind]) -> Table:
    """Print how many regimes are inside, below and above 93 to 97 %."""
    table = Table(title=f"regimes whose share lies inside {LOWEST:.0%} to {HIGHEST:.0%}")
    for name in (
        "interval",
        "regimes",
        "inside",
        "below",
        "lowest",
        "above",
        "highest",
        "*",
        "lowest *",
        "normal inside",
    ):
        table.add_column(name, justify="left" if name == "interval" else "right")
    for kind in tried:
        plain = [count for count in kind.counts.values() if not count.is_degenerate]
        starred = [count.share for count in kind.counts.values() if count.is_degenerate]
        shares = [count.share for count in plain]
        below, above = sum(share < LOWEST for share in shares), sum(share > HIGHEST for share in shares)
        before = sum(LOWEST <= count.share_of_normal <= HIGHEST for count in plain)
        table.add_row(
            kind.name,
            str(len(shares)),
            str(len(shares) - below - above),
            str(below),
            f"{min(shares):.1%}",
            str(above),
            f"{max(shares):.1%}",
            str(len(starred)),
            f"{min(starred):.1%}" if starred else "",
            str(before),
        )
    return table


def lines(tried: list[Kind]) -> Iterator[str]:
    """Print every regime."""
    for kind in tried:
        for regime, count in kind.counts.items():
            yield (
                f"{kind.name}: truth {regime.truth:g}, {regime.units} units, alpha + beta {regime.spread:g}, "
                f"{regime.queries} queries{', unequal' if regime.unequal else ''}: "
                f"{count.share:.1%}{' *' if count.is_degenerate else ''} ({count.share_of_normal:.1%})"
            )


def embeddings_table(sets: int, truth_sets: int) -> Table:
    """One population of embeddings: 100 classes of 8 items around centres, each class with its own amount of noise."""
    names = ("mAP", "recall@1", "macro_mAP", "grouped_recall@1")

    def report(seed: int) -> tuple[dict[str, float], dict[str, Interval], Interval]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(100).repeat_interleave(8)
        centres = torch.randn(100, 16, generator=generator)
        noise = 1.3 * torch.randn(100, 1, generator=generator).mul(0.4).exp()
        embeddings = centres[labels] + noise[labels] * torch.randn(800, 16, generator=generator)
        found = evaluate_retrieval(embeddings, labels, metrics=names, label_groups=5)
        return found.metrics(), found.intervals, mean_interval(found.per_query["mAP"])

    draws = [report(seed)[0] for seed in track(range(sets, sets + truth_sets), "truth", transient=True)]
    truth = {name: sum(draw[name] for draw in draws) / truth_sets for name in names}
    held = dict.fromkeys((*names, "mAP, as if queries were independent"), 0)
    for seed in track(range(sets), "intervals", transient=True):
        _, intervals, naive = report(seed)
        for name in names:
            held[name] += intervals[name].low <= truth[name] <= intervals[name].high
        held["mAP, as if queries were independent"] += naive.low <= truth["mAP"] <= naive.high
    table = Table(title=f"{sets} sets of embeddings of 100 classes of 8 items")
    for name in ("interval", "held the truth"):
        table.add_column(name)
    for name, count in held.items():
        table.add_row(name, f"{count / sets:.1%}")
    return table


def main() -> None:
    """Draw the sets, count the intervals that cover the true value, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=2000, help="sets of each regime")
    parser.add_argument("--quick", action="store_true", help="200 sets of a third of the regimes")
    parser.add_argument("--all", action="store_true", help="print every regime")
    parser.add_argument("--long-tailed", action="store_true", help="draw classes of very different sizes")
    parser.add_argument("--embeddings", action="store_true", help="draw sets of embeddings instead")
    options = parser.parse_args()
    console = Console(width=150)
    sets = 200 if options.quick else options.sets
    if options.long_tailed:
        console.print(long_tailed_table(sets))
    elif options.embeddings:
        console.print(embeddings_table(sets, 2 * sets))
    else:
        tried = kinds(TRUTHS[::2], UNITS[::2]) if options.quick else kinds(TRUTHS, UNITS)
        for kind in tried:
            kind.run(sets)
        if options.all:
            console.print("\n".join(lines(tried)), highlight=False)
        for table in (verdicts(tried), summary(tried, "units"), summary(tried, "truth")):
            console.print(table)
        console.print(f"*: in more than {DEGENERATE:.0%} of the sets all classes or groups have the same value.")
    low, high = (binom.ppf(end, sets, 0.95) / sets for end in (0.025, 0.975))
    console.print(f"By chance, correct intervals cover the true value in {low:.1%} to {high:.1%} of {sets} sets.")


if __name__ == "__main__":
    main()
