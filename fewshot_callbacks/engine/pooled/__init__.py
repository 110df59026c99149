"""Counts of all pairs, for one threshold for all queries: bounds at any score, and the search that makes them equal.

The scores of all relevant pairs are known (`grid.py`). The pass that counts ranks also collects the highest negatives
(`collector.py`), as many as a sample predicts to matter (`sample.py`). A histogram of the estimates may give bounds below
them.

`Negatives.bounds` turns both into bounds of the number of negatives that reach a score. `Negatives.close` makes the bounds
equal at given scores: by exact scores of the collected pairs near them, or by one more pass. So `fewest <= truth <= most`
holds at any time (`bounds.py`, `negatives.py`). The sample, the cut-off and the histogram only affect time, never a
result.

A question asks for one relevant score, such as the score with the best F1 (`questions.py`). The search closes the bounds on
which the answer depends (`search.py`). Areas under curves depend on all relevant scores (`areas.py`).

In several processes, each has its own collected pairs, histogram and known scores. Bounds are summed over all processes.
"""
