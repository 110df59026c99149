"""The time of an evaluation on this machine, extrapolated from two timed samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._labels import as_labels, join
from fewshot_callbacks.functional._reading import as_tensor
from fewshot_callbacks.functional.retrieval.cost import EvaluationPlan
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.storage import RowSubset, Shards

Difficulty = Literal["well-trained", "hard"]
"""How well generated embeddings separate their classes."""

_CALL = "measure_evaluation"
# The smallest sample of a large set has at most this number of rows, and at least half of it.
FIRST_ROWS = 2000
# Smaller sets are not halved. An error refuses rows that are so long that fewer than this number fit.
FEWEST_ROWS = 64
# Each sample is evaluated several times and the shortest time counts, because the first evaluation may compile loops or
# allocate memory, and other programs may use the machine.
WANTED_ROUNDS = 2
MOST_ROUNDS = 5
# Share of the time that repeated evaluations of one sample may take.
SHARE_OF_ROUNDS = 0.05
# Largest size of the evaluated embeddings in bytes, because generating or reading them takes time, too.
MOST_BYTES = 2**28
# With fewer classes in a sample, rows are drawn instead of classes.
FEWEST_CLASSES = 20
# Number of relevant items of a generated query.
RELEVANT = 53
# Distance between the similarities within a class and between classes, in standard deviations of the latter. The mAP of
# 16,000 items in 512 dimensions is 0.997 with the first, and 0.14 with the second.
SEPARATIONS: dict[Difficulty, float] = {"well-trained": 5.0, "hard": 1.7}
# How fast the variance of generated embeddings falls over the directions, similar to trained networks.
DECAY = 0.35


@equal_with_nan
@dataclass(frozen=True)
class TimedSample:
    """A sample that was evaluated and timed.

    Attributes:
        queries: Number of evaluated queries.
        gallery: Number of gallery items.
        seconds: Duration of each evaluation of the sample, in seconds.
    """

    queries: int
    gallery: int
    seconds: tuple[float, ...]


@equal_with_nan
@dataclass(frozen=True)
class MeasuredEvaluation:
    """The time of an evaluation on this machine, measured or extrapolated; the result of `measure_evaluation`.

    Attributes:
        queries: Number of evaluated queries.
        gallery: Number of gallery items.
        dim: Components of an embedding.
        low_seconds: Shortest expected time.
        high_seconds: Longest expected time.
        is_extrapolated: Whether at least one of the times is extrapolated from samples. Otherwise they were measured.
        samples: The timed evaluations that the times are based on.

    Examples:
        >>> sample = TimedSample(2000, 2000, (0.2, 0.1))
        >>> print(MeasuredEvaluation(20_000, 20_000, 64, 5.0, 10.0, is_extrapolated=True, samples=(sample,)))
        5.0 to 10.0 s for 20,000 queries against 20,000 items, extrapolated from up to 2,000 against 2,000
    """

    queries: int
    gallery: int
    dim: int
    low_seconds: float
    high_seconds: float
    is_extrapolated: bool
    samples: tuple[TimedSample, ...]

    def __str__(self) -> str:
        times = f"{self.low_seconds:,.1f} s"
        if self.high_seconds > self.low_seconds:
            times = f"{self.low_seconds:,.1f} to {self.high_seconds:,.1f} s"
        sizes = f"{self.queries:,} queries against {self.gallery:,} items"
        if not self.is_extrapolated:
            return f"{times} for {sizes}, as measured"
        largest = max(self.samples, key=lambda sample: sample.gallery)
        return f"{times} for {sizes}, extrapolated from up to {largest.queries:,} against {largest.gallery:,}"


def measure_evaluation(
    plan: EvaluationPlan,
    queries: Any | None = None,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    difficulty: Difficulty | None = None,
    seconds: float = 10.0,
) -> MeasuredEvaluation:
    """Return how many seconds an evaluation with the default metrics takes on this machine.

    Two samples are evaluated with the threads and the memory budget of the real evaluation. They are as large as the time
    allows, and the second has twice as many rows as the first. If the whole set finishes in time, its measured times are
    returned. Otherwise the result is a range. Its low end grows as the two samples show, with a power of the rows between 1
    and 2. Its high end grows in proportion to the pairs. Compilation does not count.

    If you pass embeddings, whole classes are drawn, so classes keep their sizes. If fewer than 20 classes fit into a sample,
    random rows are drawn instead, and classes become smaller. Equal rows are rarer in a sample than in the whole set, so a
    set with many equal rows may take less time than predicted. A set may take up to twice as long as predicted if the budget
    has room for the counters of a sample but not for the counters of all queries, since each product is then computed twice.

    Without embeddings, classes of 53 items are generated.

    Args:
        plan: The evaluation, from `plan_evaluation`.
        queries: (queries, dim) embeddings, all rows of the evaluation or a part of them: a tensor, an array, or shards. Rows
            are drawn from all files of shards.
        query_labels: (queries,) labels, integers or strings.
        gallery: (gallery, dim) embeddings; None for one set.
        gallery_labels: (gallery,) labels.
        difficulty: How well generated embeddings separate their classes, `well-trained` or `hard`; by default, the range
            covers both.
        seconds: Approximate time for the measurement, without compilation.

    Returns:
        A frozen result. `print` shows the range and its origin.

    Raises:
        ValueError: If `seconds` is not positive, the difficulty is unknown or passed with embeddings, embeddings have no
            labels or another dim than the plan, or rows are too long.

    Examples:
        >>> from fewshot_callbacks.functional import plan_evaluation
        >>> measured = measure_evaluation(plan_evaluation(1000, 1000, 16), difficulty="hard")
        >>> measured.queries, measured.is_extrapolated, 0 < measured.low_seconds <= measured.high_seconds
        (1000, False, True)
    """
    _refuse_wrong_arguments(difficulty, seconds)
    if queries is not None:
        if difficulty is not None:
            raise InputError(
                f"{_CALL}: difficulty is for generated embeddings, but you passed embeddings. Leave it out."
            )
        sets = _GivenSets(plan, queries, query_labels, gallery, gallery_labels)
        samples = _timed_samples(plan, sets.sample, sets.rows, seconds)
        return _extrapolated(plan, samples)
    difficulties = get_args(Difficulty) if difficulty is None else (difficulty,)
    by_difficulty = []
    for name in difficulties:
        generated = _GeneratedSets(plan, SEPARATIONS[name])
        samples = _timed_samples(plan, generated.sample, generated.rows, seconds / len(difficulties))
        by_difficulty.append(_extrapolated(plan, samples))
    return MeasuredEvaluation(
        queries=plan.queries,
        gallery=plan.gallery,
        dim=plan.dim,
        low_seconds=min(measured.low_seconds for measured in by_difficulty),
        high_seconds=max(measured.high_seconds for measured in by_difficulty),
        is_extrapolated=any(measured.is_extrapolated for measured in by_difficulty),
        samples=tuple(sample for measured in by_difficulty for sample in measured.samples),
    )


def _refuse_wrong_arguments(difficulty: str | None, seconds: float) -> None:
    if difficulty is not None and difficulty not in SEPARATIONS:
        choices = ", ".join(SEPARATIONS)
        raise InputError(f"{_CALL}: difficulty={difficulty!r} is unknown. Choose one of {choices}.")
    if not seconds > 0:
        raise InputError(f"{_CALL}: seconds={seconds} must be positive, such as 10.")


@dataclass(frozen=True)
class _Sets:
    """Queries and a gallery with their labels. The gallery is None for one set."""

    queries: Any
    query_labels: Any
    gallery: Any | None = None
    gallery_labels: Any | None = None


class _GivenSets:
    """Samples of the user's embeddings, of whole classes if enough classes fit."""

    def __init__(
        self, plan: EvaluationPlan, queries: Any, query_labels: Any, gallery: Any | None, gallery_labels: Any | None
    ) -> None:
        if query_labels is None or (gallery is not None and gallery_labels is None):
            raise InputError(
                f"{_CALL}: embeddings need labels, which decide what is counted. Pass one label for each row."
            )
        self._queries = _readable(queries, plan.dim)
        self._gallery = None if gallery is None else _readable(gallery, plan.dim)
        labels = [as_labels(query_labels, "query_labels", _CALL)]
        if self._gallery is not None:
            labels.append(as_labels(gallery_labels, "gallery_labels", _CALL))
        for rows, labels_of_rows in zip((self._queries, self._gallery), labels, strict=False):
            if len(labels_of_rows) != len(rows):
                raise InputError(
                    f"{_CALL}: {len(rows):,} embeddings have {len(labels_of_rows):,} labels. Pass one label for each row."
                )
        codes = np.unique(join(_CALL, labels).codes.cpu().numpy(), return_inverse=True)[1]
        self._query_codes = codes[: len(self._queries)]
        self._gallery_codes = codes[len(self._queries) :]
        self.rows = len(self._queries)
        if self._gallery is not None:
            self.rows += len(self._gallery)
        self.rows = min(self.rows, _rows_that_fit(plan.dim))
        self._order_of_code = np.random.default_rng(0).permutation(int(codes.max()) + 1)
        first = self._class_prefix(self._query_codes, min(1.0, FIRST_ROWS / self.rows))
        self._draws_classes = len(np.unique(self._query_codes[first])) >= FEWEST_CLASSES

    def sample(self, rows: int) -> _Sets:
        """Return sets with about this number of rows in total."""
        total = len(self._queries) + (0 if self._gallery is None else len(self._gallery))
        share = min(1.0, rows / total)
        chosen = self._chosen(self._query_codes, share)
        queries = _rows_at(self._queries, chosen)
        query_labels = torch.from_numpy(self._query_codes[chosen])
        if self._gallery is None:
            return _Sets(queries, query_labels)
        chosen = self._chosen(self._gallery_codes, share)
        return _Sets(
            queries, query_labels, _rows_at(self._gallery, chosen), torch.from_numpy(self._gallery_codes[chosen])
        )

    def _chosen(self, codes: NDArray[np.int64], share: float) -> NDArray[np.int64]:
        if self._draws_classes:
            return self._class_prefix(codes, share)
        return np.sort(np.random.default_rng(0).permutation(len(codes))[: math.ceil(share * len(codes))])

    def _class_prefix(self, codes: NDArray[np.int64], share: float) -> NDArray[np.int64]:
        """Return the rows of the first classes in a random order of classes. The last class may be incomplete."""
        by_class = np.argsort(self._order_of_code[codes], kind="stable")
        return np.sort(by_class[: math.ceil(share * len(codes))])


def _readable(rows: Any, dim: int) -> Any:
    """Return a tensor on the CPU, or shards as they are."""
    readable = rows
    if not isinstance(rows, Shards | RowSubset):
        readable = as_tensor(rows, "embeddings", _CALL).detach().cpu()
    if len(readable.shape) != 2 or readable.shape[1] != dim:
        raise InputError(
            f"{_CALL}: the plan has dim={dim}, but the embeddings have the shape {tuple(readable.shape)}. Pass embeddings "
            "with that dim, or plan an evaluation of these."
        )
    return readable


def _rows_at(rows: Any, chosen: NDArray[np.int64]) -> Any:
    if isinstance(rows, Tensor):
        return rows[torch.from_numpy(chosen)]
    mask = np.zeros(len(rows), bool)
    mask[chosen] = True
    return RowSubset(rows, mask)


class _GeneratedSets:
    """Unit vectors in classes of 53 items, with the same separation for any number of vectors."""

    def __init__(self, plan: EvaluationPlan, separation: float) -> None:
        self._plan = plan
        total_queries = _all_queries(plan)
        self._is_one_set = total_queries == plan.gallery
        self._query_share = total_queries / (total_queries + plan.gallery)
        self.rows = plan.gallery
        if not self._is_one_set:
            self.rows += total_queries
        self.rows = min(self.rows, _rows_that_fit(plan.dim))
        self._dtype = torch.float64 if plan.gallery_bytes == 8 * plan.gallery * plan.dim else torch.float32
        self._scales = torch.arange(1, plan.dim + 1, dtype=torch.float32).pow(-DECAY)
        # Cosines of independent vectors have a variance of about 1 / directions.
        variances = self._scales.square()
        directions = float(variances.sum().square() / variances.square().sum())
        similarity_of_class = min(0.95, separation / math.sqrt(directions))
        self._noise = math.sqrt(1 / similarity_of_class - 1)

    def sample(self, rows: int) -> _Sets:
        """Return sets with this number of rows in total."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(rows) % max(1, round(rows / RELEVANT))
        labels = labels[torch.randperm(rows, generator=generator)]
        centres = self._directions(int(labels.max()) + 1, generator)
        embeddings = centres[labels].add_(self._directions(rows, generator), alpha=self._noise)
        embeddings = torch.nn.functional.normalize(embeddings, dim=1).to(self._dtype)
        if self._is_one_set:
            return _Sets(embeddings, labels)
        queries = min(rows - 1, max(1, round(self._query_share * rows)))
        return _Sets(embeddings[:queries], labels[:queries], embeddings[queries:], labels[queries:])

    def _directions(self, number: int, generator: torch.Generator) -> Tensor:
        normal = torch.randn(number, len(self._scales), generator=generator, dtype=torch.float32)
        return torch.nn.functional.normalize(normal * self._scales, dim=1)


def _all_queries(plan: EvaluationPlan) -> int:
    """Return the number of all queries, before `max_queries` draws a sample."""
    return plan.query_bytes * plan.gallery // plan.gallery_bytes


def _rows_that_fit(dim: int) -> int:
    """Return the largest number of rows that are evaluated."""
    rows = MOST_BYTES // (4 * dim)
    if rows < FEWEST_ROWS:
        raise InputError(
            f"{_CALL}: rows with dim={dim} are too long for a measurement within {MOST_BYTES / 1e6:.0f} MB. Reduce their "
            "dimension, or use the plan without a measurement."
        )
    return rows


def _timed_samples(
    plan: EvaluationPlan, sample: Callable[[int], _Sets], most_rows: int, seconds: float
) -> tuple[TimedSample, ...]:
    """Return the two largest samples that finish in time, the second twice as large. A tiny set is the only sample.

    `sample` returns sets with about this number of rows in total. `seconds` is the time for all samples.
    """
    halvings = max(0 if most_rows < FEWEST_ROWS else 1, math.ceil(math.log2(most_rows / FIRST_ROWS)))
    sizes = [math.ceil(most_rows / 2**power) for power in range(halvings, -1, -1)]
    _time_once(plan, sample(sizes[0]))  # compiles
    end = time.perf_counter() + seconds
    timed: list[TimedSample] = []
    for rows in sizes:
        # Twice the rows take at most four times as long.
        if len(timed) >= 2 and time.perf_counter() + 4 * min(timed[-1].seconds) > end:
            break
        sets = sample(rows)
        timed.append(_timed_sample(plan, sets, _timed_rounds(plan, sets, seconds, end)))
    return tuple(timed[-2:])


def _timed_rounds(plan: EvaluationPlan, sets: _Sets, seconds: float, end: float) -> tuple[float, ...]:
    """Return the seconds of one evaluation of the sets, and of more evaluations while there is time.

    `seconds` is the time for all samples, which ends at `end` on the clock of `time.perf_counter`.
    """
    durations = [_time_once(plan, sets)]
    while len(durations) < MOST_ROUNDS and time.perf_counter() + min(durations) < end:
        if len(durations) >= WANTED_ROUNDS and sum(durations) > SHARE_OF_ROUNDS * seconds:
            break
        durations.append(_time_once(plan, sets))
    return tuple(durations)


def _timed_sample(plan: EvaluationPlan, sets: _Sets, durations: tuple[float, ...]) -> TimedSample:
    """Return the sizes of the sets and the durations of their evaluations."""
    queries = len(sets.queries)
    gallery = queries if sets.gallery is None else len(sets.gallery)
    return TimedSample(_drawn_queries(plan, queries) or queries, gallery, durations)


def _time_once(plan: EvaluationPlan, sets: _Sets) -> float:
    """Return the seconds that an evaluation of the sets takes."""
    drawn = _drawn_queries(plan, len(sets.queries))
    started = time.perf_counter()
    evaluate_retrieval(
        sets.queries,
        sets.query_labels,
        sets.gallery,
        sets.gallery_labels,
        memory_mb=plan.memory_bytes / 1e6,
        max_queries=drawn,
    )
    return time.perf_counter() - started


def _drawn_queries(plan: EvaluationPlan, queries: int) -> int | None:
    """Return how many of this number of queries are drawn; None for all."""
    all_queries = _all_queries(plan)
    if plan.queries == all_queries:
        return None
    return math.ceil(plan.queries * queries / all_queries)


def _extrapolated(plan: EvaluationPlan, samples: tuple[TimedSample, ...]) -> MeasuredEvaluation:
    """Return the times of the planned evaluation; the measured times if the larger sample has its size."""
    larger = samples[-1]
    if (larger.queries, larger.gallery) == (plan.queries, plan.gallery):
        low, high = min(larger.seconds), max(larger.seconds)
        return MeasuredEvaluation(
            plan.queries, plan.gallery, plan.dim, low, high, is_extrapolated=False, samples=(larger,)
        )
    smaller = samples[0]
    seconds = min(larger.seconds)
    pairs = larger.queries * larger.gallery
    growth = math.log(seconds / min(smaller.seconds)) / math.log(pairs / (smaller.queries * smaller.gallery))
    # Pairs are the square of rows, so this is between a power of 1 and of 2 of the rows.
    growth = min(1.0, max(0.5, growth))
    low, high = (seconds * (plan.pairs / pairs) ** power for power in (growth, 1.0))
    return MeasuredEvaluation(plan.queries, plan.gallery, plan.dim, low, high, is_extrapolated=True, samples=samples)
