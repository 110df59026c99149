"""`ExactRetrievalEvaluator`: the information retrieval evaluator of sentence-transformers, with exact ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from sentence_transformers import util
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import Relevance, evaluate_retrieval
from fewshot_callbacks.functional._notes import NotesOnce
from fewshot_callbacks.functional._reading import named

try:
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
except ModuleNotFoundError:  # versions before 5.4
    from sentence_transformers.evaluation import InformationRetrievalEvaluator

_CALL = "ExactRetrievalEvaluator"
_LOGGER = logging.getLogger(__name__)
_SIMILARITIES = {
    util.cos_sim: "cosine",
    util.pytorch_cos_sim: "cosine",
    util.dot_score: "dot",
    util.euclidean_sim: "euclidean",
}

# Class of a model without dense vectors -> its output, and its evaluator in sentence-transformers.
_OTHER_ENCODERS = {
    "SparseEncoder": ("sparse embeddings", "SparseInformationRetrievalEvaluator"),
    "MultiVectorEncoder": ("several vectors per text", "MultiVectorInformationRetrievalEvaluator"),
    "CrossEncoder": ("a score per pair of texts", "CrossEncoderRerankingEvaluator"),
}


class ExactRetrievalEvaluator(InformationRetrievalEvaluator):
    """Drop-in replacement for `InformationRetrievalEvaluator`: the same arguments, metric names and files, exact values.

    - Documents with equal scores count as the mean over their orders, so values do not depend on document ids.
    - There is no matrix of all scores in memory.
    - Only the process that calls the evaluator computes.
    - Notes of the report are logged as warnings; each kind is shown once.

    Args:
        queries: Query id -> text.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents, each once.
        *args: Other arguments of `InformationRetrievalEvaluator`, in its order. `corpus_chunk_size` is the number of
            documents that are encoded before their embeddings are moved to the CPU.
        dims: Dimensions to which the embeddings are truncated. All dimensions use the same encoding. `dims=(256, 64)`
            and `name="dim"` give keys such as `dim_64_cosine_ndcg@10`. The primary metric is the metric of the largest
            dimension.
        unknown: What to do with relevant documents that are not in the corpus: `"error"`, or `"ignore"`, which counts
            them as never retrieved, as `InformationRetrievalEvaluator` does.
        memory_mb: Memory bound beyond the embeddings, in MB.
        device: Device that computes the scores.
        **options: Other arguments of `InformationRetrievalEvaluator`, by name.

    Raises:
        ValueError: No query has a relevant document, a relevant document is listed twice or is not in the corpus, `dims` are
            not different positive integers, or `write_predictions=True` was passed.

    Examples:
        >>> evaluator = ExactRetrievalEvaluator({"q": "a query"}, {"d": "a document"}, {"q": {"d"}}, ndcg_at_k=[5])
        >>> evaluator.ndcg_at_k
        [5]
    """

    def __init__(
        self,
        queries: Mapping[Any, Any],
        corpus: Mapping[Any, Any],
        relevant_docs: Mapping[Any, Any],
        *args: Any,
        dims: Sequence[int] | None = None,
        unknown: str = "error",
        memory_mb: float | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        signature = inspect.signature(InformationRetrievalEvaluator)
        arguments = signature.bind(queries, corpus, relevant_docs, *args, **options).arguments
        super().__init__(**arguments)
        if self.write_predictions:
            raise InputError(
                f"{_CALL} does not support write_predictions=True, because it does not list the nearest documents. Leave it "
                "out, or use InformationRetrievalEvaluator."
            )
        self.relevance = self._read_relevance(unknown)
        self._notes = NotesOnce(_CALL)
        self.settings: dict[str, Any] = {"memory_mb": memory_mb, "device": device}
        # Dimension -> evaluator of the truncated embeddings.
        self.evaluators: dict[int, ExactRetrievalEvaluator] = {}
        if dims is None:
            return
        self._check_dims(dims)
        for dim in dims:
            arguments["name"] = f"{self.name}_{dim}".removeprefix("_")
            arguments["truncate_dim"] = dim
            self.evaluators[dim] = ExactRetrievalEvaluator(**arguments, unknown=unknown, **self.settings)

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1, **options: Any
    ) -> dict[str, float]:
        """Return key -> value of a model, and write and store the values as `InformationRetrievalEvaluator` does.

        Args:
            model: A `SentenceTransformer`.
            output_path: Folder for the file of values; None writes no file.
            epoch: Training epoch, for the file.
            steps: Training step, for the file.
            **options: `corpus_model` or `corpus_embeddings`, as in `InformationRetrievalEvaluator`.

        Raises:
            ValueError: A score function is unknown, one of `dims` exceeds the dimension of the embeddings, or the model does
                not return one dense vector per text, such as a `SparseEncoder`.
        """
        _refuse_other_encoders(model, options.get("corpus_model"))
        if not self.evaluators:
            return cast(dict[str, float], super().__call__(model, output_path, epoch, steps, **options))
        queries, corpus = self._embed(model, **options)
        largest = max(self.evaluators)
        if largest > queries.shape[1]:
            raise InputError(
                f"{_CALL}: dims contain {largest}, but the embeddings have {queries.shape[1]} dimensions. Pass smaller dims."
            )
        values: dict[str, float] = {}
        for dim, evaluator in self.evaluators.items():
            embeddings = {"query_embeddings": queries[:, :dim], "corpus_embeddings": corpus[:, :dim]}
            values |= evaluator(model, output_path, epoch, steps, **embeddings)
        self.primary_metric: str | None = self.evaluators[largest].primary_metric
        return values

    def compute_all_metrics(self, model: Any, output_path: Any = None, **options: Any) -> dict[str, Any]:
        """Return score function -> metric -> k -> value. `InformationRetrievalEvaluator` calls this method."""
        queries, corpus = self._embed(model, **options)
        scores = {name: self._evaluate(queries, corpus, function) for name, function in self.score_functions.items()}
        for values in scores.values():
            self.output_scores(values)
        return scores

    compute_metrices = compute_all_metrics  # the name in sentence-transformers 5

    def _embed(
        self, model: Any, corpus_model: Any = None, corpus_embeddings: Any = None, query_embeddings: Any = None
    ) -> tuple[Any, Any]:
        """Return the embeddings of queries and corpus; embeddings that were not passed are computed."""
        if query_embeddings is None:
            prompts = {"prompt_name": self.query_prompt_name, "prompt": self.query_prompt}
            query_embeddings = self._encode(model, self.queries, "query", prompts)
        if corpus_embeddings is None:
            prompts = {"prompt_name": self.corpus_prompt_name, "prompt": self.corpus_prompt}
            corpus_embeddings = self._encode(corpus_model or model, self.corpus, "document", prompts)
        return query_embeddings, corpus_embeddings

    def _encode(self, model: Any, texts: Sequence[Any], kind: str, prompts: dict[str, Any]) -> Tensor:
        """Return the embeddings of texts on the CPU; only one chunk at a time is on the model's device."""
        size = self.corpus_chunk_size
        chunks = [texts[start : start + size] for start in range(0, len(texts), size)]
        return torch.cat([self.embed_inputs(model, chunk, encode_fn_name=kind, **prompts).cpu() for chunk in chunks])

    def _evaluate(self, queries: Any, corpus: Any, function: Callable[..., Any]) -> dict[str, dict[int, float]]:
        """Return metric -> k -> value for a score function."""
        # Metric of sentence-transformers -> k -> metric of this package.
        keys = {
            "accuracy@k": {k: f"recall@{k}" for k in self.accuracy_at_k},
            "precision@k": {k: f"precision@{k}" for k in self.precision_recall_at_k},
            "recall@k": {k: f"ir_recall@{k}" for k in self.precision_recall_at_k},
            "ndcg@k": {k: f"ndcg@{k}" for k in self.ndcg_at_k},
            "mrr@k": {k: f"mrr@{k}" for k in self.mrr_at_k},
            "map@k": {k: f"map@{k}_min" for k in self.map_at_k},
        }
        with named(_CALL, "evaluate_retrieval"):
            report = evaluate_retrieval(
                queries,
                gallery=corpus,
                relevance=self.relevance,
                similarity=_similarity_of(function),
                metrics=[key for by_k in keys.values() for key in by_k.values()],
                **self.settings,
            )
        self._notes.tell(report.messages, _LOGGER)
        return {metric: {k: report[key] for k, key in by_k.items()} for metric, by_k in keys.items()}

    def _read_relevance(self, unknown: str) -> Relevance:
        """Return the relevant documents of the queries.

        Raises:
            ValueError: No query has relevant documents, or a document is listed twice or is unknown.
        """
        if not self.queries_ids:
            raise InputError(f"{_CALL}: no query has relevant documents. Pass relevant_docs with query ids as keys.")
        judged = {query: list(self.relevant_docs[query]) for query in self.queries_ids}
        repeated = [query for query, documents in judged.items() if len(set(documents)) < len(documents)]
        if repeated:
            raise InputError(f"{_CALL}: relevant_docs of {repeated[0]!r} list a document twice. Pass sets of ids.")
        return Relevance.from_judgements(judged, self.queries_ids, self.corpus_ids, unknown=unknown)

    def _check_dims(self, dims: Sequence[int]) -> None:
        """Raise an error if `dims` are not different positive integers, or if `truncate_dim` was passed, too."""
        if not dims or any(type(dim) is not int or dim < 1 for dim in dims) or len(set(dims)) < len(dims):
            raise InputError(
                f"{_CALL}: dims={dims!r} are not different positive integers. Pass dims such as (256, 64)."
            )
        if self.truncate_dim is not None:
            raise InputError(
                f"{_CALL}: dims={dims!r} and truncate_dim={self.truncate_dim} both truncate the embeddings. Pass only dims."
            )


def _refuse_other_encoders(*models: Any) -> None:
    """Raise an error if a model does not return one dense vector per text; None is accepted.

    Raises:
        ValueError: A model has another kind of output.
    """
    for model in models:
        for base in type(model).__mro__:
            if base.__name__ in _OTHER_ENCODERS:
                found, evaluator = _OTHER_ENCODERS[base.__name__]
                raise InputError(
                    f"{_CALL}: the model ({type(model).__name__}) returns {found}, but {_CALL} needs one dense vector per "
                    f"text. Pass a SentenceTransformer, or use {evaluator}."
                )


def _similarity_of(function: Callable[..., Any]) -> Any:
    """Return this package's name for a score function.

    Raises:
        ValueError: The score function cannot be computed exactly.
    """
    # From sentence-transformers 6 on, this is a model's method `similarity`; before, it was one of the functions.
    name = getattr(getattr(function, "__self__", None), "similarity_fn_name", None)
    similarity = _SIMILARITIES.get(function, name)
    if similarity not in _SIMILARITIES.values():
        shown = getattr(function, "__name__", function) if name is None else name
        raise InputError(
            f"{_CALL} cannot compute the score function {shown}. Pass cos_sim, dot_score or euclidean_sim of "
            "sentence_transformers.util in score_functions, or use InformationRetrievalEvaluator."
        )
    return similarity
