"""The time of an evaluation on this machine, from evaluations of smaller sets that are timed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.distinct import MOST_MEMORY, MOST_PAIRS, share_of_budget
from fewshot_callbacks.engine.duplicates import row_hashes
from fewshot_callbacks.engine.layout import plan_layout
from fewshot_callbacks.engine.relevance import Lists, Relevance
from fewshot_callbacks.engine.twins import TwinGroups, UnitedLists
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._labels import as_labels, join
from fewshot_callbacks.functional._reading import as_tensor
from fewshot_callbacks.functional.retrieval.cost import EvaluationPlan
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.sources import RowSubset, Shards

Difficulty = Literal["well-trained", "hard"]
"""How well generated embeddings separate their classes."""

_CALL = "measure_evaluation"
# The rows of the smallest set that is evaluated.
FIRST_ROWS = 2000
# The number of sizes that a constant, a part for each row and a part for each pair can be told apart by.
FEWEST_SIZES = 3
# Each size is evaluated several times, and the shortest time counts: the first evaluation may compile loops or ask the
# system for memory, and others use the machine.
WANTED_ROUNDS = 2
MOST_ROUNDS = 5
# The share of the time that further rounds of one size may take.
SHARE_OF_ROUNDS = 0.05
# The time of a set of twice the size grows as it has grown before, or by a fifth more, and at most as its pairs do.
GROWTH_MARGIN = 1.2
# The most bytes of the embeddings that are evaluated: generating or reading them takes part of the time.
MOST_BYTES = 2**28
# With fewer classes in a sample, rows are drawn instead of classes.
FEWEST_CLASSES = 20
# The relevant items of a generated query.
RELEVANT = 53
# The distance between the similarities of a class and those of other classes, in standard deviations of the latter: the mAP
# of 16,000 items in 512 dimensions is 0.997 with the first, and 0.14 with the second.
SEPARATIONS: dict[Difficulty, float] = {"well-trained": 5.0, "hard": 1.7}
# How fast the variance of generated embeddings falls over the directions, as in the output of trained networks.
DECAY = 0.35


@equal_with_nan
@dataclass(frozen=True)
class TimedSample:
    """An evaluation that was timed."""

    queries: int
    """queries that were evaluated"""
    gallery: int
    rows: int
    """rows of the sets: those of all queries and of the gallery, or of one set"""
    compared_pairs: int
    """pairs of distinct rows, if equal rows are compared once; else all pairs"""
    seconds: tuple[float, ...]
    """duration of each evaluation"""


@equal_with_nan
@dataclass(frozen=True)
class MeasuredEvaluation:
    """The time of an evaluation on this machine: measured, or extrapolated from smaller sets.

    Examples:
        >>> sample = TimedSample(2000, 2000, 2000, 2000**2, (0.2, 0.1))
        >>> print(MeasuredEvaluation(20_000, 20_000, 64, 5.0, 10.0, is_extrapolated=True, samples=(sample,)))
        5.0 to 10.0 s for 20,000 queries against 20,000 items, extrapolated from up to 2,000 against 2,000
    """

    queries: int
    gallery: int
    dim: int
    low_seconds: float
    """shortest time to expect"""
    high_seconds: float
    """longest time to expect"""
    is_extrapolated: bool
    """whether these times follow from smaller sets, at least in part; else they were measured"""
    samples: tuple[TimedSample, ...]
    """the evaluations that were timed"""

    def __str__(self) -> str:
        times = f"{self.low_seconds:,.1f} s"
        if self.high_seconds > self.low_seconds:
            times = f"{self.low_seconds:,.1f} to {self.high_seconds:,.1f} s"
        sizes = f"{self.queries:,} queries against {self.gallery:,} items"
        if not self.is_extrapolated:
            return f"{times} for {sizes}, as measured"
        largest = max(self.samples, key=lambda sample: sample.rows)
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
    """Return the seconds that an evaluation with all default metrics takes on this machine.

    Smaller sets are evaluated, each twice as large as the one before, with the threads and the memory budget of the real
    evaluation. If that one ends in time, it is the last of them, and its own times are returned. Else a constant, a part
    for each row and a part for each pair of rows are fitted to the times. The range reaches from this fit to the time of
    the largest set in proportion to its pairs. If the budget is too small for the counters of one set, its longest time is
    doubled: each product may be computed twice. Compiling is not counted.

    With embeddings, whole classes are drawn, so that classes keep their sizes. A sample in which fewer than 20 classes fit
    holds random rows instead, and its classes shrink with it. Equal rows are rarer in a sample than in the set. So distinct
    rows are counted at each size, and their number is extrapolated by a power of the number of rows. If the budget is too
    small for them and for the lists of rows that stand in several classes, all rows will be compared.

    Without embeddings, classes of 53 items are generated.

    Args:
        plan: The evaluation, from `plan_evaluation`.
        queries: (queries, dim) embeddings, the rows of the evaluation or a part of them: a tensor, an array, or shards.
            Of shards, rows are drawn from all files.
        query_labels: (queries,) labels, integers or strings.
        gallery: (gallery, dim) embeddings; None for one set.
        gallery_labels: (gallery,) labels.
        difficulty: How well generated embeddings separate their classes, `well-trained` or `hard`; by default both, so that
            the range covers them.
        seconds: Time for the measurement, about, beyond compiling.

    Returns:
        A frozen result, whose text names the range and its origin.

    Raises:
        ValueError: If `seconds` is not positive, the difficulty is unknown or stands beside embeddings, embeddings have
            no labels or another dim than the plan, or rows are too long to be generated.

    Examples:
        >>> from fewshot_callbacks.functional import plan_evaluation
        >>> measured = measure_evaluation(plan_evaluation(1000, 1000, 16), difficulty="hard")
        >>> measured.is_extrapolated, 0 < measured.low_seconds <= measured.high_seconds
        (False, True)
    """
    _refuse_wrong_arguments(difficulty, seconds)
    if queries is not None:
        if difficulty is not None:
            raise InputError(f"{_CALL}: difficulty is for generated embeddings. Leave it out beside embeddings.")
        sets = _GivenSets(plan, queries, query_labels, gallery, gallery_labels)
        samples = _timed_samples(plan, sets.sample, sets.rows, seconds)
        return _extrapolated(plan, samples, sets.relevant_of_a_query, distinct_rows_fit=sets.distinct_rows_fit())
    difficulties = get_args(Difficulty) if difficulty is None else (difficulty,)
    by_difficulty = []
    for name in difficulties:
        generated = _GeneratedSets(plan, SEPARATIONS[name])
        samples = _timed_samples(plan, generated.sample, generated.rows, seconds / len(difficulties))
        by_difficulty.append(_extrapolated(plan, samples, RELEVANT, distinct_rows_fit=True))
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
    """Queries and a gallery with their labels; the gallery of one set is None."""

    queries: Any
    query_labels: Any
    gallery: Any | None = None
    gallery_labels: Any | None = None

    @property
    def compared_pairs(self) -> int:
        """Pairs of distinct rows, if the engine compares equal rows once; else all pairs."""
        gallery = self.queries if self.gallery is None else self.gallery
        pairs = len(self.queries) * len(gallery)
        distinct_pairs = _distinct_rows(self.queries) * _distinct_rows(gallery)
        return distinct_pairs if distinct_pairs <= MOST_PAIRS * pairs else pairs


def _distinct_rows(rows: Any) -> int:
    """Return the number of distinct rows; the engine takes all rows in files for distinct."""
    if isinstance(rows, RowSubset):
        return len(rows)
    return len(np.unique(_hashes(rows)))


def _hashes(rows: Tensor) -> NDArray[Any]:
    """Return a hash of each row."""
    return row_hashes(rows.float().contiguous().numpy())


class _GivenSets:
    """Samples of the user's embeddings, of whole classes where many enough fit."""

    def __init__(
        self, plan: EvaluationPlan, queries: Any, query_labels: Any, gallery: Any | None, gallery_labels: Any | None
    ) -> None:
        if query_labels is None or (gallery is not None and gallery_labels is None):
            raise InputError(
                f"{_CALL}: embeddings need labels, which decide what is counted. Pass a label for each row."
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
        classes = int(codes.max()) + 1
        candidates = self._query_codes if self._gallery is None else self._gallery_codes
        self._plan = plan
        self._class_sizes = np.bincount(candidates, minlength=classes)
        # number of relevant items of a query, on average
        self.relevant_of_a_query = float(self._class_sizes[self._query_codes].mean())
        if self._gallery is None:  # a query is not relevant to itself
            self.relevant_of_a_query -= 1
        self._order_of_code = np.random.default_rng(0).permutation(classes)
        first = self._class_prefix(self._query_codes, min(1.0, FIRST_ROWS / self.rows))
        self._draws_classes = len(np.unique(self._query_codes[first])) >= FEWEST_CLASSES

    def distinct_rows_fit(self) -> bool:
        """Return whether the budget has room to compare equal rows once.

        The engine copies the distinct rows, and has a list of relevant items for each combination of classes that a row
        stands in. Rows in files are all taken for distinct, and are not copied.
        """
        if isinstance(self._queries, RowSubset | Shards) or isinstance(self._gallery, RowSubset | Shards):
            return True
        rows = TwinGroups.of([_hashes(self._queries)])
        items = rows if self._gallery is None else TwinGroups.of([_hashes(self._gallery)])
        item_codes = self._query_codes if self._gallery is None else self._gallery_codes
        relevance = Relevance(
            Lists.of_labels(self._query_codes, item_codes), np.full(len(self._query_codes), -1, np.int32)
        )
        united = UnitedLists.of(relevance, rows, items.group_of.astype(np.int32))
        copied = len(rows.first) + (0 if self._gallery is None else len(items.first))
        row_bytes: int = self._plan.dim * max(4, self._queries.element_size())  # half precision is copied as float32
        # The plan may be of more rows than these.
        given = len(self._queries if self._gallery is None else self._gallery)
        share = share_of_budget(float(row_bytes * copied), united, self._plan.memory_bytes)
        return share * self._plan.gallery / given <= MOST_MEMORY

    def sample(self, rows: int) -> _Sets:
        """Return about so many rows in all."""
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
        """Return the rows of the first classes in a random order; the last class may be cut."""
        by_class = np.argsort(self._order_of_code[codes], kind="stable")
        return np.sort(by_class[: math.ceil(share * len(codes))])


def _readable(rows: Any, dim: int) -> Any:
    """Return a tensor on the CPU, or shards as they are."""
    readable = rows
    if not isinstance(rows, Shards | RowSubset):
        readable = as_tensor(rows, "embeddings", _CALL).detach().cpu()
    if len(readable.shape) != 2 or readable.shape[1] != dim:
        raise InputError(
            f"{_CALL}: the plan is of embeddings with dim={dim}; these have the shape {tuple(readable.shape)}. Pass "
            "embeddings of that dim, or plan an evaluation of these."
        )
    return readable


def _rows_at(rows: Any, chosen: NDArray[np.int64]) -> Any:
    if isinstance(rows, Tensor):
        return rows[torch.from_numpy(chosen)]
    mask = np.zeros(len(rows), bool)
    mask[chosen] = True
    return RowSubset(rows, mask)


class _GeneratedSets:
    """Unit vectors in classes of 53 items, at a fixed separation whatever their number."""

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
        # Cosines of independent vectors have about the variance 1 / directions.
        variances = self._scales.square()
        directions = float(variances.sum().square() / variances.square().sum())
        similarity_of_class = min(0.95, separation / math.sqrt(directions))
        self._noise = math.sqrt(1 / similarity_of_class - 1)

    def sample(self, rows: int) -> _Sets:
        """Return so many rows in all."""
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
    """Return the number of all queries, of which `max_queries` may draw a part."""
    return plan.query_bytes * plan.gallery // plan.gallery_bytes


def _rows_that_fit(dim: int) -> int:
    """Return the most rows that are evaluated.

    Raises:
        ValueError: If a row is so long that fewer than 64 would be.
    """
    rows = MOST_BYTES // (4 * dim)
    if rows < 64:
        raise InputError(
            f"{_CALL}: rows of dim={dim} are too long to be measured within {MOST_BYTES / 1e6:.0f} MB. Reduce their "
            "dimension, or leave the plan without a measurement."
        )
    return rows


def _timed_samples(
    plan: EvaluationPlan, sample: Callable[[int], _Sets], most_rows: int, seconds: float
) -> tuple[TimedSample, ...]:
    """Return samples of growing size with their times, until the next one would not end in time.

    Args:
        plan: The evaluation.
        sample: Returns sets of about so many rows in all.
        most_rows: The rows of the largest sample.
        seconds: The time for all samples.
    """
    rows = min(FIRST_ROWS, most_rows)
    _time_once(plan, sample(rows))  # compiles
    end = time.perf_counter() + seconds
    timed: list[TimedSample] = []
    while True:
        generation_started = time.perf_counter()
        sets = sample(rows)
        generated = time.perf_counter() - generation_started
        timed.append(_timed_sample(plan, sets, _timed_rounds(plan, sets, seconds, end)))
        next_size = 2 * generated + _growth(timed) * min(timed[-1].seconds)
        is_last = next_size > end - time.perf_counter()
        if len(timed) < FEWEST_SIZES:
            # Another program may have taken the processor for a while: three sizes are worth more than the time limit.
            is_last = next_size > seconds
        if rows == most_rows or is_last:
            return tuple(timed)
        rows = min(2 * rows, most_rows)


def _timed_rounds(plan: EvaluationPlan, sets: _Sets, seconds: float, end: float) -> tuple[float, ...]:
    """Evaluate some sets at least once, and further times while that ends in time; return the seconds of each time.

    Args:
        plan: The evaluation.
        sets: The sets.
        seconds: The time for all samples.
        end: When that time is over.
    """
    durations = [_time_once(plan, sets)]
    while len(durations) < MOST_ROUNDS and time.perf_counter() + min(durations) < end:
        if len(durations) >= WANTED_ROUNDS and sum(durations) > SHARE_OF_ROUNDS * seconds:
            break
        durations.append(_time_once(plan, sets))
    return tuple(durations)


def _growth(timed: Sequence[TimedSample]) -> float:
    """Return how many times longer a set of twice the size may take than the last one."""
    if len(timed) < FEWEST_SIZES:
        return 4.0
    return min(4.0, GROWTH_MARGIN * min(timed[-1].seconds) / min(timed[-2].seconds))


def _timed_sample(plan: EvaluationPlan, sets: _Sets, durations: tuple[float, ...]) -> TimedSample:
    """Return the sizes of some sets beside the durations of their evaluation."""
    queries = len(sets.queries)
    gallery = queries
    rows = queries
    if sets.gallery is not None:
        gallery = len(sets.gallery)
        rows = queries + gallery
    evaluated = _drawn_queries(plan, queries) or queries
    return TimedSample(evaluated, gallery, rows, round(sets.compared_pairs * evaluated / queries), durations)


def _time_once(plan: EvaluationPlan, sets: _Sets) -> float:
    """Evaluate some sets, and return the seconds."""
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
    """Return how many of so many queries are drawn; None for all."""
    all_queries = _all_queries(plan)
    if plan.queries == all_queries:
        return None
    return math.ceil(plan.queries * queries / all_queries)


def _extrapolated(
    plan: EvaluationPlan,
    samples: tuple[TimedSample, ...],
    relevant_of_a_query: float,
    *,
    distinct_rows_fit: bool,
) -> MeasuredEvaluation:
    """Return the times of the planned evaluation: as measured, if a sample has its size.

    Args:
        plan: The evaluation.
        samples: Smaller evaluations.
        relevant_of_a_query: Relevant items of a query, on average.
        distinct_rows_fit: Whether the budget has room to compare equal rows once.
    """
    largest = samples[-1]
    if (largest.queries, largest.gallery) == (plan.queries, plan.gallery):
        low, high = min(largest.seconds), max(largest.seconds)
        return MeasuredEvaluation(
            plan.queries, plan.gallery, plan.dim, low, high, is_extrapolated=False, samples=samples
        )
    is_one_set = _all_queries(plan) == plan.gallery
    rows = plan.gallery if is_one_set else _all_queries(plan) + plan.gallery
    pairs = _extrapolated_pairs(samples, rows, plan.pairs) if distinct_rows_fit else float(plan.pairs)
    fitted = _fitted_seconds(samples, rows, pairs)
    in_proportion = min(largest.seconds) * pairs / largest.compared_pairs
    high = max(fitted, in_proportion)
    compares_all_rows = not distinct_rows_fit or largest.compared_pairs == largest.queries * largest.gallery
    if is_one_set and compares_all_rows and _takes_batches(plan, relevant_of_a_query):
        high *= 2
    low = min(fitted, in_proportion)
    return MeasuredEvaluation(plan.queries, plan.gallery, plan.dim, low, high, is_extrapolated=True, samples=samples)


def _extrapolated_pairs(samples: Sequence[TimedSample], rows: int, pairs: int) -> float:
    """Return the pairs that are compared among so many rows: of all pairs, a share that falls as a power of the rows."""
    shares = [sample.compared_pairs / (sample.queries * sample.gallery) for sample in samples]
    if shares[-1] > MOST_PAIRS or len(samples) == 1:
        return pairs * shares[-1]
    growth = math.log(samples[-1].rows / samples[-2].rows)
    exponent = min(0.0, math.log(shares[-1] / shares[-2]) / growth)
    # Pairs of distinct rows never become fewer: their share falls at most as fast as all pairs grow.
    exponent = max(exponent, -2.0)
    return pairs * shares[-1] * math.pow(rows / samples[-1].rows, exponent)


def _fitted_seconds(samples: Sequence[TimedSample], rows: float, pairs: float) -> float:
    """Return the seconds of so many rows and pairs, by the best fit to the samples without negative parts."""
    times = np.array([min(sample.seconds) for sample in samples])
    parts = np.array([(1.0, sample.rows, sample.compared_pairs) for sample in samples])
    relative = parts / times[:, None]  # each sample counts by its relative error
    best_error = math.inf
    best = np.zeros(3)
    subsets = itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in (1, 2, 3))
    for subset in map(list, subsets):
        if len(subset) > len(samples):
            continue
        scale = relative[:, subset].max(axis=0)
        found = np.linalg.lstsq(relative[:, subset] / scale, np.ones(len(samples)), rcond=None)[0] / scale
        error = float(((relative[:, subset] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < best_error:
            best_error = error
            best = np.zeros(3)
            best[subset] = found
    return float(best @ (1.0, rows, pairs))


def _takes_batches(plan: EvaluationPlan, relevant_of_a_query: float) -> bool:
    """Return whether the counters of all queries of one set exceed the budget."""
    relevant = math.ceil(relevant_of_a_query * plan.queries)
    memory = max(plan.memory_bytes, plan.least_bytes)
    layout = plan_layout(memory, plan.queries, plan.gallery, plan.dim, relevant, threads=torch.get_num_threads())
    return layout.batch_counters < relevant + plan.queries
