"""Jobs of real processes (see `tests.gloo_processes`): a Trainer, and an evaluator that one process calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fewshot_callbacks.integrations import BatchRetrievalMetrics, ExactRetrievalEvaluator
from tests.integrations.cases import (
    embedded_items,
    retrieval_task,
    static_model,
    trainer_on,
)


class Recorded(BatchRetrievalMetrics):
    """Counts the items that this process holds at most."""

    most = 0

    def __call__(self, evaluation: Any, compute_result: bool = True) -> dict[str, float]:
        assert isinstance(evaluation.label_ids, torch.Tensor)
        values = super().__call__(evaluation, compute_result)
        self.most = max(self.most, len(self._store))
        return values


def answers(rank: int, folder: Path) -> dict[str, Any]:
    # As torchrun sets them, so that accelerate knows the processes.
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    compute_metrics = Recorded(output=1)
    trainer = trainer_on(embedded_items(), compute_metrics, folder)
    values = [trainer.evaluate() for _ in range(2)]
    evaluator = ExactRetrievalEvaluator(*retrieval_task())
    on_first = evaluator(static_model()) if rank == 0 else None
    return {
        "world": trainer.accelerator.num_processes,
        "values": values,
        "most": compute_metrics.most,
        "on_first": on_first,
    }
