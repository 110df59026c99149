"""`BatchRetrievalMetrics`: the `compute_metrics` of Hugging Face's Trainer with `batch_eval_metrics=True`."""

from __future__ import annotations

from typing import Any, Unpack

from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional import Share, evaluate_retrieval
from fewshot_callbacks.metrics import EmbeddingStore
from fewshot_callbacks.settings import RetrievalOptions, from_keywords, takes

_CALL = "BatchRetrievalMetrics"


@takes(RetrievalOptions)
class BatchRetrievalMetrics:
    """Collects the embeddings of each batch, and returns the values of the whole set after the last.

    Pass it to the Trainer as `compute_metrics`, with `batch_eval_metrics=True` among its arguments. Of what the model
    returns, only the embeddings are held, on the CPU. The Trainer gathers each batch in all processes; each process holds
    its share of the rows. The values are those of `evaluate_retrieval` of the whole set.

    Args:
        output: Index of the embeddings among the outputs of the model other than the loss; None if they are the only output.
        **settings: See `RetrievalSettings`.

    Raises:
        ValueError: If a setting is unknown or out of range.

    Examples:
        >>> import torch
        >>> from transformers import EvalPrediction
        >>> compute_metrics = BatchRetrievalMetrics(metrics=("mAP", "recall@1"))
        >>> batch = EvalPrediction(torch.eye(2), torch.tensor([0, 1]))
        >>> compute_metrics(batch, compute_result=False)
        {}
        >>> compute_metrics(batch, compute_result=True)
        {'mAP': 1.0, 'recall@1': 1.0}
    """

    def __init__(self, *, output: int | None = None, **settings: Unpack[RetrievalOptions]) -> None:
        self.output = output
        self.settings = from_keywords(BatchRetrievalMetrics, settings).arguments()
        self.reset()

    def reset(self) -> None:
        """Drop all batches. It is needed only if an evaluation was interrupted."""
        self._store = EmbeddingStore()
        self._items = 0

    def __call__(self, evaluation: Any, compute_result: bool = True) -> dict[str, float]:
        """Add a batch; after the last, return the values and drop all batches. *Collective*.

        Args:
            evaluation: The batch of all processes, as the Trainer passes it: `predictions` and `label_ids`.
            compute_result: Whether this is the last batch. Without `batch_eval_metrics`, the only call has all items.

        Returns:
            Value of each metric after the last batch; nothing before.

        Raises:
            ValueError: If the model has several outputs and `output` does not name one; or as `evaluate_retrieval` does.
        """
        embeddings = self._embeddings_of(evaluation.predictions)
        labels = evaluation.label_ids
        if isinstance(labels, tuple | list):
            raise ValueError(
                f"{_CALL}: label_ids hold {len(labels)} arrays, one for each of label_names. Pass the name of the labels "
                'alone: TrainingArguments(label_names=["labels"]).'
            )
        processes = all_processes()
        # Item i of the set belongs to process i % count, as `EmbeddingStore.shard` numbers them.
        share = slice((processes.rank - self._items) % processes.count, None, processes.count)
        self._store.append(embeddings[share], labels[share])
        self._items += len(embeddings)
        if not compute_result:
            return {}
        shard = self._store.shard()
        self.reset()
        places = Share(processes, shard.places)
        return evaluate_retrieval(shard.embeddings, shard.labels, share=places, **self.settings).metrics()

    def _embeddings_of(self, predictions: Any) -> Any:
        """Return the embeddings among the outputs of the model."""
        outputs = predictions if isinstance(predictions, tuple | list) else (predictions,)
        if self.output is None and len(outputs) > 1:
            shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
            raise ValueError(
                f"{_CALL}: the model has {len(outputs)} outputs other than the loss, of shapes {shapes}. Pass the index "
                f"of the embeddings among them: {_CALL}(output={len(outputs) - 1})."
            )
        index = self.output or 0
        if not -len(outputs) <= index < len(outputs):
            raise ValueError(
                f"{_CALL}: output={index}, and the model has {len(outputs)} outputs other than the loss. Pass an index "
                "below their number."
            )
        return outputs[index]
