"""What `fewshot demo` does: trains the networks, tests them, and compares them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fewshot_callbacks._terminal import as_text
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, ReportWriter, RetrievalMonitor
from fewshot_callbacks.cli.curves import read_curves, training_curves
from fewshot_callbacks.cli.demo import MARKER, TITLES, TRAINED, Trained, note_trained, trained_in
from fewshot_callbacks.cli.fit import signal_behind
from fewshot_callbacks.data import ClassBalanced, Episodes, FewShotDataModule, FewShotDataset, Glyphs
from fewshot_callbacks.functional.retrieval import DEFAULT_METRICS, RetrievalReport
from fewshot_callbacks.losses import SoftAveragePrecisionLoss
from fewshot_callbacks.plots import save
from fewshot_callbacks.protonet import EmbeddingModule, EpisodeProtocol, ProtoNet, SoftmaxHead

# Of R@P and Grouped Recall, where these move on the test scripts: a precision of 0.95 is reached by less than 1 % of
# the relevant pairs, and among 10 classes random weights already have a Grouped Recall@1 of 0.98.
PRECISION, GROUP_SIZE = 0.5, 50
# Of a training episode; a batch of soft AP has as many images of as many classes. 5-way separates the heads less well.
WAYS, QUERIES = 20, 3
SHOWN = ("train/loss", "train/J", "train/batch_AP", "val/mAP")


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    name: str
    accuracy: float
    accuracy_ci95: float
    episodes: int
    episodes_hash: str
    j: float
    report: RetrievalReport
    seconds: float


@dataclass(frozen=True)
class Compared:
    """The demo at its end."""

    rows: Sequence[Row]
    seconds: float

    def show(self, output: Path) -> None:
        """Print the table, and what lies in the folder of the demo."""
        console = Console()
        console.print()
        console.print(comparison(self.rows))
        console.print(
            as_text(
                f"{self.seconds:.0f} s. Curves of J and mAP: {output / 'curves.png'}; values: "
                f"{output / 'dr' / 'metrics.csv'}; best checkpoints: {output / 'dr' / 'best.ckpt'}; "
                f"report with failures and suspects: {output / 'dr' / 'report.html'}; "
                f"TensorBoard: tensorboard --logdir {output}"
            ),
            soft_wrap=True,
        )


def train_and_compare(options: Any, folder: Path) -> Compared:
    """Train the networks that a folder lacks, test all, and write curves, logs and checkpoints there."""
    console = Console()
    started = time.perf_counter()
    console.print("[bold]fewshot demo[/]: a class is a character, its images are the typefaces that draw it.")
    with console.status("Drawing the glyphs (once; they are cached) ..."):
        glyphs = Glyphs()
    data = data_of(glyphs, options)
    for line in split_lines(glyphs):
        console.print(as_text(line))
    rows = [evaluate_random(data, options, folder)]
    for name in TRAINED:
        batches = (
            f"batches of {WAYS} classes x {1 + QUERIES} images" if name == "soft_ap" else "episodes, 20-way 1-shot"
        )
        console.print(f"\n[bold]{TITLES[name]}[/]: {options.epochs} epochs of {options.episodes} {batches}")
        rows.append(train_and_test(name, data, options, folder, console))
    curves = training_curves({name: [read_curves(folder / name / "metrics.csv")] for name in TRAINED}, TITLES)
    save(curves, folder / "curves.png")
    (folder / MARKER).write_text(json.dumps([as_dict(row) for row in rows], indent=2) + "\n")
    return Compared(rows, time.perf_counter() - started)


def data_of(glyphs: FewShotDataset, options: Any, *, balanced: bool = False) -> FewShotDataModule:
    """Make the data of the demo, in episodes or in class-balanced batches of as many images."""
    return FewShotDataModule(
        glyphs,
        train=ClassBalanced(WAYS, 1 + QUERIES, options.episodes)
        if balanced
        else Episodes(WAYS, queries=QUERIES, episodes=options.episodes),
        evaluation=EpisodeProtocol(ways=20, queries=9, episodes=options.test_episodes),
        batch_size=512,
        seed=options.seed,
    )


def split_lines(glyphs: Glyphs) -> Iterator[str]:
    """Describe the size and the content of each split."""
    for name in glyphs.splits:
        part = glyphs.with_split(name)
        scripts = ", ".join(dict.fromkeys(part.scripts))
        yield f"  {name:<5} {len(part):>6,} images of {len(part.class_names):>5,} classes: {scripts}"


class DemoProgressBar(RichProgressBar):
    """Lightning's progress bar, with the loss, J and mAP."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What the demo is about, in one line."""
        metrics = super().get_metrics(trainer, pl_module)
        return {name: value for name, value in metrics.items() if name in SHOWN}


def build(name: Trained, data: FewShotDataModule, options: Any) -> ProtoNet:
    """Make a network with new random weights, equal for every row; that of soft AP is tested by its cosines."""
    seed_everything(options.seed, verbose=False)
    head: Any = SoftmaxHead("unit_euclidean") if name == "soft_ap" else name
    return ProtoNet("conv4", head, in_channels=data.dataset.in_channels, evaluation=data.evaluation)


def retrieval_monitor(data: FewShotDataModule) -> RetrievalMonitor:
    """Make the monitor of the demo; its groups are smaller where the splits hold too few classes for two of them."""
    classes = min(len(data.images("val").class_names), len(data.images("test").class_names))
    return RetrievalMonitor(
        metrics=(*DEFAULT_METRICS, f"recall@precision{PRECISION:g}"), label_groups=min(GROUP_SIZE, classes // 2)
    )


def evaluate_random(data: FewShotDataModule, options: Any, folder: Path) -> Row:
    """Evaluate the network before any training."""
    monitor = retrieval_monitor(data)
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=1,
        logger=False,
        callbacks=[monitor, DiscriminantRatioMonitor()],
        default_root_dir=folder,
        enable_progress_bar=False,
    )
    return tested("random", trainer, build("softmax", data, options), data, monitor, None)


def train_and_test(name: Trained, data: FewShotDataModule, options: Any, folder: Path, console: Console) -> Row:
    """Train one network, keep the checkpoint of the best validation mAP, and test that.

    One that an interrupted demo has trained is only tested.
    """
    weights = trained_in(folder).get(name)
    if weights is None:
        shutil.rmtree(folder / name, ignore_errors=True)  # half a training
    network = build(name, data, options)
    model: LightningModule = network
    if name == "soft_ap":
        data = data_of(data.dataset, options, balanced=True)
        model = EmbeddingModule(network.backbone, SoftAveragePrecisionLoss(), ap_every_n_steps=10)
    monitor = retrieval_monitor(data)
    best = ModelCheckpoint(folder / name, filename="best", monitor="val/mAP", mode="max")
    # one report, of the test set
    path, names = str(folder.resolve() / name / "report.html"), data.images("test").class_names
    path = path.replace("{", "{{").replace("}", "}}")
    writers = [ReportWriter(path, names=names, prefix="test", max_share=None)] if name == "dr" else []
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=1,
        max_epochs=options.epochs,
        callbacks=[DiscriminantRatioMonitor(), monitor, best, DemoProgressBar(leave=True), *writers],
        logger=[
            CSVLogger(folder, name=name, version=""),
            TensorBoardLogger(str(folder), name=name, version="tensorboard"),
        ]
        if weights is None
        else False,  # a logger would begin its file anew
        log_every_n_steps=1,  # J of every batch, for the curves
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    if weights is None:
        try:
            trainer.fit(model, data)
        except SystemExit as stop:
            raise signal_behind(stop) from None
        console.print(f"  best validation mAP {float(best.best_model_score or 0):.3f}")
        weights = Path(best.best_model_path).name
        note_trained(folder, name, weights)
    else:
        console.print("  trained before the interruption")
    return tested(name, trainer, network, data, monitor, str(folder / name / weights))


def tested(
    name: str,
    trainer: Trainer,
    model: ProtoNet,
    data: FewShotDataModule,
    monitor: RetrievalMonitor,
    weights: str | None,
) -> Row:
    """Test a network, and make its row."""
    started = time.perf_counter()
    try:
        trainer.test(model, data, ckpt_path=weights, verbose=False)
    except SystemExit as stop:
        raise signal_behind(stop) from None
    report, accuracy = monitor.report, model.evaluation_results.get("test")
    if not isinstance(report, RetrievalReport) or accuracy is None:
        raise ValueError("The test set could not be evaluated; the warnings above say why.")
    return Row(
        name=name,
        accuracy=accuracy.mean,
        accuracy_ci95=accuracy.ci95,
        episodes=accuracy.n,
        episodes_hash=accuracy.episodes_hash,
        j=float(trainer.callback_metrics["test/J"]),
        report=report,
        seconds=time.perf_counter() - started,
    )


def comparison(rows: Sequence[Row]) -> Table:
    """Make the table at the end."""
    first = rows[0]
    size = first.report.grouped.group_size if first.report.grouped else 0
    table = Table(
        title=f"{first.report.queries:,} images of {first.report.classes} classes, scripts never seen in training",
        caption=(
            f"accuracy: 20-way 1-shot, {first.episodes} episodes, list {first.episodes_hash}. GR@1: Grouped Recall@1 among "
            f"{size} classes. R@P: recall at precision {PRECISION:g}. ± and in brackets: 95 % intervals. random: the "
            "weights before training. Another processor moves the values by a point or two."
        ),
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,  # all columns in 80 characters
    )
    table.add_column("")
    for column in ("accuracy %", "mAP", "R@1", f"GR@1 of {size}", f"R@P{PRECISION:g}".replace("0.", "."), "F1", "J"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        report = row.report
        grouped = report.metrics().get("grouped_recall@1", float("nan"))
        low, high = report.intervals["grouped_recall@1"] if report.grouped else (float("nan"), float("nan"))
        table.add_row(
            TITLES[row.name],
            f"{100 * row.accuracy:.1f} ±{100 * row.accuracy_ci95:.1f}",
            f"{report.mAP:.3f}",
            f"{report['recall@1']:.3f}",
            f"{grouped:.3f} ({low:.3f} to {high:.3f})",
            f"{report[f'recall@precision{PRECISION:g}']:.3f}",
            f"{report['f1']:.3f}",
            f"{row.j:.2f}",
        )
    return table


def as_dict(row: Row) -> dict[str, Any]:
    """Convert a row for `results.json`."""
    return {
        "name": row.name,
        "accuracy": row.accuracy,
        "accuracy_ci95": row.accuracy_ci95,
        "episodes": row.episodes,
        "episodes_hash": row.episodes_hash,
        "J": row.j,
        "retrieval": row.report.to_dict(),
    }
