"""`BatchRetrievalMetrics`: the `compute_metrics` of Hugging Face's Trainer with `batch_eval_metrics=True`."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Unpack

from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import Share, evaluate_retrieval
from fewshot_callbacks.functional._notes import NotesOnce
from fewshot_callbacks.functional._reading import named
from fewshot_callbacks.functional.retrieval.settings import from_keywords
from fewshot_callbacks.metrics import EmbeddingStore
from fewshot_callbacks.settings import RetrievalOptions, takes
from fewshot_callbacks.system.words import counted

try:
    from accelerate.state import GradientState
except ModuleNotFoundError:  # without accelerate there is no Trainer, but there may be a custom loop
    GradientState = None

_CALL = "BatchRetrievalMetrics"


class _Loop(NamedTuple):
    """Identifies a loop over a loader of accelerate."""

    loader: Any
    """a weak reference to the loader; None outside of a loop of accelerate"""
    begun: int
    """how many loops over this loader have begun since the last that ended: those that broke off, and this one. accelerate
    lists the loader when a loop begins, and removes it when the loop ends: a loop that broke off stays in the list"""


def _running_loop() -> _Loop:
    """Return the loop that runs now."""
    if GradientState is None:
        return _Loop(None, 0)
    state = GradientState()
    loader = state.active_dataloader
    if loader is None:
        return _Loop(None, 0)
    return _Loop(weakref.ref(loader), state.dataloader_references.count(loader))


@takes(RetrievalOptions)
class BatchRetrievalMetrics:
    """Collects the embeddings of each batch, and returns the values of the whole set after the last.

    Pass it to the Trainer as `compute_metrics`, with `batch_eval_metrics=True` among its arguments. Only the
    embeddings among the model's outputs are kept, on the CPU. The Trainer gathers each batch in all processes; each
    process keeps its share of the rows. The values equal `evaluate_retrieval` on the whole set. Its notes become
    warnings, each kind once. The batches of an interrupted evaluation are dropped when the next one begins.

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
        self._notes = NotesOnce(_CALL)
        self.reset()

    def reset(self) -> None:
        """Drop all batches. Call it only before a loop of your own whose predecessor broke off: a Trainer needs no call."""
        self._store = EmbeddingStore()
        self._items = 0
        self._loop = _Loop(None, 0)

    def __call__(self, evaluation: Any, compute_result: bool = True) -> dict[str, float]:
        """Add a batch; after the last, return the values and drop all batches. *Collective*.

        Args:
            evaluation: The batch of all processes, as the Trainer passes it: `predictions` and `label_ids`.
            compute_result: Whether this is the last batch. Without `batch_eval_metrics`, the only call has all items.

        Returns:
            Value of each metric after the last batch; nothing before.

        Raises:
            ValueError: If the model has several outputs and `output` does not name one, or it is not an (items, dim)
                tensor; or as `evaluate_retrieval` does.
        """
        loop = _running_loop()
        if loop != self._loop:
            self.reset()
            self._loop = loop
        embeddings = self._embeddings_of(evaluation.predictions)
        labels = evaluation.label_ids
        if isinstance(labels, tuple | list):
            raise InputError(
                f"{_CALL}: label_ids hold {counted(len(labels), 'array')}, one for each of label_names. Pass the name of "
                'the labels alone: TrainingArguments(label_names=["labels"]).'
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
        with named(_CALL, "evaluate_retrieval"):
            report = evaluate_retrieval(shard.embeddings, shard.labels, share=places, **self.settings)
        if processes.rank == 0:
            self._notes.tell(report.messages)
        return report.metrics()

    def _embeddings_of(self, predictions: Any) -> Any:
        """Return the embeddings among the outputs of the model."""
        outputs = predictions if isinstance(predictions, tuple | list) else (predictions,)
        if self.output is None and len(outputs) > 1:
            shapes = ", ".join(_form(output) for output in outputs)
            raise InputError(
                f"{_CALL}: the model has {counted(len(outputs), 'output')} other than the loss, of shapes {shapes}. Pass "
                f"the index of the embeddings among them: {_CALL}(output={len(outputs) - 1})."
            )
        index = self.output or 0
        if not -len(outputs) <= index < len(outputs):
            raise InputError(
                f"{_CALL}: output={index}, and the model has {counted(len(outputs), 'output')} other than the loss. Pass an "
                f"index below {len(outputs)}."
            )
        chosen = outputs[index]
        if isinstance(chosen, tuple | list) or len(chosen.shape) != 2:
            raise InputError(
                f"{_CALL}: output {index} of the model is of shape {_form(chosen)}, and embeddings are of shape (items, "
                f"dim). {_remedy(predictions, index)}"
            )
        return chosen


def _form(output: Any) -> str:
    """Return the shape of an output, for messages; an output may be several arrays, such as one for each layer."""
    if isinstance(output, tuple | list):
        return f"[{', '.join(map(_form, output))}]"
    return str(tuple(output.shape))


def _remedy(predictions: Any, index: int) -> str:
    """Return code that makes one vector for each item of another output."""
    code = "outputs"
    output = predictions
    if isinstance(output, tuple | list):
        code = f"{code}[{index}]"
        output = output[index]
    # If there is one output for each layer, the last one is used.
    while isinstance(output, tuple | list) and len(output):
        code = f"{code}[-1]"
        output = output[-1]
    dims = len(getattr(output, "shape", ()))
    if dims < 2:
        return f"Pass the index of another output: {_CALL}(output=...)."
    # (items, tokens, dim) of a transformer, or (items, channels, height, width) of a convolution
    positions = {2: "", 3: ".mean(dim=1)"}.get(dims, f".mean(dim={tuple(range(2, dims))})")
    return (
        "Make them of what the model returns, for instance with Trainer(preprocess_logits_for_metrics=lambda outputs, "
        f"labels: {code}{positions}, compute_metrics={_CALL}())."
    )
