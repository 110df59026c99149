"""One command for all figures of the documentation: which there are, and some of them drawn."""

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)

NOT_DRAWN = {"report", "how_ranks", "how_tiles", "how_estimates"}
"""A picture of a browser, and sketches whose SVG is written by hand."""
NAMES = [name for study in figures.STUDIES.values() for name in study.figures]


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["figures.py", *map(str, words)])
    figures.main()


def test_every_figure_of_the_documentation_has_its_drawing():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\]\((?:docs/)?(\w+)\.(?:png|svg)\)", page.read_text())}
    assert shown - NOT_DRAWN <= set(NAMES)
    for name in NAMES:
        assert (ROOT / "docs" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_vector_files_are_small():
    found = list((ROOT / "docs").glob("*.svg"))
    assert {file.stem for file in found} <= {*NAMES, *NOT_DRAWN}
    assert found
    assert all(file.stat().st_size < 300_000 for file in found)


def test_the_list_names_commands(monkeypatch, capsys):
    run(monkeypatch, "--list")
    printed = capsys.readouterr().out
    assert all(f"{name}.png" in printed for name in NAMES)
    assert "python studies/reproduce_distance_ratio.py" in printed


def test_some_are_drawn(monkeypatch, tmp_path):
    run(monkeypatch, "--only", "demo", "average_precision_loss", "--output", tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{name}.{ending}" for name in ("demo", "average_precision_loss") for ending in ("png", "svg")
    }


def test_measuring_runs_the_commands_and_keeps_what_they_leave(monkeypatch, tmp_path):
    """In a folder of its own, with a program that trains nothing."""
    started = []

    def pretend(words, **_):
        started.append([str(word) for word in words[1:]])
        folder = tmp_path / "runs" / "figures" / "average_precision_loss"
        folder.mkdir(parents=True)
        (folder / "figures.json").write_text('{"titles": {}, "mAP": {}}')

    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "DATA", tmp_path)
    monkeypatch.setattr(figures.subprocess, "run", pretend)
    figures.measure("average_precision_loss", figures.STUDIES["average_precision_loss"].commands)
    assert started == [["studies/train_on_average_precision.py", "--output", "runs/figures/average_precision_loss"]]
    assert json.loads((tmp_path / "average_precision_loss.json").read_text()) == {"titles": {}, "mAP": {}}
