"""Check on this machine's GPU that evaluations equal the CPU bit for bit, and time them. Prints a table and writes a JSON.

    make gpu                                    # any machine with CUDA: under ten minutes, nothing is downloaded
    python tools/gpu_check.py --parts times     # only the times
    python tools/gpu_check.py --device cpu      # small sizes without a GPU, to try the check itself

A failed part does not stop the others; its failure is printed. Please send `build/gpu_check.json` with an issue.
`python tools/figures_of_speed.py --gpu build/gpu_check.json` reads the tables of docs/research/measurements.md from it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import DEFAULT_METRICS, DiscriminantRatioMonitor, RetrievalMonitor, evaluate_retrieval
from fewshot_callbacks.distributed.torch_distributed import TorchProcesses, cpu_group
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional import Share

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from _embeddings import make  # noqa: E402
from _results import Column, machine  # noqa: E402

SETS = 200
"""Number of random sets that are evaluated on both devices."""
NOISE = {"well-trained": 0.9, "hard": 3.0}
SHAPES = (("well-trained", 512), ("hard", 512), ("well-trained", 128), ("heavy-tailed", 256))
"""Difficulty and dimension of the timed sets."""
SIZES = {"cuda": (8_000, 31_730, 158_652, 1_000_000), "cpu": (500, 1_000)}
MOST_ON_CPU = 31_730
"""Larger sets are not also evaluated on the CPU: a few cores would take minutes."""
FEWEST_FOR_MULTIPLE = 10_000
"""The product of a smaller set takes less than a millisecond."""
MOST_HEAVY_TAILED = 158_652
"""Larger heavy-tailed sets take minutes to make."""
PER_CLASS = 53
TESTS = ("tests/engine/test_cuda.py", "tests/functional/test_other_libraries.py")
"""Folders of the tests that are marked `cuda`."""
MOST_SECONDS = 150.0
"""Limit per size: a size that would take longer is left out, and this is printed."""
GROWTH = 1.5
"""Time grows as items to this power: on an H100 1.0 for well-trained and 1.5 for hard sets, from 31,730 to 158,652."""
APART = {"seconds", "memory_note", "curve", "pair_counts", "auc_pr", "passes"}
"""Fields of a report that are not exact: times, and values at scores that a sample chose."""
STOPS = {"cuda": ("cudaStreamSynchronize", "cudaDeviceSynchronize"), "cpu": ("aten::_local_scalar_dense",)}
"""Profiler names of operations that wait for a device; on the CPU, operations that would wait on a device."""


@dataclass
class Setting:
    """Where and how large."""

    device: str
    out: dict[str, Any]
    file: Path

    @property
    def small(self) -> bool:
        """Whether this run only tries the check itself."""
        return self.device == "cpu"

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if not self.small:
            torch.cuda.synchronize()

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate on the device; without one, use the operations that would run there."""
        if not self.small:
            return evaluate_retrieval(*arguments, device=self.device, **options)
        with engine_options(as_on_device=True):
            return evaluate_retrieval(*arguments, **options)

    def write(self) -> None:
        """Write the results so far, and their tables."""
        self.out["tables"] = tables(self.out)
        self.file.write_text(json.dumps(self.out, indent=1) + "\n", encoding="utf-8")

    @property
    def name(self) -> str:
        """What computes."""
        return "the CPU, by the operations of a device" if self.small else torch.cuda.get_device_name(0)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the time of a call, until the device has finished."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started


def versions(setting: Setting) -> str:
    """Name the machine."""
    names = ("torch", "lightning", "torchmetrics", "numpy", "numba", "fewshot_callbacks")
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if not setting.small:
        device = torch.cuda.get_device_properties(0)
        found |= {"device": device.name, "memory_gb": round(device.total_memory / 1e9, 1), "cuda": torch.version.cuda}
        found["capability"] = f"{device.major}.{device.minor}"
    setting.out["versions"] = found
    return ", ".join(f"{name} {value}" for name, value in found.items() if value)


def tests(setting: Setting) -> str:
    """Run the tests that are marked `cuda`."""
    if importlib.util.find_spec("pytest") is None:
        return "left out: pytest is not installed"
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
    if done.returncode:
        raise RuntimeError(f"{last}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return last


def values(report: Any) -> dict[str, Any]:
    """Return the values that must be equal to the last bit."""
    found = {field.name: getattr(report, field.name) for field in fields(report) if field.name not in APART}
    found["per_query"] = {name: each.tolist() for name, each in report.per_query.items()}
    if report.pooled is not None:  # without the bounds of the area, which depend on the estimates
        pooled = report.pooled
        found["pooled"] = {field.name: getattr(pooled, field.name) for field in fields(pooled) if field.compare}
    return {name: repr(value.tolist() if isinstance(value, Tensor) else value) for name, value in found.items()}


def random_case(seed: int) -> tuple[list[Any], dict[str, Any]]:
    """Return random arguments of an evaluation: any similarity, type, ties, equal rows, groups, and any number of rows."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    items, dim, classes = (
        chance.choice((1, 3, 17, 64, 129, 400)),
        chance.choice((1, 3, 16, 33, 128)),
        chance.randint(1, 9),
    )
    similarity = chance.choice(("cosine", "dot", "euclidean"))
    dtype = chance.choice((torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16))

    def side(number: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(number) % classes
        if chance.random() < 0.3:  # classes of any size
            labels = (classes * torch.rand(number, generator=generator) ** 3).long()
        rows = torch.randn(classes, dim, generator=generator)[labels] + torch.randn(number, dim, generator=generator)
        if chance.random() < 0.4:  # many ties
            rows = rows.round()
        if chance.random() < 0.2:  # far from the origin
            rows = rows + 100
        if chance.random() < 0.4:  # repeated rows, across classes
            rows = rows[torch.randint(0, max(1, number // 3), (number,), generator=generator)]
        if chance.random() < 0.2:  # binary codes
            rows = rows.sign()
        return rows.to(dtype), labels

    options: dict[str, Any] = {
        "similarity": similarity,
        "metrics": (*DEFAULT_METRICS, "recall@precision0.5", "recall@precision0.9", "fnmr@fmr0.01", "eer"),
        "label_groups": 2 if classes > 3 else None,
    }
    arguments: list[Any] = [*side(items)]
    if chance.random() < 0.4:
        arguments += side(chance.choice((1, 30, 257)))
        if chance.random() < 0.5:
            options |= {"query_ids": torch.arange(items), "gallery_ids": torch.arange(len(arguments[2]))}
    if chance.random() < 0.4:
        options["query_groups"] = torch.randint(0, 5, (items,), generator=generator)
        if len(arguments) > 2:
            options["gallery_groups"] = torch.randint(0, 5, (len(arguments[2]),), generator=generator)
    return arguments, options


def bits(setting: Setting) -> str:
    """Compare evaluations on the device with the CPU, on random sets."""
    differ, refused, number = [], 0, SETS // 10 if setting.small else SETS
    for seed in range(number):
        arguments, options = random_case(seed)
        try:
            there = values(evaluate_retrieval(*arguments, **options))
        except ValueError:
            refused += 1
            continue
        here = values(setting.evaluate(*arguments, **options))
        differ += [f"set {seed}: {name}" for name in there if here[name] != there[name]]
    setting.out["bits"] = {"sets": number, "refused": refused, "differ": differ}
    if differ:
        raise RuntimeError(f"{len(differ)} values differ: {', '.join(differ[:10])}")
    return (
        f"{number - refused} random sets give the bits of the CPU ({refused} more are refused by both, without a match)"
    )


def stored(setting: Setting) -> str:
    """Compare evaluations of files on the device with the CPU."""
    differ = []
    with tempfile.TemporaryDirectory() as folder:
        for number, repeated in ((60, 1), (700, 1), (700, 5)):
            rows, labels = items_of(number, 24, 2.0, "cpu")
            rows = rows[torch.arange(number) // repeated]
            file = Path(folder) / f"{number}_{repeated}.npy"
            np.save(file, rows.numpy())
            there = values(evaluate_retrieval(rows, labels))
            mapped = np.load(file, mmap_mode="r")
            here = values(setting.evaluate(mapped, labels, memory_mb=8))
            differ += [f"{file.name}: {name}" for name in there if here[name] != there[name]]
    if differ:
        raise RuntimeError(f"{len(differ)} values differ: {', '.join(differ[:10])}")
    return "the reports of the CPU"


def items_of(number: int, dim: int, noise: float, device: str) -> tuple[Tensor, Tensor]:
    """Return unit vectors around class centres, and labels; on the CPU."""
    generator = torch.Generator(device).manual_seed(0)
    labels = torch.arange(number) % max(2, number // PER_CLASS)
    centres = torch.nn.functional.normalize(
        torch.randn(int(labels.max()) + 1, dim, device=device, generator=generator), dim=1
    )
    rows = torch.empty(number, dim)
    for some in torch.arange(number).split(100_000):
        around = torch.randn(len(some), dim, device=device, generator=generator) * (noise / dim**0.5)
        rows[some] = torch.nn.functional.normalize(centres[labels[some].to(device)] + around, dim=1).cpu()
    return rows, labels


def memory(setting: Setting) -> str:
    """Measure how much device memory an evaluation uses under several budgets."""
    rows, labels = items_of(1_000 if setting.small else 10_000, 128, 1.5, setting.device)
    found, too_much = {}, []
    for budget in (64, 256, 1024):
        if setting.small:
            setting.evaluate(rows, labels, memory_mb=budget)
            continue
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        report = setting.evaluate(rows, labels, memory_mb=budget)
        found[budget] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
        if found[budget] > 1.1 * budget and report.memory_note is None:
            too_much.append(f"{found[budget]} of {budget} MB")
    setting.out["memory"] = found
    if too_much:
        raise RuntimeError(f"More memory than memory_mb: {', '.join(too_much)}")
    return ", ".join(f"{taken} of {budget} MB" for budget, taken in found.items()) or "a device is needed to measure it"


class Encoder(LightningModule):
    """A small user module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return embeddings."""
        embeddings: Tensor = self.encoder(inputs)
        return embeddings

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a loss, embeddings and labels."""
        embeddings = self(batch[0])
        return {"loss": embeddings.square().mean(), "embeddings": embeddings, "labels": batch[1]}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return embeddings and labels."""
        return {"embeddings": self(batch[0]), "labels": batch[1]}

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters())


def loader() -> DataLoader[Any]:
    """Return some batches."""
    labels = torch.arange(640) % 32
    return DataLoader(TensorDataset(torch.randn(32, 32)[labels] + torch.randn(640, 32), labels), batch_size=64)


def trained(setting: Setting, callbacks: list[Any], **options: Any) -> Trainer:
    """Fit the small module."""
    trainer = Trainer(
        accelerator="cpu" if setting.small else "cuda", devices=1, max_epochs=1, logger=False, callbacks=callbacks,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(Encoder(), loader(), loader())
    return trainer


def training(setting: Setting) -> str:
    """Train with both monitors in mixed precision."""
    trainer = trained(setting, [RetrievalMonitor(), DiscriminantRatioMonitor()], precision="bf16-mixed")
    logged = {name: float(trainer.callback_metrics[name]) for name in ("val/mAP", "train/J", "val/recall@1")
              if name in trainer.callback_metrics}  # fmt: skip
    setting.out["training"] = logged
    if "val/mAP" not in logged:
        raise RuntimeError(f"val/mAP was not logged, but {sorted(trainer.callback_metrics)}")
    return ", ".join(f"{name} {value:.3f}" for name, value in logged.items())


def stops(setting: Setting) -> str:
    """Count the operations that wait for the device in a training step, with J of every batch and without.

    A run of ten steps is compared with a run of five, so that waits of an epoch or of the first batch do not count.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [] if setting.small else [torch.profiler.ProfilerActivity.CUDA]
    found = {}
    for name, monitors in (("without J", 0), ("with J", 1)):
        counts = []
        for steps in (5, 10):
            callbacks = [DiscriminantRatioMonitor() for _ in range(monitors)]
            with torch.profiler.profile(activities=activities) as profile:
                trained(setting, callbacks, limit_train_batches=steps, limit_val_batches=0, num_sanity_val_steps=0)
            events = Counter(event.name for event in profile.events())
            counts.append(sum(events[stop] for stop in STOPS[setting.device]))
        found[name] = (counts[1] - counts[0]) / 5
    setting.out["stops"] = found
    more = found["with J"] - found["without J"]
    if more > 0 and not setting.small:
        raise RuntimeError(f"{more} more synchronisations in each step with J than without")
    return f"{found['with J']:g} in a step with J, {found['without J']:g} without"


class ResNet(LightningModule):
    """A ResNet-50 with a 512-dimensional head; its images are already on the device."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        self.network = torchvision.models.resnet18() if small else torchvision.models.resnet50()
        self.network.fc = torch.nn.Linear(self.network.fc.in_features, 512)
        self.classifier = torch.nn.Linear(512, 32)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a loss, embeddings and labels."""
        images, labels = batch
        embeddings = self.network(images)
        loss = torch.nn.functional.cross_entropy(self.classifier(embeddings), labels)
        return {"loss": loss, "embeddings": embeddings, "labels": labels}

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step(setting: Setting) -> str:
    """Time a training step of a ResNet-50 in bfloat16 with J of every batch and without, in turns."""
    size, batch, steps = (32, 8, 3) if setting.small else (224, 128, 40)
    images = torch.randn(batch, 3, size, size, device=setting.device).to(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=setting.device) % 32
    batches: DataLoader[Any] = DataLoader([(images, labels)] * steps, batch_size=None)  # type: ignore[arg-type]

    def seconds(monitors: int) -> float:
        callbacks = [DiscriminantRatioMonitor() for _ in range(monitors)]
        trainer = Trainer(
            accelerator="cpu" if setting.small else "cuda", devices=1, max_epochs=1, logger=False, callbacks=callbacks,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="bf16-mixed",
        )  # fmt: skip
        return setting.seconds(lambda: trainer.fit(module, batches)) / steps

    module = ResNet(setting.small)
    seconds(1)  # warmed up
    rounds = [(seconds(0), seconds(1)) for _ in range(2 if setting.small else 5)]
    without, with_j = (statistics.median(times) for times in zip(*rounds, strict=True))
    quotients = sorted(after / before for before, after in rounds)
    setting.out["step"] = {"without": without, "with J": with_j, "quotients": quotients}
    return (
        f"{1000 * without:.1f} ms without J, {1000 * with_j:.1f} ms with J; quotients of {len(rounds)} rounds "
        f"{quotients[0]:.3f} to {quotients[-1]:.3f}"
    )


@contextmanager
def group(backend: str) -> Any:
    """Make this process its own process group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.SystemRandom().randint(20_000, 60_000))}
    torch.distributed.init_process_group(backend, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def collectives(setting: Setting) -> str:
    """Evaluate in an NCCL group, with an additional gloo group for tensors on the CPU."""
    rows, labels = items_of(500, 16, 2.0, "cpu")
    alone = values(evaluate_retrieval(rows, labels))
    with group("gloo" if setting.small else "nccl"):
        together = values(setting.evaluate(rows, labels, share=Share(TorchProcesses(cpu_group()))))
    if together != alone:
        raise RuntimeError(f"Other values: {[name for name in alone if alone[name] != together[name]]}")
    return "the report of one process without a group"


def product_seconds(setting: Setting, rows: Tensor, kind: str) -> float:
    """Return the time of the bare product of all pairs, from a sample of its tiles."""
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    there, size = rows.to(setting.device, dtype), min(len(rows), 8192)
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    out = torch.empty(size, size, device=setting.device, dtype=dtype)
    torch.mm(there[:size], there[:size].T, out=out)
    taken = min(setting.seconds(lambda: torch.mm(there[:size], there[-size:].T, out=out)) for _ in range(5))
    torch.backends.cuda.matmul.allow_tf32 = False
    return taken * (len(rows) / size) ** 2


def topk_seconds(setting: Setting, rows: Tensor) -> float:
    """Return the time of finding the R nearest items of each row, written by hand: truncated, without any other metric."""
    there = rows.to(setting.device)
    step = max(1, min(4096, 2**28 // len(rows)))
    some = [slice(start, start + step) for start in range(0, len(rows), step)]
    tried = some[: max(1, min(len(some), 20))]

    def work() -> None:
        for part in tried:
            torch.topk(there[part] @ there.T, min(PER_CLASS, len(rows)), dim=1)

    work()
    return setting.seconds(work) * len(some) / len(tried)


def faiss_seconds(setting: Setting, rows: Tensor) -> float | None:
    """Return the time of FAISS on the GPU for the same search; None if it is not installed."""
    if setting.small or importlib.util.find_spec("faiss") is None:
        return None
    faiss: Any = importlib.import_module("faiss")
    if not hasattr(faiss, "StandardGpuResources"):
        return None
    index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, faiss.IndexFlatIP(rows.shape[1]))
    index.add(rows.numpy())
    return setting.seconds(lambda: index.search(rows.numpy(), PER_CLASS))


def shape_of(difficulty: str, dim: int, number: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the rows and labels of a timed set, in main memory."""
    if difficulty == "heavy-tailed":
        return make(number, dim, difficulty)
    return items_of(number, dim, NOISE[difficulty], device)


def times(setting: Setting) -> str:
    """Time evaluations on the device and on the CPU; the large sets come last, because they take minutes."""
    setting.out["times"] = table = []
    setting.out["left_out"] = left_out = []
    last: dict[tuple[str, int], tuple[int, float]] = {}
    for number in SIZES[setting.device]:
        for difficulty, dim in SHAPES:
            case = f"N = {number:,}, d = {dim}, {difficulty}"
            before = last.get((difficulty, dim))
            expected = 0.0 if before is None else before[1] * (number / before[0]) ** GROWTH
            if expected > MOST_SECONDS:
                left_out.append(f"{case}: left out, it would take more than {MOST_SECONDS:.0f} s")
                continue
            if difficulty == "heavy-tailed" and number > MOST_HEAVY_TAILED:
                left_out.append(f"{case}: left out, such a set takes minutes to make")
                continue
            rows, labels = shape_of(difficulty, dim, number, setting.device)
            if before is None:
                setting.evaluate(rows, labels)  # warmed up
                evaluate_retrieval(rows, labels)
            taken = setting.seconds(lambda rows=rows, labels=labels: setting.evaluate(rows, labels))  # type: ignore[misc]
            last[difficulty, dim] = number, taken
            row: dict[str, Any] = {"items": number, "dim": dim, "difficulty": difficulty, "seconds": taken}
            row["cpu"] = None
            if number <= MOST_ON_CPU:
                row["cpu"] = setting.seconds(lambda rows=rows, labels=labels: evaluate_retrieval(rows, labels))  # type: ignore[misc]
            row |= {kind: taken / product_seconds(setting, rows, kind) for kind in ("float32", "tf32", "half")}
            row |= {"topk": topk_seconds(setting, rows), "faiss": faiss_seconds(setting, rows)}
            table.append(row)
            cpu = "" if row["cpu"] is None else f"; CPU {row['cpu']:.2f} s"
            products = ", ".join(f"{row[kind]:.2f} x {kind}" for kind in ("float32", "tf32", "half"))
            faiss = "" if row["faiss"] is None else f", FAISS {row['faiss']:.2f} s"
            print(f"    {case}: {taken:.2f} s, {products}{cpu}; topk {row['topk']:.2f} s{faiss}", flush=True)
            setting.write()  # an interrupt keeps the results so far
    return "\n".join([f"{len(table)} times", *left_out])


def _multiple(row: dict[str, Any]) -> float | None:
    """Return the time of an evaluation as a multiple of the TF32 product; None for sets too small for a meaningful value."""
    return row["tf32"] if row["items"] >= FEWEST_FOR_MULTIPLE else None


def tables(out: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of docs/research/measurements.md: name of a table -> its records (benchmarks/_results.py)."""
    about = {"command": "make gpu", "machine": out["machine"]}
    found = {}
    times = out.get("times", ())
    if times:
        columns = [Column("items"), Column("set"), Column("d"), Column("GPU, seconds", ".2f")]
        columns += [Column("x TF32 product", ".0f"), Column("topk, seconds", ".3f")]
        rows: list[list[Any]] = [
            [f"{row['items']:,}", row["difficulty"], str(row["dim"]), row["seconds"], _multiple(row), row["topk"]]
            for row in times
        ]
        if any(row["cpu"] is not None for row in times):
            columns.append(Column("CPU, seconds", ".2f"))
            for cells_of_row, row in zip(rows, times, strict=True):
                cells_of_row.append(row["cpu"])
        found["gpu"] = [about | {"columns": columns, "rows": rows}]
    cells: list[list[Any]] = [
        [f"memory of the device with memory_mb={budget}, 10,000 x 128, MB", taken]
        for budget, taken in out.get("memory", {}).items()
    ]
    cells += [
        [f"waits for the device in a training step {name}", count] for name, count in out.get("stops", {}).items()
    ]
    if "step" in out:
        step = out["step"]
        quotients = step["quotients"]
        cells += [
            ["a step of ResNet-50, batch 128 at 224 x 224, bfloat16, without J, ms", 1000 * step["without"]],
            ["the same with J of every batch, ms", 1000 * step["with J"]],
            [
                "the second divided by the first, alternating rounds",
                (statistics.median(quotients), quotients[0], quotients[-1]),
            ],
        ]
    if cells:
        found["gpu_training"] = [about | {"columns": [Column("what"), Column("result", ".4g")], "rows": cells}]
    return found


CHECKS: dict[str, Callable[[Setting], str]] = {
    "versions": versions,
    "tests": tests,
    "bits": bits,
    "files": stored,
    "training": training,
    "waits": stops,
    "step": step,
    "nccl": collectives,
    "memory": memory,
    "times": times,
}
"""name of a part -> its function"""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=CHECKS, default=[*CHECKS], help="parts to run (default: all)")
    parser.add_argument("--commit", help="the checked commit, if the files are not in a repository")
    parser.add_argument("--output", type=Path, default=Path("build/gpu_check.json"), help="JSON file to write")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here. `--device cpu` tries the check on small sizes.")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.device, {}, options.output)
    setting.out["machine"] = machine(torch.get_num_threads(), setting.name)
    if options.commit is not None:
        setting.out["machine"]["commit"] = options.commit
    setting.out["failed"] = failed = {}
    for name in options.parts:
        started = time.perf_counter()
        try:
            said = CHECKS[name](setting)
        except Exception as error:  # the other parts are worth their minutes
            said = f"FAILED: {type(error).__name__}: {error}".strip()
            failed[name] = traceback.format_exc()
        print(f"{name} ({time.perf_counter() - started:.0f} s)\n    " + said.replace("\n", "\n    "), flush=True)
        setting.write()
    print(f"{len(failed)} of {len(options.parts)} parts failed. {options.output}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
