"""The cost of the search for repeated items, compared with the evaluation that includes it.

    python benchmarks/repeated.py [--items 31730] [--dim 512] [--per-class 53] [--json FILE]

The table shows the wall-clock seconds of `evaluate_retrieval` and of its search for copies (the hash of each row, the rows
that share a hash, and whether the numbers are coarse), for a set in which each item appears once, and for a set in which
every twentieth item appears twice. Each figure is the best of three, taken in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.distributed.processes import ALONE
from fewshot_callbacks.functional._repeated import Copies, HashedRows, hashes_of

COLUMNS = (
    Column("set"),
    Column("queries with duplicates", ",d"),
    Column("evaluation, seconds", ".2f"),
    Column("search for duplicates, seconds", ".3f"),
    Column("search / evaluation", ".1%"),
)


def look(rows: Tensor, labels: Tensor) -> Copies:
    """Search for copies in a set, as an evaluation does."""
    hashed, places = HashedRows(hashes_of(rows, torch.float32), labels.numpy()), np.arange(len(rows))
    return Copies.among(hashed, hashed, places, [], (rows, places), ALONE, as_codes=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("items", 31_730), ("dim", 512), ("per-class", 53)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_file_option(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    of_all = torch.arange(options.items) // options.per_class
    once = torch.randn(int(of_all.max()) + 1, options.dim)[of_all] + 2 * torch.randn(options.items, options.dim)
    evaluate_retrieval(once[:500], of_all[:500])  # compiles
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        for name, step in (("each item once", None), ("every 20th item twice", 20)):
            index = torch.arange(options.items)
            if step is not None:
                index[step - 1 :: step] = index[step - 2 :: step][: len(index[step - 1 :: step])]
            rows = once[index]
            labels = of_all[index]
            evaluations = []
            searches = []
            for _ in range(3):
                started = time.perf_counter()
                report = evaluate_retrieval(rows, labels)
                evaluations.append(time.perf_counter() - started)
                started = time.perf_counter()
                look(rows, labels)
                searches.append(time.perf_counter() - started)
            evaluation = min(evaluations)
            search = min(searches)
            results.add(name, report.queries_with_copies, evaluation, search, search / evaluation)


if __name__ == "__main__":
    main()
