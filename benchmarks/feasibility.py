"""The operations and memory that J and an exact mAP need, measured here and calculated for a free Colab machine.

    python benchmarks/feasibility.py

It prints the figures of docs/research/feasibility.md that need no long run: the floating-point operations of J for one
batch, by a formula and counted while it runs; the time of J compared with the d x d scatter matrices; the operations and the
memory of two evaluations; the memory per pair of sorting the whole similarity matrix at once (measured); and the time on
a T4 and its link at their peak rates. benchmarks/retrieval.py runs the two evaluations.
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
"""bytes of main memory, from the source given in docs/research/feasibility.md"""

SCENARIOS = {"A": 158_652, "B": 31_730}

MOVES = frozenset({
    "_to_copy", "alias", "as_strided", "clone", "constant_pad_nd", "copy_", "detach", "empty", "expand", "fill_", "full",
    "gather", "index", "index_select", "lift_fresh", "new_empty", "new_full", "new_ones", "new_zeros", "ones",
    "ones_like", "permute", "select", "slice", "sort", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    "zero_", "zeros", "zeros_like",
})  # fmt: skip
"""Operations that only move or compare numbers, or create constants."""


class CountOperations(TorchDispatchMode):
    """Counts the floating-point operations inside the `with`, both in PyTorch and in the compiled kernel of J.

    A PyTorch operation counts one per element of the result. A sum, a mean or an `index_add_` counts one per added element.
    A matrix product counts two per multiply-add, and a norm two per element. Only arithmetic is counted.

    PyTorch does not see inside a compiled kernel. The source of the kernel therefore runs uncompiled, on numbers that count
    each addition, subtraction, multiplication, division and power; comparisons and indices are not counted.
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
    """Return a fresh copy of the module without numba, in which float64 numbers count their operations."""
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
    """NumPy, except that float64 numbers and arrays count their operations."""

    def __init__(self, counter: CountOperations) -> None:
        self.float64 = counting_float(counter)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, shape: int | tuple[int, ...]) -> Any:
        array = np.empty(shape, dtype=object)
        array.fill(self.float64(0.0))  # `np.full` would convert them to plain numbers
        return array


def counting_float(counter: CountOperations) -> type[float]:
    """Return a number type that adds one to the counter with each operation; the results have this type, too."""

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
    """Return the floating-point operations of J and the variance ratio of a batch; one kernel computes both.

    Each component of each item takes two operations for the mean of its class and four for the scatter within. Each
    component of a class takes one for its mean (unless it has a single item), and for the scatter between it takes five for
    the centre and eight for the distance to it. The rest does not grow with the dimension: three operations per item, one
    per class, and eleven in total.

    Args:
        items: Number of items in the batch.
        dim: Dimension of the embeddings.
        classes: Number of classes in the batch.
        alone: Number of classes with a single item.
    """
    return 6 * items * dim + (14 * classes - alone) * dim + 3 * items + classes + 11


def by_scatter_matrices(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return J as the ratio of the traces of both scatter matrices, which are computed in full: O(B d^2)."""
    centre = embeddings.mean(dim=0)
    within = between = embeddings.new_zeros(embeddings.shape[1], embeddings.shape[1])
    for label in labels.unique():
        members = embeddings[labels == label]
        mean = members.mean(dim=0)
        within = within + (members - mean).T @ (members - mean)
        between = between + len(members) * torch.outer(mean - centre, mean - centre)
    return between.trace() / within.trace()


def whole_matrix(embeddings: Tensor, labels: Tensor) -> float:
    """Return the mAP from the full similarity matrix: sort it, look up the relevance, add up the precision."""
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
    """A tensor of an unknown kind."""


def batch_table(batch: int, dim: int) -> str:
    embeddings = torch.randn(batch, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(batch) % max(batch // 4, 1)  # four items per class
    classes = int(labels.max()) + 1

    def by_pytorch(embeddings: Tensor, labels: Tensor) -> Tensor:
        return discriminant_ratio(embeddings.as_subclass(Plain), labels)  # the compiled kernel leaves these to PyTorch

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
