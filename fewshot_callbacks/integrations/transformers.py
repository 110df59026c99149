"""`BatchRetrievalMetrics`: `compute_metrics` for the Hugging Face Trainer with `batch_eval_metrics=True`."""

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
except ModuleNotFoundError:  # the Trainer needs accelerate, but a custom loop may not
    GradientState = None

_CALL = "BatchRetrievalMetrics"


class _Loop(NamedTuple):
    """Identity of a loop over an accelerate loader."""

    loader: Any
    """a weak reference to the loader; None outside an accelerate loop"""
    begun: int
    """the number of loops over this loader that have started and not ended: interrupted loops and this one. accelerate lists
    a loader when a loop starts, and removes it when the loop ends, so an interrupted loop stays in the list"""


def _running_loop() -> _Loop:
    """Return the current loop."""
    if GradientState is None:
        return _Loop(None, 0)
    state = GradientState()
    loader = state.active_dataloader
    if loader is None:
        return _Loop(None, 0)
    return _Loop(weakref.ref(loader), state.dataloader_references.count(loader))


@takes(RetrievalOptions)
class BatchRetrievalMetrics:
    """Retrieval metrics for the Hugging Face Trainer: it collects each batch and evaluates the whole set after the last.

    Pass it to the Trainer as `compute_metrics`, with `batch_eval_metrics=True` in `TrainingArguments`. The embeddings are
    stored on the CPU; other outputs of the model are not stored. The Trainer gathers each batch in all processes, and each
    process stores its part of the rows. The values equal `evaluate_retrieval` on the whole set. Notes of the report become
    warnings; each kind is shown once. The batches of an interrupted evaluation are dropped when the next evaluation starts.

    Args:
        output: Index of the embeddings among the model's outputs, without the loss; None if there is only one output.
        **settings: Settings of `evaluate_retrieval`, by name; see `RetrievalSettings`.

    Raises:
        ValueError: A setting is unknown or out of range.

    Examples:
        >>> import torch
        >>> from transformers import EvalPrediction
        >>> compute_metrics = BatchRetrievalMetrics(metrics=("mAP", "recall@2"))
        >>> first_batch = EvalPrediction(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.tensor([0, 0]))
        >>> last_batch = EvalPrediction(torch.tensor([[0.0, 1.0], [0.8, 0.6]]), torch.tensor([1, 1]))
        >>> compute_metrics(first_batch, compute_result=False)
        {}
        >>> values = compute_metrics(last_batch, compute_result=True)
        >>> round(values["mAP"], 4), values["recall@2"]
        (0.4167, 0.5)
    """

    def __init__(self, *, output: int | None = None, **settings: Unpack[RetrievalOptions]) -> None:
        self.output = output
        self.settings = from_keywords(BatchRetrievalMetrics, settings).arguments()
        self._notes = NotesOnce(_CALL)
        self.reset()

    def reset(self) -> None:
        """Drop all batches. You need this only in a custom loop, after an interrupted evaluation; a Trainer does not."""
        self._store = EmbeddingStore()
        self._items = 0
        self._loop = _Loop(None, 0)

    def __call__(self, evaluation: Any, compute_result: bool = True) -> dict[str, float]:
        """Add a batch, and return an empty dict; after the last batch, return metric -> value. *Collective*.

        The last batch also drops all batches.

        Args:
            evaluation: The batch of all processes, as the Trainer passes it: `predictions` and `label_ids`.
            compute_result: Whether this is the last batch. Without `batch_eval_metrics`, a single call has all items.

        Raises:
            ValueError: The model has several outputs but no `output` was chosen, the embeddings are not an (items, dim)
                tensor, or `evaluate_retrieval` raises an error.
        """
        loop = _running_loop()
        if loop != self._loop:
            self.reset()
            self._loop = loop
        embeddings = self._embeddings_of(evaluation.predictions)
        labels = evaluation.label_ids
        if isinstance(labels, tuple | list):
            raise InputError(
                f"{_CALL}: label_ids contain {counted(len(labels), 'array')}, one for each of label_names. Pass only the "
                'name of the labels: TrainingArguments(label_names=["labels"]).'
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
        """Return the embeddings from the outputs of the model."""
        outputs = predictions if isinstance(predictions, tuple | list) else (predictions,)
        if self.output is None and len(outputs) > 1:
            shapes = ", ".join(_form(output) for output in outputs)
            raise InputError(
                f"{_CALL}: the model has {counted(len(outputs), 'output')} besides the loss, with shapes {shapes}. Pass the "
                f"index of the embeddings, for example {_CALL}(output={len(outputs) - 1})."
            )
        index = self.output or 0
        if not -len(outputs) <= index < len(outputs):
            raise InputError(
                f"{_CALL}: output={index}, but the model has {counted(len(outputs), 'output')} besides the loss. Pass an "
                f"index below {len(outputs)}."
            )
        chosen = outputs[index]
        if isinstance(chosen, tuple | list) or len(chosen.shape) != 2:
            raise InputError(
                f"{_CALL}: output {index} of the model has the shape {_form(chosen)}, but embeddings must have the shape "
                f"(items, dim). {_remedy(predictions, index)}"
            )
        return chosen


def _form(output: Any) -> str:
    """Return the shape of an output, for messages; an output may be several arrays, such as one per layer."""
    if isinstance(output, tuple | list):
        return f"[{', '.join(map(_form, output))}]"
    return str(tuple(output.shape))


def _remedy(predictions: Any, index: int) -> str:
    """Return the fix for an output that does not have one vector per item."""
    code = "outputs"
    output = predictions
    if isinstance(output, tuple | list):
        code = f"{code}[{index}]"
        output = output[index]
    # If there is one output per layer, use the last layer.
    while isinstance(output, tuple | list) and len(output):
        code = f"{code}[-1]"
        output = output[-1]
    dims = len(getattr(output, "shape", ()))
    if dims < 2:
        return f"Pass the index of another output: {_CALL}(output=...)."
    # (items, tokens, dim) of a transformer, or (items, channels, height, width) of a convolution
    positions = {2: "", 3: ".mean(dim=1)"}.get(dims, f".mean(dim={tuple(range(2, dims))})")
    return (
        "Compute embeddings from the outputs, for instance with Trainer(preprocess_logits_for_metrics=lambda outputs, "
        f"labels: {code}{positions}, compute_metrics={_CALL}())."
    )
