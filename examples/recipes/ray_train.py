"""Evaluate a set of files with Ray Train, in two workers.

Each worker reads its own files, and both get the report of the whole set.
Ray starts the workers and joins them in a torch process group, which
`all_processes()` finds. On a cluster, connect with
`ray.init(address="auto")`, and write the embeddings and the report to a
folder that all machines can reach.
"""

import os
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray sends no usage statistics

import numpy as np
import ray
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from fewshot_callbacks import Shards, Share, evaluate_retrieval
from fewshot_callbacks.functional import RetrievalReport
from fewshot_callbacks.metrics import all_processes

METRICS = ("recall@1", "mAP")


def write_embeddings(folder: Path) -> list[str]:
    """Write 1,000 embeddings to four files, and return their paths.

    Your embedding jobs do this.
    """
    random = np.random.default_rng(0)
    labels = np.arange(1000) % 50
    embeddings = np.eye(50)[labels] + 0.3 * random.standard_normal(
        (1000, 50)
    )
    for part, rows in enumerate(np.array_split(np.arange(1000), 4)):
        np.savez(
            folder / f"part-{part}.npz",
            embeddings=embeddings[rows].astype(np.float16),
            labels=labels[rows],
        )
    return [str(path) for path in sorted(folder.glob("part-*.npz"))]


def evaluate(config: dict) -> None:
    """Evaluate the whole set in one of the workers."""
    rank, workers = (
        get_context().get_world_rank(),
        get_context().get_world_size(),
    )
    own = [
        str(path) for path in np.array_split(config["files"], workers)[rank]
    ]
    report = evaluate_retrieval(
        Shards(own, labels="labels"),
        share=Share(all_processes()),
        metrics=METRICS,
        memory_mb=512,
    )
    if rank == 0:
        report.save(config["report"])


def main() -> None:
    folder = Path.cwd()
    files = write_embeddings(folder)
    # Workers exchange rows through torch, so the object store is small.
    # Their output goes to Ray's logs.
    ray.init(
        num_cpus=2, object_store_memory=100 * 2**20, log_to_driver=False
    )
    try:
        TorchTrainer(
            evaluate,
            train_loop_config={
                "files": files,
                "report": str(folder / "ray.report.npz"),
            },
            scaling_config=ScalingConfig(num_workers=2),  # one CPU each
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(
                name="evaluation", storage_path=str(folder / "ray_results")
            ),
        ).fit()
    finally:
        ray.shutdown()  # stops the processes that ray.init started
    report = RetrievalReport.load(folder / "ray.report.npz")
    print(
        f"{report.queries:,} queries, "
        f"recall@1 {report.values['recall@1']:.6f}, mAP {report.mAP:.6f}"
    )


if __name__ == "__main__":
    main()
