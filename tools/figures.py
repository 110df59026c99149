"""Draw every figure of the documentation in one style and one palette, as the PNG that its page shows.

    python tools/figures.py                                  # all; three minutes on one core, most of it for pictures_*
    python tools/figures.py --only demo class_count          # some
    python tools/figures.py --list                           # what there is, and which command makes the data

What needs long trainings is drawn from what they left: docs/figures/data/NAME.json. `--measure` repeats them first and
replaces that file (demo: five minutes on one core, the others up to an hour). icons and pictures_* need installed icon
themes (examples/icons/README.md).

The other pictures: tools/report_picture.py takes docs/images/report*.png in a browser,
examples/recipes/matryoshka.py draws docs/images/compression.png, and the SVGs of docs/research/how_it_works.md are
written by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, DATA = ROOT / "examples", ROOT / "docs" / "figures" / "data"
sys.path[:0] = [str(ROOT), str(EXAMPLES), str(ROOT / "studies")]

SEEDS = range(5)
"""Seeds of the band in the demo's figure."""


class Study(NamedTuple):
    """Figures that one command produces."""

    figures: tuple[str, ...]
    draw: Callable[[Path, tuple[str, ...]], None]
    commands: tuple[str, ...] = ()
    """Commands that write the data to runs/."""


def draw_demo(folder: Path, _: tuple[str, ...]) -> None:
    from fewshot_callbacks.cli.demo import TITLES, training_curves  # noqa: PLC0415 - imports only the chosen figure

    write(training_curves(read("demo"), TITLES), folder, "demo")


def draw_study(data: str) -> Callable[[Path, tuple[str, ...]], None]:
    """The figures of a study, from its data."""

    def drawn(folder: Path, names: tuple[str, ...]) -> None:
        from study_figures import draw  # noqa: PLC0415

        draw(read(data), folder, names)

    return drawn


def draw_maps(folder: Path, _: tuple[str, ...]) -> None:
    from distance_ratio_maps import draw_maps  # noqa: PLC0415

    draw_maps(folder)


def draw_glyphs(folder: Path, _: tuple[str, ...]) -> None:
    from sheets import glyph_sheet  # noqa: PLC0415

    glyph_sheet(folder / "glyphs.png")


def draw_icons(folder: Path, _: tuple[str, ...]) -> None:
    from icons.cache import load_drawing  # noqa: PLC0415
    from icons.sheet import icon_sheet  # noqa: PLC0415

    icon_sheet(folder / "icons.png", load_drawing())


def draw_pictures(folder: Path, _: tuple[str, ...]) -> None:
    options = ("--data", "icons", "--episodes", "80", "--docs", folder)
    subprocess.run([sys.executable, EXAMPLES / "pictures.py", *options], check=True, cwd=ROOT)


STUDIES = {
    "demo": Study(
        ("demo",),
        draw_demo,
        tuple(f"fewshot demo --seed {seed} --output runs/figures/demo/seed{seed}" for seed in SEEDS),
    ),
    "class_count_invariance": Study(
        ("class_count", "dropout_gap", "model_size_gap"),
        draw_study("class_count_invariance"),
        ("python studies/class_count_invariance.py --model-size --output runs/figures/class_count_invariance",),
    ),
    "average_precision_loss": Study(
        ("average_precision_loss",),
        draw_study("average_precision_loss"),
        ("python studies/train_on_average_precision.py --output runs/figures/average_precision_loss",),
    ),
    "distance_ratio": Study(
        ("distance_ratio_accuracy", "distance_ratio_norm_ratio"),
        draw_study("distance_ratio"),
        ("python studies/reproduce_distance_ratio.py --output runs/figures/distance_ratio",),
    ),
    "better_or_noise": Study(
        ("better_or_noise",),
        draw_study("better_or_noise"),
        ("python studies/better_or_noise.py --output runs/figures/better_or_noise",),
    ),
    "maps": Study(("distance_ratio_maps_plane", "distance_ratio_maps_sphere"), draw_maps),
    "glyphs": Study(("glyphs",), draw_glyphs),
    "icons": Study(("icons",), draw_icons),
    "pictures": Study(
        tuple(
            f"pictures_{name}"
            for name in ("worst_queries", "confident_mistakes", "embedding_map", "score_histograms", "weakest_classes")
        ),
        draw_pictures,
    ),
}


def main() -> None:
    names = [name for study in STUDIES.values() for name in study.figures]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="figures; see --list")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "images", help="folder for the figures (default: docs/images)"
    )
    parser.add_argument("--measure", action="store_true", help="repeat the training runs first")
    parser.add_argument("--list", action="store_true", help="only list the figures and the commands of their data")
    options = parser.parse_args()
    for name, study in STUDIES.items():
        chosen = tuple(figure for figure in study.figures if figure in options.only)
        if not chosen:
            continue
        if options.list:
            print(*(f"{figure}.png" for figure in chosen), *(f"    {line}" for line in study.commands), sep="\n")
            continue
        if options.measure and study.commands:
            measure(name, study.commands)
        if study.commands and not (DATA / f"{name}.json").exists():
            print(
                f"{', '.join(chosen)}: left as they are, since docs/figures/data has no {name}.json; --measure makes it"
            )
            continue
        study.draw(options.output.resolve(), chosen)
        print(f"{', '.join(chosen)}: drawn to {options.output}")


def measure(name: str, commands: tuple[str, ...]) -> None:
    """Run the commands that make the data, and save the data."""
    for command in commands:
        program, *arguments = command.split()
        start = [sys.executable if program == "python" else Path(sys.executable).with_name(program)]
        subprocess.run([*start, *arguments], check=True, cwd=ROOT)
    runs = ROOT / "runs" / "figures" / name
    keep(name, read_demo(runs) if name == "demo" else json.loads((runs / "figures.json").read_text(encoding="utf-8")))


def read_demo(runs: Path) -> dict[str, Any]:
    """Return the curves of each method, seed by seed."""
    from fewshot_callbacks.cli.demo import TRAINED, read_curves  # noqa: PLC0415

    return {
        method: [
            {
                metric: (steps, [float(f"{value:.5g}") for value in values])
                for metric, (steps, values) in read_curves(runs / f"seed{seed}" / method / "metrics.csv").items()
            }
            for seed in SEEDS
        ]
        for method in TRAINED
    }


def read(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def keep(name: str, data: Any) -> None:
    (DATA / f"{name}.json").write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


def write(figure: Any, folder: Path, name: str) -> None:
    from fewshot_callbacks.plots import save  # noqa: PLC0415

    save(figure, folder / f"{name}.png")


if __name__ == "__main__":
    main()
