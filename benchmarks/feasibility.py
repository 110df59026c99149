"""What J and an exact mAP ask of a machine: operations and memory, and by calculation what they ask of a free Colab.

    python benchmarks/feasibility.py

It prints the figures of docs/research/feasibility.md that need no long run: the floating-point operations of J of one
batch, by a formula and counted while it runs, its time beside that of the scatter matrices of d x d, the operations and
the memory of two evaluations, what the whole matrix of similarities takes if it is sorted at once (measured, per pair),
and what a T4 and its link would need at their peak rates. Runs of the two evaluations: benchmarks/retrieval.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import make
from retrieval import PeakMemory

from fewshot_callbacks import discriminant_ratio
from fewshot_callbacks.functional import _scatter_kernel
from fewshot_callbacks.functional.retrieval import plan_evaluation

T4_OPERATIONS = 8.1e12
"""float32 operations a second, a multiply-add counted as two: NVIDIA T4 data sheet, peak"""
T4_LINK = 15.75e9
"""bytes a second in one direction of PCI Express 3.0 with 16 lanes, the T4's link, before any protocol"""
COLAB_MEMORY = 12e9
"""bytes of main memory, as the source of docs/research/feasibility.md has it"""

SCENARIOS = {"A": 158_652, "B": 31_730}

MOVES = frozenset({
    "_to_copy", "alias", "as_strided", "clone", "constant_pad_nd", "copy_", "detach", "empty", "expand", "fill_", "full",
    "gather", "index", "index_select", "lift_fresh", "new_empty", "new_full", "new_ones", "new_zeros", "ones",
    "ones_like", "permute", "select", "slice", "sort", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    "zero_", "zeros", "zeros_like",
})  # fmt: skip
"""What moves numbers, compares them or makes constants, and computes nothing."""


class CountOperations(TorchDispatchMode):
    """Counts the floating-point operations inside the `with`: those of PyTorch, and those of the compiled kernel of J.

    Of PyTorch, one for each element of the result; for a sum, a mean or an `index_add_`, one for each element that is
    added; two for each multiply-add of a matrix product, and for each element of a length. Anything but arithmetic is not
    counted.

    PyTorch does not see inside a compiled kernel. Its source is therefore run uncompiled, on numbers that count each
    addition, subtraction, multiplication, division and power of theirs; comparisons and indices are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __enter__(self) -> CountOperations:
        self._compiled = _scatter_kernel.ratios
        _scatter_kernel.ratios = self._count_kernel
        super().__enter__()
        return self

    def __exit__(self, *of_error: Any) -> None:
        _scatter_kernel.ratios = self._compiled
        super().__exit__(*of_error)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in {"mm", "bmm", "mv"}:
            self.operations += 2 * result.numel() * args[0].shape[-1]
        elif name not in MOVES and isinstance(result, Tensor) and result.is_floating_point():
            largest = max(tensor.numel() for tensor in (result, *args) if isinstance(tensor, Tensor))
            self.operations += largest * (2 if name == "linalg_vector_norm" else 1)
        return result

    def _count_kernel(self, *given: Any) -> tuple[float, ...]:
        with np.errstate(over="ignore"):  # the hash of a label is computed modulo 2^64
            return tuple(float(value) for value in uncompiled(_scatter_kernel, self).ratios(*given))


def uncompiled(kernels: ModuleType, counter: CountOperations) -> ModuleType:
    """Return the module anew, without numba, whose float64 numbers count what is done with them."""
    assert kernels.__spec__ is not None
    spec = importlib.util.spec_from_file_location("uncompiled_kernels", kernels.__spec__.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, True
    try:
        spec.loader.exec_module(module)
    finally:
        numba.config.DISABLE_JIT = before
    module.np = CountingNumpy(counter)
    return module


class CountingNumpy:
    """NumPy, but for float64: numbers and arrays of them count."""

    def __init__(self, counter: CountOperations) -> None:
        self.float64 = counting_float(counter)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, shape: int | tuple[int, ...]) -> Any:
        array = np.empty(shape, dtype=object)
        array.fill(self.float64(0.0))  # `np.full` would make plain numbers of them
        return array


def counting_float(counter: CountOperations) -> type[float]:
    """Return a type of numbers that add one to the counter with each operation, whose result is of this type, too."""

    def counted(name: str) -> Callable[..., float]:
        plain = getattr(float, name)

        def operate(self: float, other: float) -> float:
            counter.operations += 1
            return Counting(plain(self, float(other)))

        return operate

    operators = ("add", "sub", "mul", "truediv", "pow")
    Counting: type[float] = type(
        "Counting",
        (float,),
        {name: counted(name) for one in operators for name in (f"__{one}__", f"__r{one}__")},
    )
    return Counting


def operations_of_j(items: int, dim: int, classes: int, alone: int = 0) -> int:
    """Return the floating-point operations of J and the variance ratio of a batch, which one kernel computes together.

    For each component of each item: two for the mean of its class, four for the scatter within. For each component of a
    class: one for its mean (unless it has a single item), and for the scatter between five for the centre and eight for
    the distance to it. The rest does not grow with the dimension: three for each item, one for each class, eleven in all.

    Args:
        items: Items of the batch.
        dim: Their dimension.
        classes: Classes of the batch.
        alone: Classes that have a single item.
    """
    return 6 * items * dim + (14 * classes - alone) * dim + 3 * items + classes + 11


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


class Plain(Tensor):
    """A tensor of no known kind."""


def batch_table(batch: int, dim: int) -> str:
    embeddings = torch.randn(batch, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(batch) % max(batch // 4, 1)  # four items of a class
    classes = int(labels.max()) + 1

    def by_pytorch(embeddings: Tensor, labels: Tensor) -> Tensor:
        return discriminant_ratio(embeddings.as_subclass(Plain), labels)  # which the compiled kernel leaves to PyTorch

    rows = []
    ways = {
        "ours, the compiled kernel, with the variance ratio": discriminant_ratio,
        "ours by PyTorch, as on a GPU": by_pytorch,
        "by matrices of d x d": by_scatter_matrices,
    }
    for name, run in ways.items():
        with CountOperations() as counter:
            value = float(run(embeddings, labels))
        spent = processor_seconds(lambda run=run: run(embeddings, labels))
        rows.append(
            f"| {name} | {value:.6f} | {counter.operations:,} | {counter.operations / (batch * dim):.1f} "
            f"| {1e6 * spent:.0f} | {1e6 * counter.operations / T4_OPERATIONS:.2f} |"
        )
    formula = operations_of_j(batch, dim, classes)
    return "\n".join([
        f"J of B = {batch} items of C = {classes} classes, d = {dim}: B d = {batch * dim:,}, B d^2 = {batch * dim**2:.3g}",
        f"The kernel by formula: 6 B d + 14 C d + 3 B + C + 11 = {formula:,}\n",
        "| | J | operations, counted | in B d | processor, microseconds | a T4 at its peak, microseconds (calculated) |",
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
