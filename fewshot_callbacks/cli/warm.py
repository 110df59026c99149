"""`fewshot warm`: compiles the kernels that the first evaluation would otherwise compile."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from numba.core import config, event

from fewshot_callbacks.cli.options import Warm
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.system.loop_cache import CompiledLoops, folders_of_new_loops, named_folder

if TYPE_CHECKING:
    from torch import Tensor


def run(options: Warm) -> None:
    """Compile the kernels, and print their number, the time and the folder."""
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise InputError("NUMBA_DISABLE_JIT is set, so nothing can be compiled. Unset it.")
    with warnings.catch_warnings():
        # The error below reports it, too.
        warnings.filterwarnings("ignore", message="numba finds no folder")
        import fewshot_callbacks.functional  # noqa: F401, PLC0415 - finds the folders of all loops
    folders = folders_of_new_loops()
    if not folders:
        raise InputError(
            "compiled kernels cannot be saved, since neither the folder of the package nor your cache folder is writable. "
            "Set NUMBA_CACHE_DIR to a writable folder."
        )
    started = time.perf_counter()
    loops = CompiledLoops()
    with event.install_listener("numba:compile", loops):
        _evaluate(float64=options.float64)
    seconds = time.perf_counter() - started
    if loops.count:
        print(f"Compiled {loops.count} kernels in {seconds:.0f} s.")
    else:
        print("Nothing to do: all kernels were already compiled.")
    print(f"The kernels are in {_place(folders)}.")
    named = named_folder()
    if named and not all(Path(named) in folder.parents for folder in folders):
        print(f"NUMBA_CACHE_DIR={named} is not writable, so it was not used.")


def _place(folders: list[Path]) -> str:
    """Return the folder in NUMBA_CACHE_DIR if it is used, or else the folders of the modules."""
    if all(Path(named_folder()) in folder.parents for folder in folders):
        return named_folder()
    return " and ".join(map(str, folders))


def _evaluate(*, float64: bool) -> None:
    """Run every kind of evaluation that has its own kernels."""
    import torch  # noqa: PLC0415 - `fewshot warm --help` needs none

    generator = torch.Generator().manual_seed(0)
    # With this number of pairs, the engine may compare int8 codes first.
    embeddings = torch.randn(6000, 64, generator=generator)
    labels = torch.arange(len(embeddings)) % 600
    _evaluate_in_each_precision(embeddings, labels)
    if float64:
        _evaluate_in_each_precision(embeddings.double(), labels)


def _evaluate_in_each_precision(embeddings: Tensor, labels: Tensor) -> None:
    """Evaluate in each precision: a later choice depends on the load of the machine."""
    for precision in ("int8", "float32", "float64"):
        with engine_options(precision=precision):
            _evaluate_set(embeddings, labels)
            # The largest class decides whether lookup tables have 8, 16 or 32 bits.
            _evaluate_large_class(embeddings, 2**7)
            _evaluate_large_class(embeddings, 2**15)


def _evaluate_large_class(embeddings: Tensor, size: int) -> None:
    """Evaluate queries with `size` relevant items each."""
    import torch  # noqa: PLC0415 - `fewshot warm --help` needs none

    from fewshot_callbacks import functional  # noqa: PLC0415 - after `run` has silenced the warning of the first import

    # 36,000 distinct rows
    gallery = torch.cat([embeddings.roll(shift, dims=1) for shift in range(6)])
    labels = (torch.arange(len(gallery)) >= size).long()
    functional.evaluate_retrieval(embeddings[:10], labels[:10], gallery=gallery, gallery_labels=labels)


def _evaluate_set(embeddings: Tensor, labels: Tensor) -> None:
    import torch  # noqa: PLC0415 - `fewshot warm --help` needs none

    from fewshot_callbacks import functional  # noqa: PLC0415 - after `run` has silenced the warning of the first import

    half = len(embeddings) // 2
    first, first_labels = embeddings[:half], labels[:half]
    functional.evaluate_retrieval(embeddings, labels)
    functional.evaluate_retrieval(embeddings, labels, similarity="euclidean")
    functional.evaluate_retrieval(embeddings, labels, max_queries=100)
    # Repeated rows, within one class and across classes: 6,000 is a multiple of 100 but not of 700.
    for classes in (100, 700):
        functional.evaluate_retrieval(embeddings.repeat(2, 1), torch.arange(2 * len(embeddings)) % classes)
    # Several labels per item, and relevance judgements.
    functional.evaluate_retrieval(first[:100], labels[:100, None] % 5 == labels[:5])
    relevant = [[(query + 1) % 100] for query in range(100)]
    functional.evaluate_retrieval(first[:100], relevance=functional.Relevance.from_lists(relevant))
    functional.evaluate_identification(first, first_labels, embeddings[half:], labels[half:])
    functional.nearest(embeddings, k=5)
    functional.embedding_health(embeddings, labels)
    functional.discriminant_ratio(embeddings, labels)
