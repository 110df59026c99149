"""`fewshot warm`: compiles what a first evaluation would compile."""

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
    """Compile the loops, and print their number, the time and the folder.

    Raises:
        ValueError: Loops cannot be kept on the disk, or numba compiles nothing.
    """
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise InputError("NUMBA_DISABLE_JIT is set, so nothing is compiled. Unset it.")
    with warnings.catch_warnings():
        # The error below reports it, too.
        warnings.filterwarnings("ignore", message="numba finds no folder")
        import fewshot_callbacks.functional  # noqa: F401, PLC0415 - finds the folders of all loops
    folders = folders_of_new_loops()
    if not folders:
        raise InputError(
            "no folder can be written where compiled loops are kept, neither beside the package nor in the cache of the "
            "user. Name a folder that can be written in NUMBA_CACHE_DIR."
        )
    started = time.perf_counter()
    loops = CompiledLoops()
    with event.install_listener("numba:compile", loops):
        _evaluate(float64=options.float64)
    seconds = time.perf_counter() - started
    if loops.count:
        print(f"{loops.count} loops were compiled in {seconds:.0f} s.")
    else:
        print("Nothing was to do: all loops were compiled before.")
    print(f"They are kept in {_place(folders)}.")
    named = named_folder()
    if named and not all(Path(named) in folder.parents for folder in folders):
        print(f"NUMBA_CACHE_DIR={named} cannot be written, so it was not used.")


def _place(folders: list[Path]) -> str:
    """Return the folder of all loops, if NUMBA_CACHE_DIR names it, or else the folder of each module."""
    if all(Path(named_folder()) in folder.parents for folder in folders):
        return named_folder()
    return " and ".join(map(str, folders))


def _evaluate(*, float64: bool) -> None:
    """Evaluate a set in every way that has loops of its own."""
    import torch  # noqa: PLC0415 - `fewshot warm --help` needs none

    generator = torch.Generator().manual_seed(0)
    # This number of pairs may be compared in bytes first.
    embeddings = torch.randn(6000, 64, generator=generator)
    labels = torch.arange(len(embeddings)) % 600
    _evaluate_in_each_precision(embeddings, labels)
    if float64:
        _evaluate_in_each_precision(embeddings.double(), labels)


def _evaluate_in_each_precision(embeddings: Tensor, labels: Tensor) -> None:
    """Evaluate with products in each precision: the choice of an evaluation depends on the load of the machine."""
    for precision in ("int8", "float32", "float64"):
        with engine_options(precision=precision):
            _evaluate_set(embeddings, labels)
            # Lookup tables have numbers of 8, 16 or 32 bits, as the largest class requires.
            _evaluate_large_class(embeddings, 2**7)
            _evaluate_large_class(embeddings, 2**15)


def _evaluate_large_class(embeddings: Tensor, size: int) -> None:
    """Evaluate queries that have `size` relevant items each."""
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
    # Rows are repeated, in one class and in several.
    for classes in (100, 700):  # 6,000 is a multiple of only the first
        functional.evaluate_retrieval(embeddings.repeat(2, 1), torch.arange(2 * len(embeddings)) % classes)
    # Several labels for each item, and judgements.
    functional.evaluate_retrieval(first[:100], labels[:100, None] % 5 == labels[:5])
    relevant = [[(query + 1) % 100] for query in range(100)]
    functional.evaluate_retrieval(first[:100], relevance=functional.Relevance.from_lists(relevant))
    functional.evaluate_identification(first, first_labels, embeddings[half:], labels[half:])
    functional.nearest(embeddings, k=5)
    functional.embedding_health(embeddings, labels)
    functional.discriminant_ratio(embeddings, labels)
