"""What the suite costs, as ratios inside one run (shared machines are noisy; single seconds mean little).

    python benchmarks/overhead.py

1. import: seconds that `import fewshot_callbacks` adds to importing torch and lightning;
2. J: a training step of ProtoNet (Conv4, 20-way 1-shot glyph-sized images) with and without DiscriminantRatioMonitor;
3. retrieval: `evaluate_retrieval` with all metrics against the bare float32 product of all pairs, and against a sort of
   each row in chunks (mAP alone), as it is written by hand.
"""

import argparse
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import DiscriminantRatioMonitor, EpisodicBatchSampler, ProtoNet, evaluate_retrieval


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def import_cost(repeats: int) -> tuple[float, float]:
    """Median seconds of importing torch and lightning, and what our import adds."""
    code = (
        "import time; a = time.perf_counter(); import torch, lightning.pytorch; b = time.perf_counter();"
        "import fewshot_callbacks; fewshot_callbacks.RetrievalMonitor; fewshot_callbacks.DiscriminantRatioMonitor;"
        "c = time.perf_counter(); print(b - a, c - b)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(repeats)
    ]
    base, ours = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    return statistics.median(base), statistics.median(ours)


class StepTimer(Callback):
    """Seconds of each training step, callbacks included."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._last: float | None = None

    def on_train_batch_start(self, *_: object) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.steps.append(now - self._last)
        self._last = now


def step_cost(steps: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a step without the monitor, and the median over pairs of runs of with / without."""
    images, labels = torch.rand(1000, 1, 32, 32), torch.arange(1000) % 50

    def run(monitors: list[Callback]) -> float:
        seed_everything(0, verbose=False)
        timer = StepTimer()
        sampler = EpisodicBatchSampler(labels, ways=20, shots=1, queries=3, episodes=steps)
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[timer, *monitors],
        )  # fmt: skip
        trainer.fit(
            ProtoNet("conv4", "dr", in_channels=1), DataLoader(TensorDataset(images, labels), batch_sampler=sampler)
        )
        return statistics.median(timer.steps[3:])

    run([])
    pairs = [(run([]), run([DiscriminantRatioMonitor()])) for _ in range(repeats)]
    return statistics.median(a for a, _ in pairs), statistics.median(b / a for a, b in pairs)


def bare_product(embeddings: torch.Tensor) -> None:
    for part in embeddings.split(1024):
        part @ embeddings.T


def sorted_rows(embeddings: torch.Tensor, labels: torch.Tensor) -> float:
    """Sort each row of scores, in chunks, for the mAP."""
    values, rank = [], torch.arange(1, len(labels))
    for start in range(0, len(labels), 512):
        scores = embeddings[start : start + 512] @ embeddings.T
        scores[torch.arange(len(scores)), torch.arange(start, start + len(scores))] = -torch.inf
        ranked = labels[scores.argsort(dim=1, descending=True)[:, :-1]] == labels[start : start + 512, None]
        values.append((ranked.cumsum(1) / rank * ranked).sum(1) / ranked.sum(1))
    return float(torch.cat(values).mean())


def retrieval_cost(items: int, dim: int, noise: float, repeats: int) -> dict[str, float]:
    labels = torch.arange(items) % max(items // 53, 1)
    embeddings = torch.randn(int(labels.max()) + 1, dim)[labels] + noise * torch.randn(items, dim)
    embeddings = torch.nn.functional.normalize(embeddings, dim=1)
    bare_product(embeddings)
    report = evaluate_retrieval(embeddings, labels)
    floors = [seconds(lambda: bare_product(embeddings)) for _ in range(repeats)]
    ours = [seconds(lambda: evaluate_retrieval(embeddings, labels)) for _ in range(repeats)]
    by_hand = [seconds(lambda: sorted_rows(embeddings, labels)) for _ in range(repeats)]
    floor = statistics.median(floors)
    return {
        "mAP": report.mAP,
        "floor": floor,
        "ours": statistics.median(ours) / floor,
        "sorted": statistics.median(by_hand) / floor,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--items", type=int, nargs="*", default=[4000, 8000])
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    console = Console()

    base, ours = import_cost(options.repeats)
    console.print(f"import: torch and lightning {base:.2f} s, ours on top [bold]{ours:.3f} s[/]")
    step, ratio = step_cost(options.steps, options.repeats)
    console.print(f"training step: {1000 * step:.0f} ms; with J of every batch [bold]{ratio:.3f}[/] times that")

    table = Table(title="evaluation, d = 512, 53 items a class: seconds as multiples of the bare float32 product")
    for column in ("items", "mAP", "product, s", "ours, all metrics", "rows sorted, mAP alone"):
        table.add_column(column, justify="right")
    for items in options.items:
        for noise in (1.0, 2.5, 5.0, 100.0):
            row = retrieval_cost(items, 512, noise, options.repeats)
            table.add_row(
                f"{items:,}", f"{row['mAP']:.3f}", f"{row['floor']:.2f}", f"{row['ours']:.1f}", f"{row['sorted']:.1f}"
            )
    console.print(table)


if __name__ == "__main__":
    main()
