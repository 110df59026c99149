"""The search for thresholds: questions find their answers among the relevant scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fewshot_callbacks.engine.evaluation import PooledPairs
from fewshot_callbacks.engine.pooled.collector import SLACK
from fewshot_callbacks.engine.pooled.questions import Bools, Findings, NegativeBounds, Question
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.scale import Floats

# Number of most likely answers of a question that are closed first, with a few spaced scores. They usually settle the
# question. With 2**16, random labels of 31,730 items took a third pass; 2**19 takes a tenth longer.
LIKELY_CLOSED = 2**18
# Number of spaced scores. They bound the counts between them, whichever answers are likely.
SPACED_CLOSED = 2**8


class Accepted(NamedTuple):
    """An exact score, and the numbers of pairs that reach it."""

    score: float
    true_positives: int
    false_positives: int


def _standstill() -> RuntimeError:
    """Return the error of a search whose round has changed nothing."""
    return RuntimeError(
        "evaluate_retrieval: the thresholds cannot be settled, since neighbouring scores are now the same number: "
        "torch.set_flush_denormal(True) was called during the evaluation. Do not call it in a callback."
    )


class ThresholdSearch:
    """Finds the answers of questions about an evaluation that has run. The constructor and all methods are collective.

    An answer is a relevant score. All thresholds between two neighbouring relevant scores accept the same relevant pairs,
    and the upper score accepts the fewest negatives.

    The search knows the relevant pairs at each score of the score grid, and bounds of the number of negatives. A
    question finds its answer, or the scores that may be the answer. Then the counts at these scores are closed. If the grid
    lacks relevant scores that may be the answer, they are added to the grid instead. Then the question is asked again.

    Args:
        pooled: Counts of all pairs.
    """

    def __init__(self, pooled: PooledPairs) -> None:
        self.pooled = pooled
        self.vectors = pooled.vectors
        self.processes = pooled.vectors.processes
        self.grid_size = pooled.grid_size
        self.negatives = pooled.negatives
        # replaced by a grid with more scores where `answers` needs them
        self.grid = pooled.grid

    def answers(self, questions: Sequence[Question]) -> list[Accepted | None]:
        """Return the answer of each question; None if no relevant score is an answer.

        Each round asks all open questions, and then computes what they need: scores inside cells, or otherwise counts.
        """
        answers: list[Accepted | None] = [None] * len(questions)
        waiting = list(range(len(questions))) if self.grid.total else []
        previous: tuple[int, ...] = ()
        while waiting:
            # bounds of the negatives above each score of the grid, and of the negatives that reach it
            needs_above = sorted({questions[number].counts_above for number in waiting})
            bounds = {above: self._bounds_at_grid(above=above) for above in needs_above}
            # Each round settles a question or narrows a bound, so one of these numbers changes.
            progress = (len(waiting), len(self.grid.scores), *(int(each.open.sum()) for each in bounds.values()))
            if progress == previous or not len(self.grid.scores):
                raise _standstill()
            previous = progress
            unsettled = []
            cells = np.zeros(len(self.grid.scores) + 1, bool)
            scores_to_close = []
            for number in waiting:
                question = questions[number]
                at_grid = bounds[question.counts_above]
                findings = question.find(self.grid, at_grid)
                scores_inside = int(self.grid.inside_cells[findings.cells].sum())
                is_closed = not len(findings.open_positions)
                if is_closed and scores_inside == 0:
                    answers[number] = self._accepted_at(findings.position)
                    continue
                unsettled.append(number)
                likely = self._likely(question, at_grid, findings)
                scores_inside = int(self.grid.inside_cells[likely.cells].sum())
                # Scores inside cells come first, if all of them fit: they take no pass over the pairs, and once they are
                # known, one pass can close all counts.
                if not len(likely.open_positions) or 0 < scores_inside <= self.grid_size:
                    cells |= likely.cells
                else:
                    scores_to_close.append(at_grid.scores[self._to_close(likely.open_positions)])
            self._learn(cells, scores_to_close)
            waiting = unsettled
        return answers

    def _bounds_at_grid(self, *, above: bool) -> NegativeBounds:
        """Return bounds of the number of negatives that reach each score of the grid, or that are above it."""
        scores = np.nextafter(self.grid.scores, np.inf) if above else self.grid.scores
        fewest, most = self.negatives.bounds(scores)
        return NegativeBounds(scores, fewest, most, self.negatives.total)

    def _accepted_at(self, position: int | None) -> Accepted | None:
        """Return a score of the grid with its counts; None for no position."""
        return None if position is None else self.accepted(float(self.grid.scores[position]))

    def _likely(self, question: Question, at_grid: NegativeBounds, findings: Findings) -> Findings:
        """Return where the answer of a question is if the sample is right, and one score whose count then proves it.

        Without a count below the cut-off of the collected pairs, the answer may be anywhere below it. A pass that
        counts at all of these scores takes several times as long as a pass that counts at high scores, which few
        negatives reach.

        Returns:
            The given findings, if there is no sample, or if it leaves no lower score open.
        """
        if not self._can_guess(at_grid, findings):
            return findings
        estimates = self.negatives.estimate(at_grid.scores)
        wanted = question.wanted(self.grid, estimates.astype(np.float64), self.negatives.total)
        enough = math.ceil(SLACK * max(wanted))
        reached = np.flatnonzero(estimates >= enough)
        if not len(reached) or findings.open_positions.min() >= reached[-1]:
            return findings
        proving = int(reached[-1])
        fewest = at_grid.fewest.copy()
        fewest[: proving + 1] = np.maximum(fewest[: proving + 1], enough)
        likely = question.find(self.grid, at_grid._replace(fewest=fewest))
        return likely._replace(open_positions=np.append(likely.open_positions, proving))

    def _can_guess(self, at_grid: NegativeBounds, findings: Findings) -> bool:
        """Return whether a score below the cut-off is open, no pass has counted there yet, and there is a sample."""
        if self.negatives.passes > 1 or not len(self.negatives.sample.estimates) or not len(findings.open_positions):
            return False
        lowest_open = at_grid.scores[findings.open_positions].min()
        return bool(lowest_open < self.negatives.cutoff + self.negatives.error_bound)

    def _to_close(self, open_positions: Ints) -> Ints:
        """Return the positions whose counts are closed first: the most likely answers, and a few spaced ones."""
        number = min(len(open_positions), SPACED_CLOSED)
        spaced = open_positions[np.linspace(0, len(open_positions) - 1, number).astype(np.int64)]
        return np.append(spaced, open_positions[: min(LIKELY_CLOSED, self.grid_size)])

    def _learn(self, cells: Bools, scores_to_close: Sequence[Floats]) -> None:
        """Add the scores inside the chosen cells to the grid; if no cell is chosen, close counts of negatives."""
        if cells.any():
            scores_of_relevant = self.pooled.relevant.ascending
            self.grid = self.grid.refined(cells, scores_of_relevant, self.grid_size, self.processes)
        elif scores_to_close:
            self.negatives.close(np.unique(np.concatenate(scores_to_close)))

    def accepted(self, score: float) -> Accepted:
        """Return the numbers of relevant pairs and of negatives that reach an exact score."""
        if math.isinf(score):
            return Accepted(score, 0, 0) if score > 0 else Accepted(score, self.grid.total, self.negatives.total)
        grid = self.grid
        if score in grid.scores:
            true_positives = grid.reaching[grid.scores == score]
        else:
            true_positives = self.pooled.relevant_reaching(np.array([score]))
        return Accepted(score, int(true_positives[0]), self.negatives_reaching(score))

    def negatives_reaching(self, score: float) -> int:
        """Return the number of negatives that reach an exact score."""
        scores = np.array([score])
        self.negatives.close(scores)
        fewest, _ = self.negatives.bounds(scores)
        return int(fewest[0])
