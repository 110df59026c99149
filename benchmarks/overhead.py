"""The overhead of the package in an import and in a training step, as ratios within one run.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --repeats 9 --steps 100

1. The import: seconds for torch and lightning, and the additional seconds for `import fewshot_callbacks`.
2. A training step of ProtoNet (Conv4, 20-way 1-shot glyph-sized images) with and without DiscriminantRatioMonitor. The
   monitor computes J and the variance ratio of every batch, from the step's outputs or from the output of a submodule.

Ratios are medians over the repeats with minimum and maximum. `retrieval.py` measures evaluations.
"""

import argparse
import logging
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import spread

from fewshot_callbacks import DiscriminantRatioMonitor, EpisodicBatchSampler, ProtoNet

COLUMNS = (
    Column("what"),
    Column("without it, ms", ",.1f"),
    Column("it adds, ms", ",.1f"),
    Column("with it, x without", ".3f"),
)


def import_cost(repeats: int) -> tuple[float, list[float]]:
    """Return the median seconds of importing torch and lightning, and the multiples with our import added."""
    code = (
        "import time; a = time.perf_counter(); import torch, lightning.pytorch; b = time.perf_counter();"
        "import fewshot_callbacks; fewshot_callbacks.RetrievalMonitor; fewshot_callbacks.DiscriminantRatioMonitor;"
        "c = time.perf_counter(); print(b - a, c - b)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(repeats)
    ]
    pairs = [tuple(map(float, run.stdout.split())) for run in runs]
    return statistics.median(base for base, _ in pairs), [1 + ours / base for base, ours in pairs]


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


def step_cost(source: str | tuple[str, str], steps: int, repeats: int) -> tuple[float, list[float]]:
    """Return the median seconds of a step without the monitor, and of each pair of runs with / without.

    Args:
        source: Where the monitor finds the embeddings.
        steps: Number of steps per run.
        repeats: Number of pairs of runs.
    """
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

    run([DiscriminantRatioMonitor(source=source)])  # compiles
    pairs = [(run([]), run([DiscriminantRatioMonitor(source=source)])) for _ in range(repeats)]
    return statistics.median(a for a, _ in pairs), [b / a for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    add_file_option(parser)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        measured = {
            "import of the package, after torch and Lightning": lambda: import_cost(options.repeats),
            "a training step, J and variance ratio of every batch": lambda: step_cost(
                ("embeddings", "labels"), options.steps, options.repeats
            ),
            "the same, embeddings from the output of a submodule": lambda: step_cost(
                "backbone", options.steps, options.repeats
            ),
        }
        for name, measure in measured.items():
            without, ratios = measure()
            added = (statistics.median(ratios) - 1) * without
            results.add(name, 1000 * without, 1000 * added, spread(ratios))


if __name__ == "__main__":
    main()
