"""What J and an exact mAP ask of a machine: operations and memory, and by calculation what they ask of a free Colab.

    python benchmarks/feasibility.py

It prints the figures of docs/feasibility.md that need no long run: the floating-point operations of J of one batch (counted
as PyTorch carries them out), its time beside that of the scatter matrices of d x d, the operations and the memory of two
evaluations, what the whole matrix of similarities takes if it is sorted at once (measured, per pair), and what a T4 and
its link would need at their peak rates. Runs of the two evaluations: benchmarks/retrieval.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import make
from retrieval import PeakMemory

from fewshot_callbacks import discriminant_ratio
from fewshot_callbacks.functional.retrieval import plan_evaluation

T4_OPERATIONS = 8.1e12
"""float32 operations a second, a multiply-add counted as two: NVIDIA T4 data sheet, peak"""
T4_LINK = 15.75e9
"""bytes a second in one direction of PCI Express 3.0 with 16 lanes, the T4's link, before any protocol"""
COLAB_MEMORY = 12e9
"""bytes of main memory, as the source of docs/feasibility.md has it"""

SCENARIOS = {"A": 158_652, "B": 31_730}

MOVES = frozenset({
    "_to_copy", "alias", "as_strided", "clone", "constant_pad_nd", "copy_", "detach", "empty", "expand", "fill_", "full",
    "gather", "index", "index_select", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute",
    "select", "slice", "sort", "squeeze", "t", "transpose", "unsqueeze", "view", "zero_", "zeros", "zeros_like",
})  # fmt: skip
"""What moves numbers, compares them or makes constants, and computes nothing."""


class CountOperations(TorchDispatchMode):
    """Counts the floating-point operations of what PyTorch carries out inside the `with`, from above.

    One for each element of the result; for a sum, a mean or an `index_add_`, one for each element that is added; two
    for each multiply-add of a matrix product. Anything but arithmetic is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in {"mm", "bmm"}:
            self.operations += 2 * result.numel() * args[0].shape[-1]
        elif name not in MOVES and isinstance(result, Tensor) and result.is_floating_point():
            self.operations += max(tensor.numel() for tensor in (result, *args) if isinstance(tensor, Tensor))
        return result


def by_scatter_matrices(embeddings: Tensor, labels: Tensor) -> Tensor:
    """J as the ratio of the traces of both scatter matrices, which are made: O(B d^2)."""
    centre = embeddings.mean(dim=0)
    within = between = embeddings.new_zeros(embeddings.shape[1], embeddings.shape[1])
    for label in labels.unique():
        members = embeddings[labels == label]
        mean = members.mean(dim=0)
        within = within + (members - mean).T @ (members - mean)
        between = between + len(members) * torch.outer(mean - centre, mean - centre)
    return between.trace() / within.trace()


def whole_matrix(embeddings: Tensor, labels: Tensor) -> float:
    """The mAP by the matrix of all similarities at once: sort it, map the relevance, add up the precision."""
    scores = embeddings @ embeddings.T
    scores.fill_diagonal_(-math.inf)
    ranking = scores.argsort(dim=1, descending=True)
    relevant = labels[ranking] == labels[:, None]
    relevant[:, -1] = False  # the query itself
    precision = relevant.cumsum(dim=1) / torch.arange(1, len(labels) + 1)
    return float(((precision * relevant).sum(dim=1) / relevant.sum(dim=1)).mean())


def processor_seconds(run: Callable[[], object], repeats: int = 50) -> float:
    times = []
    for _ in range(repeats + 3):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return statistics.median(times[3:])


def batch_table(batch: int, dim: int) -> str:
    embeddings = torch.randn(batch, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(batch) % max(batch // 4, 1)  # four items of a class
    rows = []
    for name, run in (("ours", discriminant_ratio), ("by matrices of d x d", by_scatter_matrices)):
        with CountOperations() as counter:
            value = float(run(embeddings, labels))
        spent = processor_seconds(lambda run=run: run(embeddings, labels))
        rows.append(
            f"| {name} | {value:.6f} | {counter.operations:.3g} | {counter.operations / (batch * dim):.1f} "
            f"| {1e6 * spent:.0f} | {1e6 * counter.operations / T4_OPERATIONS:.2f} |"
        )
    classes = int(labels.max()) + 1
    return "\n".join([
        f"J of B = {batch} items of {classes} classes, d = {dim}: B d = {batch * dim:,}, B d^2 = {batch * dim**2:.3g}\n",
        "| | J | operations | in B d | processor, microseconds | a T4 at its peak, microseconds (calculated) |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
    ])  # fmt: skip


def evaluation_table(dim: int) -> str:
    lines = [
        "| all against all | pairs | multiply-adds | floating-point operations | T4 at its peak, s | matrix, GB "
        "| embeddings, MB | over the link, ms | ours beyond them, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, items in SCENARIOS.items():
        plan = plan_evaluation(items, items, dim)
        cells = (
            f"{name}, N = {items:,}", f"{plan.pairs:,}", f"{plan.floating_point_operations / 2:.3g}",
            f"{plan.floating_point_operations:.3g}", f"{plan.floating_point_operations / T4_OPERATIONS:.3f}",
            f"{plan.matrix_bytes / 1e9:.2f}", f"{plan.query_bytes / 1e6:.0f}", f"{1e3 * plan.query_bytes / T4_LINK:.1f}",
            f"{min(plan.needed_bytes, plan.memory_bytes) / 1e6:.0f} of {plan.memory_bytes / 1e6:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def matrix_table(items: int, dim: int) -> str:
    embeddings, labels = make(items, dim, "middling")
    whole_matrix(embeddings[:200], labels[:200])
    with PeakMemory(torch.device("cpu")) as memory:
        value = whole_matrix(embeddings, labels)
    if memory.mb is None:
        return "The memory of the whole matrix can only be measured on Linux."
    per_pair = memory.mb * 1e6 / items**2
    lines = [
        f"The whole matrix sorted at once, mAP {value:.4f} of N = {items:,}: {memory.mb:,.0f} MB at most, {per_pair:.1f} "
        "bytes for each pair (measured). By calculation from that:\n",
        f"| | matrix alone, GB | with its sorting, GB | of {COLAB_MEMORY / 1e9:.0f} GB |",
        "| --- | --- | --- | --- |",
    ]
    for name, count in SCENARIOS.items():
        needed = per_pair * count**2
        lines.append(
            f"| {name}, N = {count:,} | {4 * count**2 / 1e9:.2f} | {needed / 1e9:,.1f} | {needed / COLAB_MEMORY:.1f} x |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--items", type=int, default=5000, help="for the memory of the whole matrix, 0.1 to 1 GB")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print(batch_table(options.batch, options.dim), evaluation_table(options.dim), sep="\n\n", flush=True)
    print("\n" + matrix_table(options.items, options.dim))
    return 0


if __name__ == "__main__":
    sys.exit(main())
