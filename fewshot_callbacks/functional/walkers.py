"""Which way through all pairs is taken: with the compiled kernel on the CPU, else in plain PyTorch."""

from __future__ import annotations

from typing import Any

from fewshot_callbacks.functional.candidates import Candidates
from fewshot_callbacks.functional.ranks import RankingPass, Walker
from fewshot_callbacks.functional.similarity import ScoreTiles
from fewshot_callbacks.functional.torch_walk import TorchWalk


def ranking_pass(tiles: ScoreTiles, candidates: Candidates, memory_bytes: int, **options: Any) -> RankingPass:
    """A pass that is walked in the way that suits its scores; the arguments are those of `RankingPass`."""
    walker: Walker = TorchWalk()
    if tiles.compiled is not None:
        from fewshot_callbacks.functional.compiled_walk import CompiledWalk  # noqa: PLC0415 - needs numba

        walker = CompiledWalk()
    return RankingPass(tiles, candidates, memory_bytes, walker, **options)
