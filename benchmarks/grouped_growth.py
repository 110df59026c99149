"""How the cost of Grouped Recall grows with the number of items and with the size of the groups.

    python benchmarks/grouped_growth.py --threads 1

Zhdanov and Karpukhin, who propose the metric, count n log(n / r) operations for r groups, with a search tree in each group.
`grouped_recall` instead compares all n^2 / r pairs inside the groups. For groups of a fixed size this is also linear in n,
but it is linear in the group size, and the cost of a tree is logarithmic in it.

Times are processor seconds, so that a busy machine affects them little; all sizes take turns in one process. Each row is
about one of three kinds of growth: more items in groups of a fixed size, more items in one group of all classes (plain
Recall@1), or larger groups of the same items. The last three columns are multiples of the first row of the same kind. The
multiple of the times is the median over rounds of the ratio within a round, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import make
from _results import Cell, Column, Results, add_file_option
from retrieval import spread

from fewshot_callbacks import grouped_recall

COLUMNS = (
    Column("what grows"),
    Column("items n", ",d"),
    Column("classes per group", ",d"),
    Column("groups r", ",d"),
    Column("processor seconds", ".3f"),
    Column("x first", ".2f"),
    Column("n^2 / r, x first", ".2f"),
    Column("n log(n / r), x first", ".2f"),
)


@dataclass(frozen=True)
class Size:
    """One row: a set of items, and the labels in each group."""

    items: int
    classes: int
    group_size: int

    @property
    def groups(self) -> int:
        return self.classes // self.group_size

    @property
    def pairs_in_groups(self) -> float:
        return self.items**2 / self.groups

    @property
    def tree_operations(self) -> float:
        return self.items * math.log(self.items / self.groups)


def processor_seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def growth(sets: Mapping[int, tuple[Tensor, Tensor]], sizes: Sequence[Size], rounds: int) -> dict[Size, list[float]]:
    """Return the processor seconds of each size in each round; the sizes take turns."""
    taken: dict[Size, list[float]] = {size: [] for size in sizes}
    for number in range(-1, rounds):  # the first round is a warm-up and is dropped
        for size in sizes:
            embeddings, labels = sets[size.items]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one group is plain recall and has no interval
                spent = processor_seconds(lambda: grouped_recall(embeddings, labels, label_groups=size.group_size))  # noqa: B023 - called at once
            if number >= 0:
                taken[size].append(spent)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return taken


def lines(what: str, taken: Mapping[Size, Sequence[float]]) -> Iterator[tuple[Cell, ...]]:
    """Yield the rows of one kind of growth; the last three cells are multiples of the first row."""
    first = next(iter(taken))
    for size, spent in taken.items():
        ratios = [mine / base for mine, base in zip(spent, taken[first], strict=True)]
        yield (
            what,
            size.items,
            size.group_size,
            size.groups,
            statistics.median(spent),
            spread(ratios),
            size.pairs_in_groups / first.pairs_in_groups,
            size.tree_operations / first.tree_operations,
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[4000, 8000, 16000, 32000], metavar="N")
    parser.add_argument("--per-class", type=int, default=50, help="items of each class")
    parser.add_argument("--group-size", type=int, default=10, help="classes in a group, while the items grow")
    parser.add_argument(
        "--group-sizes",
        type=int,
        nargs="+",
        default=[5, 10, 20, 40, 80, 160],
        help="classes in a group, of --items-of-groups items",
    )
    parser.add_argument("--items-of-groups", type=int, default=16000, metavar="N")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--difficulty", default="middling")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_file_option(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)

    def size(items: int, group_size: int | None) -> Size:
        classes = round(items / options.per_class)
        return Size(items, classes, group_size or classes)

    sets = {
        items: make(items, options.dim, options.difficulty, per_class=options.per_class)
        for items in {*options.items, options.items_of_groups}
    }
    kinds = {
        f"items, groups of {options.group_size} classes": [size(n, options.group_size) for n in options.items],
        "items, one group of all classes": [size(n, None) for n in options.items],
        "groups": [size(options.items_of_groups, number) for number in options.group_sizes],
    }
    print(f"d = {options.dim}, {options.per_class} items a class, {options.rounds} rounds\n")
    with Results(COLUMNS, threads=options.threads, file=options.json) as results:
        for what, sizes in kinds.items():
            for line in lines(what, growth(sets, sizes, options.rounds)):
                results.add(*line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
