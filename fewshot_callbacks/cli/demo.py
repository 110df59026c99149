"""`fewshot demo`: trains three networks on the glyphs with `fewshot fit`, and compares them on unseen classes."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

from fewshot_callbacks.cli.compare import NetworkResults, results_of_test
from fewshot_callbacks.cli.fit import command, quiet_lightning
from fewshot_callbacks.cli.options import Demo
from fewshot_callbacks.cli.tables import NARROW
from fewshot_callbacks.data import Glyphs
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.plots.style import BAND, GREY, METHODS, MethodStyle, draw_band, in_house_style, new_figure, save
from fewshot_callbacks.system.terminal import as_text
from fewshot_callbacks.system.words import counted

RESULTS = "results.json"
# The file with the hashes of all files of a demo. The demo never replaces files without a hash.
SIGNATURE = ".fewshot_demo.json"
# Network -> the options of `fewshot fit` that train it.
TRAINED = {
    "softmax": ("--config=demo_protonet", "--model.head=softmax"),
    "dr": ("--config=demo_protonet", "--model.head=dr"),
    "soft_ap": ("--config=demo_soft_ap",),
}
TITLES = {"random": "random", "softmax": "softmax", "dr": "DR", "soft_ap": "soft AP"}
PANELS = (
    ("train/J", "J, training batches"),
    ("val/J", "J, validation set"),
    ("val/mAP", "mAP, validation set"),
    ("val/recall@1", "Recall@1, validation set"),
)
SMOOTHING = 0.9
# The steps of a metric and its values.
Curve = Sequence[Sequence[float]]


def run(options: Demo) -> None:
    """Train and test the networks, and print the table and the paths of the written files."""
    for name in ("epochs", "episodes", "test_episodes"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} {getattr(options, name)} must be at least 1.")
    console = Console()
    started = time.perf_counter()
    target = checked(options.output)
    # The demo is written next to its folder, so that a failed demo leaves an earlier one unchanged.
    with tempfile.TemporaryDirectory(prefix=".demo", dir=target.parent) as temporary, quiet_lightning():
        folder = Path(temporary) / target.name
        try:
            rows = train_and_test(options, folder, console)
        except KeyboardInterrupt as stop:
            # The checkpoints that an interrupted fit reports are removed with the temporary folder.
            raise type(stop)(
                "Nothing was saved: the demo writes its folder after all networks are trained and tested."
            ) from None
        curves = training_curves({name: [read_curves(folder / name / "metrics.csv")] for name in TRAINED}, TITLES)
        save(curves, folder / "curves.png")
        _write_results(rows, folder / RESULTS, temporary, str(target.parent))
        sign(folder)
        output = options.output
        if not put(folder, target):
            output = put_under_free_name(folder, target)
    console.print()
    console.print(comparison(rows))
    dr = output / "dr"
    console.print(
        as_text(
            f"{time.perf_counter() - started:.0f} s. Curves of J and mAP: {output / 'curves.png'}; values: "
            f"{dr / 'metrics.csv'}; best checkpoints: {dr / 'best.ckpt'}; report with failures and suspects: "
            f"{dr / 'report.html'}; TensorBoard: tensorboard --logdir {output}"
        ),
        soft_wrap=True,
    )


def _write_results(rows: Mapping[str, NetworkResults], file: Path, temporary: str, final: str) -> None:
    """Write the results as JSON, with `final` instead of `temporary` in the paths of checkpoints."""
    results = json.dumps([{"name": name, **row.to_dict()} for name, row in rows.items()], indent=2)
    # Both paths must be escaped as in a JSON string.
    temporary_in_json = json.dumps(temporary)[1:-1]
    final_in_json = json.dumps(final)[1:-1]
    file.write_text(results.replace(temporary_in_json, final_in_json) + "\n")


def train_and_test(options: Demo, folder: Path, console: Console) -> dict[str, NetworkResults]:
    """Train the networks of `TRAINED`; return test results of random weights and of each."""
    console.print("[bold]fewshot demo[/]: a class is a character, its images are the typefaces that draw it.")
    with console.status("Drawing the glyphs (once; they are cached) ..."):
        glyphs = Glyphs()
    _print_splits(glyphs, console)
    common = [
        f"--seed_everything={options.seed}",
        f"--data.seed={options.seed}",
        f"--data.evaluation.episodes={options.test_episodes}",
        f"--trainer.accelerator={options.accelerator}",
    ]
    results = {"random": results_of_test(*TRAINED["softmax"], *common, "--ckpt_path", "none")}
    for name in TRAINED:
        results[name] = _train_and_test_one(
            name, common, options.epochs, options.episodes, folder / name, glyphs, console
        )
    return results


def _print_splits(glyphs: Glyphs, console: Console) -> None:
    """Print the size and the scripts of each split."""
    for split in glyphs.splits:
        dataset = glyphs.with_split(split)
        scripts = ", ".join(dict.fromkeys(dataset.scripts))
        console.print(
            as_text(f"  {split:<5} {len(dataset):>6,} images of {len(dataset.class_names):>5,} classes: {scripts}")
        )


def _train_and_test_one(
    name: str, common: Sequence[str], epochs: int, episodes: int, folder: Path, glyphs: Glyphs, console: Console
) -> NetworkResults:
    """Train a network of `TRAINED` into a folder; return test results of its best weights.

    `common` contains the options that all networks share.
    """
    has_episodes = name != "soft_ap"
    setting = "episodes"
    description = "episodes, 20-way 1-shot"
    if not has_episodes:
        setting = "batches"
        description = "batches of 20 classes x 4 images"
    console.print(f"\n[bold]{TITLES[name]}[/]: {counted(epochs, 'epoch')} of {episodes} {description}")
    words = TRAINED[name]
    size = f"--data.train.{setting}={episodes}"
    cli = command(["fit", *words, *common, size, *_output_words(folder), f"--trainer.max_epochs={epochs}"])
    best_score = cli.trainer.checkpoint_callback.best_model_score  # type: ignore[union-attr]
    console.print(f"  best validation mAP {math.nan if best_score is None else float(best_score):.3f}")
    report = _report_words(folder / "report.html", glyphs) if name == "dr" else []
    weights = ("--ckpt_path", str(folder / "best.ckpt"))
    return results_of_test(*words, *common, *report, *weights, as_prototypes=not has_episodes)


def _output_words(folder: Path) -> list[str]:
    """Return the options that write a fit to a folder. The last callback is the checkpoint."""
    # With an empty version both loggers write into the folder itself.
    loggers = [
        {"class_path": logger, "init_args": {"save_dir": str(folder.parent), "name": folder.name, "version": ""}}
        for logger in ("CSVLogger", "TensorBoardLogger")
    ]
    return [f"--trainer.logger={json.dumps(loggers)}", f"--trainer.callbacks.dirpath={folder}"]


def _report_words(file: Path, glyphs: Glyphs) -> list[str]:
    """Return the options that write a report of the test set."""
    path = str(file).replace("{", "{{").replace("}", "}}")  # ReportWriter formats the path
    names = json.dumps(glyphs.with_split("test").class_names)
    settings = {"path": path, "names": names, "prefix": "test", "max_share": "null"}
    words = [f"--trainer.callbacks.{name}={value}" for name, value in settings.items()]
    return ["--trainer.callbacks+=fewshot_callbacks.ReportWriter", *words]


def checked(target: Path) -> Path:
    """Return the absolute path of a folder where a demo can be written."""
    target = target.resolve()
    foreign = foreign_file(target)
    if foreign is not None:
        raise InputError(f"{target} contains {foreign}, which no demo has written. Pass another --output.")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def foreign_file(target: Path) -> str | None:
    """Return the first file that no demo has written, or that was changed since."""
    if not target.is_dir():
        return target.name if target.exists() else None
    digests = _signed_digests(target / SIGNATURE)
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if name == SIGNATURE and digests:
            continue
        if path.is_symlink() or digests.get(name) != _digest(path):
            return name
    return None


def sign(folder: Path) -> None:
    """Write the hashes of the files of a demo, so that a later demo can replace them."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in files}
    (folder / SIGNATURE).write_text(json.dumps({"fewshot_demo": digests}) + "\n")


def _signed_digests(file: Path) -> Mapping[str, str]:
    """Return file -> hash of an earlier demo; empty if the signature is damaged or missing."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["fewshot_demo"].items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def put(folder: Path, target: Path) -> bool:
    """Move an earlier demo away and the finished demo to its place; return whether this succeeded."""
    earlier = folder.with_name(f"{folder.name}.earlier")  # removed together with the temporary folder
    try:
        if foreign_file(target) is not None:
            return False
        if target.exists():
            target.rename(earlier)
        folder.rename(target)
    except BaseException as error:
        if earlier.exists() and not target.exists():
            earlier.rename(target)
        if isinstance(error, OSError):
            return False
        raise
    return True


def put_under_free_name(folder: Path, target: Path) -> Path:
    """Move a finished demo to the next free name, and return its path. The requested name was taken during training."""
    numbered = (target.with_name(f"{target.name}-{number}") for number in itertools.count(2))
    free_path = next(path for path in numbered if not path.exists())
    folder.rename(free_path)
    return free_path


def comparison(rows: Mapping[str, NetworkResults]) -> Table:
    """Return the table that compares the networks."""
    first = rows["random"]
    if first.report is None or first.accuracy is None:
        raise InputError("The test set could not be evaluated. See the warnings above for the reason.")
    [precision] = first.report.at_precision
    size = first.report.grouped.group_size if first.report.grouped else 0
    accuracies = [row.accuracy for row in rows.values() if row.accuracy]
    spans = ", ".join(_half_width(accuracy.open_interval.half_width, "unknown") for accuracy in accuracies)
    table = Table(
        title=f"{first.report.queries:,} images of {first.report.classes} classes, scripts never seen in training",
        caption=(
            f"accuracy: 20-way 1-shot, {first.accuracy.n} episodes, list {first.accuracy.episodes_hash}. GR@1: Grouped "
            f"Recall@1 among {size} classes. R@P: recall at precision {precision:g}. ± and brackets: 95 % intervals. "
            f"The interval of the accuracy covers other episodes of these classes; for other classes it is {spans}. "
            "random: the weights before training. On another processor, values can differ by up to five points."
        ),
        pad_edge=False,
        **NARROW,
    )
    table.add_column("")
    for column in ("accuracy %", "mAP", "R@1", f"GR@1 of {size}", f"R@P{precision:g}".replace("0.", "."), "F1", "J"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        report = row.report
        accuracy = row.accuracy
        if report is None or accuracy is None or row.j is None:
            raise InputError(f"{TITLES[name]} could not be evaluated. See the warnings above for the reason.")
        low, high = report.intervals.get("grouped_recall@1", (math.nan, math.nan))
        table.add_row(
            TITLES[name],
            f"{100 * accuracy.mean:.1f} {_half_width(accuracy.ci95)}".rstrip(),
            f"{report.mAP:.3f}",
            f"{report['recall@1']:.3f}",
            f"{report.metrics().get('grouped_recall@1', math.nan):.3f} ({low:.3f} to {high:.3f})",
            f"{report.at_precision[precision].recall:.3f}",
            f"{report['pair_f1']:.3f}",
            f"{row.j:.2f}",
        )
    return table


def _half_width(value: float, unknown: str = "") -> str:
    """Return the half-width of an accuracy interval in percent, after ±."""
    return unknown if math.isnan(value) else f"±{100 * value:.1f}"


def read_curves(log: str | Path) -> dict[str, Curve]:
    """Return metric -> curve, for the metrics of all panels, from the file of a CSVLogger."""
    return {name: read_metric(log, name) for name, _ in PANELS}


def read_metric(log: str | Path, name: str) -> tuple[list[int], list[float]]:
    """Return a metric's steps and values from a CSVLogger's file; empty if it was never logged."""
    with Path(log).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get(name)]
    return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]


@in_house_style
def training_curves(methods: Mapping[str, Sequence[Mapping[str, Curve]]], titles: Mapping[str, str]) -> Figure:
    """Return a figure with a panel for each of `PANELS`. A line is the mean over the seeds of a method.

    A band shows its 95 % interval. Values of training batches are smoothed per seed; a single seed also has a thin line
    without smoothing. `methods` maps a method to the curves of each seed, `titles` to its name.
    """
    figure = new_figure(4.6)
    panels = figure.subplots(2, 2, sharex=True)
    seeds = max(len(runs) for runs in methods.values())
    # name in the legend -> line
    handles: dict[str, Artist] = {}
    for axes, (name, title) in zip(panels.flat, PANELS, strict=True):
        for method, runs in methods.items():
            curves = [run[name] for run in runs if run[name][0]]
            if curves:
                is_smoothed = name.startswith("train/")
                handles[titles[method]] = _draw_method(axes, curves, METHODS[method], is_smoothed, seeds)
        axes.set_ylabel(title)
    for axes in panels[-1]:
        axes.set_xlabel("training steps")
    note = f"training batches: exponential moving average, factor {SMOOTHING:g}"
    if seeds > 1:
        handles[BAND.format(seeds=seeds)] = Patch(color=GREY, alpha=0.25, linewidth=0)
    else:
        note += "; thin lines: each batch"
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=len(handles),
        title=note,
        title_fontsize="small",
    )
    return figure


def _draw_method(axes: Axes, curves: Sequence[Curve], style: MethodStyle, is_smoothed: bool, seeds: int) -> Artist:
    """Draw the curves of the seeds of a method as one line, and return it."""
    steps = curves[0][0]
    values = [curve_values for _, curve_values in curves]
    if is_smoothed and seeds == 1:
        axes.plot(steps, values[0], color=style.colour, linewidth=0.5, alpha=0.4)
    lines = np.array([smooth(line) for line in values] if is_smoothed else values)
    return draw_band(axes, steps, lines, style, marked=not is_smoothed)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential mean, with bias correction. NaN does not change the mean."""
    mean = weight = 0.0
    result = []
    for value in values:
        if not math.isnan(value):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
            weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(mean / weight if weight else math.nan)
    return result
