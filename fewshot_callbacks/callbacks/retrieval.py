"""Exact retrieval metrics at the end of every validation and test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fewshot_callbacks._trainer import evaluation_loaders
from fewshot_callbacks.callbacks._evaluation import EvaluationMonitor, suffixes
from fewshot_callbacks.callbacks._progress import evaluation_progress
from fewshot_callbacks.callbacks.embeddings import STEP_KEYS, EmbeddingSource, LabelSource, read_flag, read_ids
from fewshot_callbacks.functional.ranking import Divisor, Ties
from fewshot_callbacks.functional.report import RetrievalReport
from fewshot_callbacks.functional.retrieval import evaluate_retrieval
from fewshot_callbacks.functional.settings import RetrievalSettings
from fewshot_callbacks.functional.similarity import Similarity
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard
from fewshot_callbacks.metrics.processes import all_processes


class RetrievalMonitor(EvaluationMonitor):
    """Logs mAP, Recall@K, precision, recall, F1, recall at fixed precision and Grouped Recall@K of an embedding.

    During validation (and test) the embeddings of each step are copied to the CPU; at its end they are evaluated over
    all pairs, exactly, in tiles under a memory budget, and dropped. The values are logged before `ModelCheckpoint` and
    `EarlyStopping` look, the same on every rank, as `val/mAP`, `val/recall@1`, `val/grouped_recall@1`, `val/f1`,
    `val/recall@precision0.95` and so on (`test/...` in a test). The model is not touched. The sanity check is left out.

    Three forms of query and gallery:

    - one loader: each item is a query against all others (leave-one-out). With several loaders each is evaluated by
      itself, and its keys end in its name or index: `val/mAP/dataloader_idx_1`;
    - two loaders: `gallery_loader=1` (or its name), and every other loader is a set of queries against it;
    - a flag in the batch: `gallery_flag="is_gallery"`, a boolean for each item.

    Args:
        source: where embeddings come from: two keys of the mapping that the step returns (default
            `("embeddings", "labels")`), the name of a submodule whose output is the embedding, or a function of
            (outputs, batch) that returns (embeddings, labels).
        labels: where labels are in the batch, if not where the step returned them: key, position or function.
        gallery_loader: index or name of the loader that holds the gallery.
        gallery_flag: entry of the step's output or of the batch, or function of (outputs, batch), that says which items
            belong to the gallery.
        ids: entry of the step's output or of the batch, or function of (outputs, batch), that names each item, by integers
            or words: of those that come more than once, one counts. Needed where a sampler of your own repeats samples;
            what Lightning's `DistributedSampler` repeats to even out the processes is found without.
        similarity: `cosine`, `dot` or `euclidean`; `hamming` for binary codes of -1 and +1, or 0 and 1.
        recall_k: the K of Recall@K, the share of queries with a relevant item among the first K.
        map_k: AP@k, each as k or (k, divisor): `min` divides by min(R, k), `relevant` by R, `found` by the relevant items
            among the first k. Logged as `map@10_min`.
        precision_k: the K of Precision@K.
        ndcg_k: the K of nDCG@K.
        macro: also the mean over classes of each metric of a query, as `macro_mAP`.
        precisions: for each, the pooled recall at the smallest threshold with at least this precision.
        threshold: score from which a pair is accepted, for precision, recall and F1; by default that of the best F1.
        false_match_rates: for each, the pooled share of relevant pairs that are rejected at the threshold that accepts
            at most this share of the others; logged as `fnmr@fmr0.001`.
        equal_error_rate: also the rate at which these two shares are equal, as `eer`.
        auc_pr: also the area under the pooled precision-recall curve, for which all pairs are looked at twice.
        prototype_accuracy: also the share of queries whose class has the most similar mean embedding.
        grouped_k: the K of Grouped Recall@K.
        group_size: labels in a group for Grouped Recall; null leaves it out.
        group_seed: of the split of the labels into groups, the same at every epoch.
        ties: what equal scores count as: `expected`, `optimistic` or `pessimistic`.
        max_queries: evaluate at most so many queries, drawn from all classes, against everything; by default all.
        query_seed: of that draw, the same at every epoch.
        memory_mb: bound on the memory used beyond the embeddings, in MB.
        device: where the scores are made: `cpu`, `cuda` or `auto`. The values are the same.
        prefix: first part of the keys; by default `val` or `test`.
        prog_bar: show mAP in the progress bar.
        strict: raise an error where nothing can be computed. By default the fit goes on, the values are NaN, and a
            warning says why, once.

    Attributes:
        reports: the latest report of each set, by the end of its keys (`""` for a single loader).

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> best = ModelCheckpoint(monitor="val/mAP", mode="max")
        >>> trainer = Trainer(callbacks=[RetrievalMonitor(), best], logger=False, accelerator="cpu")
    """

    reports: dict[str, RetrievalReport]
    _remedy_for_two = "Give them different prefixes."
    _remedy_for_repeats = (
        "Pass ids='key', an entry of the batch or of the step's output that names each item, or let Lightning make the "
        "sampler (Trainer(use_distributed_sampler=True))."
    )

    def __init__(
        self,
        *,
        source: EmbeddingSource = STEP_KEYS,
        labels: LabelSource | None = None,
        gallery_loader: int | str | None = None,
        gallery_flag: str | Callable[[Any, Any], Tensor] | None = None,
        ids: str | Callable[[Any, Any], Any] | None = None,
        similarity: Similarity = "cosine",
        recall_k: Sequence[int] = (1, 5, 10),
        map_k: Sequence[int | tuple[int, Divisor]] = (),
        precision_k: Sequence[int] = (),
        ndcg_k: Sequence[int] = (),
        macro: bool = False,
        precisions: Sequence[float] = (0.95,),
        threshold: float | None = None,
        false_match_rates: Sequence[float] = (),
        equal_error_rate: bool = False,
        auc_pr: bool = False,
        prototype_accuracy: bool = False,
        grouped_k: Sequence[int] = (1,),
        group_size: int | None = 10,
        group_seed: int = 0,
        ties: Ties = "expected",
        max_queries: int | None = None,
        query_seed: int = 0,
        memory_mb: float = 512,
        device: str = "cpu",
        prefix: str | None = None,
        prog_bar: bool = True,
        strict: bool = False,
    ) -> None:
        super().__init__(source, labels, strict)
        if gallery_loader is not None and gallery_flag is not None:
            raise ValueError(
                "RetrievalMonitor: gallery_loader and gallery_flag are two ways to say the same. Pass one of them."
            )
        self._settings = RetrievalSettings(
            similarity=similarity,
            recall_k=tuple(recall_k),
            map_k=tuple(map_k),
            precision_k=tuple(precision_k),
            ndcg_k=tuple(ndcg_k),
            macro=macro,
            precisions=tuple(precisions),
            threshold=threshold,
            false_match_rates=tuple(false_match_rates),
            equal_error_rate=equal_error_rate,
            auc_pr=auc_pr,
            prototype_accuracy=prototype_accuracy,
            grouped_k=tuple(grouped_k),
            group_size=group_size,
            group_seed=group_seed,
            ties=ties,
            max_queries=max_queries,
            query_seed=query_seed,
            memory_mb=memory_mb,
            device=device,
        )
        self._settings.check("RetrievalMonitor")
        if prefix == "":
            raise ValueError("RetrievalMonitor(prefix=''): the keys need a first part. Leave it out for val and test.")
        self.gallery_loader, self.gallery_flag, self.ids = gallery_loader, gallery_flag, ids
        self.prefix, self.prog_bar = prefix, prog_bar
        self.reports = {}
        self._noted: set[str] = set()
        self._forget()

    @property
    def report(self) -> RetrievalReport | None:
        """The latest report, if there is a single set; with several see `reports`."""
        return next(iter(self.reports.values())) if len(self.reports) == 1 else None

    @property
    def state_key(self) -> str:
        """Two monitors in one Trainer are told apart by their prefix."""
        return self._generate_state_key(prefix=self.prefix)

    # ----------------------------------------------------------------------------------------------------------- collecting

    def _collect(
        self, loader: int, embeddings: Tensor, labels: Tensor, positions: range, outputs: Any, batch: Any
    ) -> None:
        places = torch.arange(positions.start, positions.stop)
        names = None if self.ids is None else read_ids(self.ids, outputs, batch, len(labels), self._policy.owner)
        if self.gallery_flag is None:
            self._stores.setdefault((loader, False), EmbeddingStore()).append(embeddings, labels, places, names)
            return
        in_gallery = read_flag(self.gallery_flag, outputs, batch, self._policy.owner)
        if len(in_gallery) != len(labels):
            raise ValueError(
                f"RetrievalMonitor: gallery_flag has {len(in_gallery)} entries for {len(labels)} embeddings. One boolean "
                "for each item is wanted."
            )
        for is_gallery in (False, True):
            chosen = in_gallery == is_gallery
            on_device = chosen.to(embeddings.device)
            store = self._stores.setdefault((loader, is_gallery), EmbeddingStore())
            some = names[chosen] if isinstance(names, Tensor) else names
            if isinstance(names, list):
                some = [name for name, is_chosen in zip(names, chosen.tolist(), strict=True) if is_chosen]
            store.append(embeddings[on_device], labels[chosen.to(labels.device)], places[chosen], some)

    def _forget(self) -> None:
        self._stores: dict[tuple[int, bool], EmbeddingStore] = {}

    # ------------------------------------------------------------------------------------------------------------ measuring

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        prefix = stage if self.prefix is None else self.prefix
        self.reports = {}
        ends = suffixes(trainer)
        try:
            gallery = self._gallery_index(trainer)
        except ValueError as error:
            failed, gallery = dict.fromkeys(range(len(ends)), error), None
        single = gallery is not None and len(ends) == 2
        for loader, end in enumerate(ends):
            if loader == gallery:
                continue
            suffix = "" if single else end
            failure = failed.get(loader) or (failed.get(gallery) if gallery is not None else None)
            outcome: RetrievalReport | Exception
            outcome = failure or self._evaluate(trainer, f"{prefix}{suffix}", loader, gallery)
            self._publish(pl_module, prefix, suffix, outcome)

    def _check_loaders(self, trainer: Trainer) -> None:
        self._gallery_index(trainer)

    def _gallery_index(self, trainer: Trainer) -> int | None:
        if self.gallery_loader is None:
            return None
        names = list(evaluation_loaders(trainer))
        known = dict(zip(names, range(len(names)), strict=True)) | {i: i for i in range(len(names))}
        if self.gallery_loader not in known:
            raise ValueError(
                f"RetrievalMonitor(gallery_loader={self.gallery_loader!r}): there is no such loader; there are "
                f"{', '.join(map(repr, names))}. Pass one of these names or an index below {len(names)}."
            )
        if len(names) < 2:
            raise ValueError(
                f"RetrievalMonitor(gallery_loader={self.gallery_loader!r}): there is one loader only, so there are no "
                "queries. Return two loaders, or leave gallery_loader out for leave-one-out."
            )
        return known[self.gallery_loader]

    def _evaluate(self, trainer: Trainer, name: str, loader: int, gallery: int | None) -> RetrievalReport | Exception:
        """The report, or what went wrong; the same in every process, each of which brings what it holds."""
        processes = all_processes()
        try:
            with processes.together(), evaluation_progress(trainer, f"Retrieval of {name}") as progress:
                arguments: dict[str, Any] = self._settings.arguments()
                queries = self._shard(trainer, loader, is_gallery=False)
                arguments |= {"processes": processes, "progress": progress, "query_places": queries.places}
                sets = [queries.embeddings, queries.labels]
                if gallery is not None or self.gallery_flag is not None:
                    items = self._shard(trainer, loader if gallery is None else gallery, is_gallery=gallery is None)
                    sets += [items.embeddings, items.labels]
                    arguments["gallery_places"] = items.places
                return evaluate_retrieval(*sets, **arguments)
        except Exception as error:  # a metric must not end a training
            return error

    def _shard(self, trainer: Trainer, loader: int, *, is_gallery: bool) -> Shard:
        held = self._stores.get((loader, is_gallery), EmbeddingStore())
        if loader != self._gallery_index(trainer):  # no other set will be searched in it: not to be held twice
            self._stores.pop((loader, is_gallery), None)
        return held.shard(dataset_size=self._dealt(trainer, loader, ids=self.ids is not None))

    def _publish(
        self, pl_module: LightningModule, prefix: str, suffix: str, outcome: RetrievalReport | Exception
    ) -> None:
        names = self._settings.metric_names()
        values = dict.fromkeys((*names, "queries_without_match"), math.nan)
        if isinstance(outcome, RetrievalReport):
            self.reports[suffix] = outcome
            values |= outcome.metrics()
            values["queries_without_match"] = float(outcome.queries_without_match)
            self._say_notes(outcome, prefix + suffix)
        else:
            self._policy.handle(outcome, f"{prefix}/mAP{suffix} and its companions are NaN.")
        for name, value in values.items():
            self._log(pl_module, f"{prefix}/{name}{suffix}", value, prog_bar=self.prog_bar and name == "mAP")

    def _say_notes(self, report: RetrievalReport, where: str) -> None:
        """Each kind of note once, so that a long training is not full of them."""
        for note in report.messages:
            kind = "".join(character for character in note if not character.isdigit())
            if kind not in self._noted:
                self._noted.add(kind)
                self._policy.say(f"{where}: {note}")
