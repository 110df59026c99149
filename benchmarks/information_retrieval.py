"""Compare the time of `ExactRetrievalEvaluator` and sentence-transformers' `InformationRetrievalEvaluator`, without encoder.

    python benchmarks/information_retrieval.py                     # as many queries as MS MARCO dev, 100,000 documents
    python benchmarks/information_retrieval.py --queries 500 --documents 20000

Queries and documents are random unit vectors; each query has one relevant document, its vector plus noise. The evaluators
take turns, each in its own process, so that the peak memory is separate. The table shows medians with minimum and maximum
over the turns, and the largest difference from our values.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import spread
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import cos_sim

from fewshot_callbacks.integrations import ExactRetrievalEvaluator

EVALUATORS = {"ours": ExactRetrievalEvaluator, "theirs": InformationRetrievalEvaluator}
COLUMNS = (
    Column("evaluator"),
    Column("seconds", ".1f"),
    Column("processor seconds", ".1f"),
    Column("MB beyond the embeddings", ",.0f"),
    Column("largest difference of a value", ".0e"),
)


class Vectors:
    """A model that takes row numbers as texts, so that encoding takes no time."""

    similarity_fn_name = "cosine"
    model_card_data = type("Card", (), {"set_evaluation_metrics": lambda *_: None})()

    def __init__(self, queries: int, documents: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.corpus = torch.nn.functional.normalize(torch.randn(documents, dim, generator=generator))
        noise = torch.randn(queries, dim, generator=generator) * 0.25
        self.queries = torch.nn.functional.normalize(self.corpus[:queries] + noise)

    def similarity(self, queries: torch.Tensor, corpus: torch.Tensor) -> torch.Tensor:
        return cos_sim(queries, corpus)

    def encode_query(self, rows: list[int], **_: Any) -> torch.Tensor:
        return self.queries[rows[0] : rows[-1] + 1]

    def encode_document(self, rows: list[int], **_: Any) -> torch.Tensor:
        return self.corpus[rows[0] : rows[-1] + 1]


def measure(evaluator: str, queries: int, documents: int, dim: int) -> None:
    """Print seconds, processor seconds, the peak memory beyond the embeddings in MB, and the values."""
    kind = EVALUATORS[evaluator]
    small = {number: number for number in range(300)}
    # compiles kernels, and measures the matrix products of the processor
    kind(small, small, {number: {number} for number in small})(Vectors(300, 300, dim))
    model = Vectors(queries, documents, dim)
    texts = {number: number for number in range(documents)}
    task = {number: number for number in range(queries)}, texts, {number: {number} for number in range(queries)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    worked = time.process_time()
    values = kind(*task)(model)
    seconds = time.perf_counter() - started
    worked = time.process_time() - worked
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    print(json.dumps({"seconds": seconds, "processor": worked, "MB": peak, "values": values}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=6980)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=2)
    add_file_option(parser)
    parser.add_argument("--measure", choices=EVALUATORS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [options.queries, options.documents, options.dim]
    if options.measure:
        measure(options.measure, *sizes)
        return
    print(f"{sizes[0]:,} queries, {sizes[1]:,} documents, {sizes[2]} dimensions\n")
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        found: dict[str, list[dict[str, Any]]] = {evaluator: [] for evaluator in EVALUATORS}
        for _ in range(options.repeats):
            for evaluator in EVALUATORS:
                found[evaluator].append(in_process_of_its_own(evaluator, options))
        first = found["ours"][0]["values"]
        for evaluator, rounds in found.items():
            apart = max(abs(took["values"][key] - first[key]) for took in rounds for key in first)
            figures = [spread([took[key] for took in rounds]) for key in ("seconds", "processor", "MB")]
            results.add(f"`{EVALUATORS[evaluator].__name__}`", *figures, apart)


def in_process_of_its_own(evaluator: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `measure` prints in another process."""
    sizes = ("--queries", options.queries, "--documents", options.documents, "--dim", options.dim)
    command = [sys.executable, "-W", "ignore", __file__, "--measure", evaluator, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return took


if __name__ == "__main__":
    main()
