"""Figures of time and memory stand on one page and in README, and are those that were measured."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.messages import refused

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import figures_of_speed  # noqa: E402

COST = re.compile(
    r"\d[\d,.]*(?: to \d[\d.,]*)?[ -]?"
    r"(?:×|x (?:the )?product|times as (?:long|much)|times the product|(?:seconds?|s|ms|µs|us|minutes?|min|hours?|MB|GB)\b)"
)
"""A figure of time or memory."""

NOT_MEASURED = {
    "CONTRIBUTING.md": dict.fromkeys(
        (
            *("3.3 GB", "1 minute", "20 seconds"),
            *("20 to 60 s", "2 to 3 min", "6 min", "8 min", "9 min", "12 min", "30 s", "2 min", "20 to 30 min"),
        ),
        "what an installation and a command take",
    ),
    "docs/project/environments.md": dict.fromkeys(
        ("6.3 GB", "6.4 GB", "7.5 GB", "7.7 GB", "4.0 GB", "3.3 GB", "0.5 GB", "1.8 GB"),
        "what an installation takes",
    ),
    "docs/evaluate/report.md": {"0.3 MB": "the size of a file"},
    "docs/research/distance_ratio.md": {"30 times as long": "the number of episodes"},
    "docs/research/distance_ratio_photographs.md": {"1.96 s": "standard deviations"},
    "docs/start/faq.md": {"512 MB": "the default of a setting"},
    "docs/research/glyphs.md": {"29 MB": "the size of a file"},
    "docs/research/how_it_works.md": {"40 GB": "calculated: 100,000 x 100,000 numbers of four bytes"},
    "docs/start/install.md": dict.fromkeys(("3 GB", "0.2 GB"), "what pip downloads"),
    "docs/callbacks/retrieval.md": {"512 MB": "the default of a setting"},
}
"""page -> figure -> what it is instead"""

CALCULATED = {"docs/research/feasibility.md", "docs/research/literature.md", "docs/evaluate/large_sets.md"}
"""Pages that calculate sizes and times of other machines, from a source or from measurements whose commands they name."""

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_data() -> None:
    page = text_of("docs/research/measurements.md")
    assert figures_of_speed.written(page) == page


def test_the_figures_of_readme_are_those_of_the_data() -> None:
    readme = text_of("README.md")
    assert figures_of_speed.quoted(readme) == readme


def test_a_figure_that_somebody_changed_is_written_anew() -> None:
    page = text_of("docs/research/measurements.md")
    table = page.index("| ---")
    figure = re.compile(r"\d\.\d\d").search(page, table)
    assert figure is not None
    changed = page[: figure.start()] + "9.99" + page[figure.end() :]
    assert figures_of_speed.written(changed) == page
    readme = text_of("README.md")
    assert figures_of_speed.quoted(readme.replace(" seconds and at most", "1 seconds and at most")) == readme
    with refused(LookupError, "README", 0, "31,730 512-dimensional"):
        figures_of_speed.quoted(readme.replace("31,730 512-dimensional", "31,730"))


def test_the_summary_holds_the_seconds_of_the_tables() -> None:
    records = json.loads((figures_of_speed.DATA / "retrieval.json").read_text(encoding="utf-8"))
    (row,) = [row for record in records for row in record["rows"] if row[0] == 31_730]
    titles = [column[0] for column in records[0]["columns"]]
    medians = {title: cell[0] if isinstance(cell, list) else cell for title, cell in zip(titles, row, strict=True)}
    least, most = (medians["product, seconds"] * medians[f"{name}, x product"] for name in ("well-trained", "hard"))
    memory = max(row[titles.index("peak MB beyond the data")])
    (line,) = [line for line in figures_of_speed.summary().splitlines() if line.startswith("| 31,730 512-dimensional")]
    assert line.endswith(f"| {least:.1f} to {most:.1f} | {memory:,.0f} |")


def test_a_table_names_its_machine_unless_it_is_that_of_most() -> None:
    page = text_of("docs/research/measurements.md")
    assert page.count(figures_of_speed.common_machine()) == 1
    blocks = {found["name"]: found[0] for found in figures_of_speed.BLOCK.finditer(page)}
    for name, text in blocks.items():
        for record in figures_of_speed.load(name):
            about = record["machine"]
            is_common = figures_of_speed.describe(about, threads=False) == figures_of_speed.common_machine()
            assert (str(about["torch"]) in text) != is_common


def test_tables_of_a_gpu_are_taken_from_the_file_of_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "speed"
    shutil.copytree(figures_of_speed.DATA, data)
    page, readme = tmp_path / "measurements.md", tmp_path / "README.md"
    page.write_text(text_of("docs/research/measurements.md"), encoding="utf-8")
    readme.write_text(text_of("README.md"), encoding="utf-8")
    records = json.loads((data / "gpu.json").read_text(encoding="utf-8"))
    records[0]["rows"][0][3] = 98.76
    found = tmp_path / "gpu_check.json"
    found.write_text(json.dumps({"tables": {"gpu": records}}), encoding="utf-8")
    for name, path in (("DATA", data), ("PAGE", page), ("README", readme)):
        monkeypatch.setattr(figures_of_speed, name, path)
    monkeypatch.setattr(sys, "argv", ["figures_of_speed.py", "--gpu", str(found)])
    figures_of_speed.main()
    assert json.loads((data / "gpu.json").read_text(encoding="utf-8")) == records
    assert "| 98.76 |" in page.read_text(encoding="utf-8")


def test_each_table_has_data_and_a_place() -> None:
    places = [found["name"] for found in figures_of_speed.BLOCK.finditer(text_of("docs/research/measurements.md"))]
    assert len(places) == len(set(places))
    files = {file.stem for file in figures_of_speed.DATA.glob("*.json")}
    assert set(places) == files
    assert files - set(figures_of_speed.COMMANDS) == {"gpu", "gpu_training"}
    assert set(figures_of_speed.COMMANDS) <= files


def test_the_data_are_what_the_commands_measured() -> None:
    for name, commands in figures_of_speed.COMMANDS.items():
        records = json.loads((figures_of_speed.DATA / f"{name}.json").read_text(encoding="utf-8"))
        assert tuple(record["command"] for record in records) == commands
        assert not any(record["machine"]["commit"].endswith("-dirty") for record in records)


@pytest.mark.parametrize("page", sorted(set(PAGES) - CALCULATED))
def test_no_other_figure_of_time_or_memory(page: str) -> None:
    text = figures_of_speed.BLOCK.sub("", text_of(page))
    for words in figures_of_speed.QUOTES:
        text = re.sub(re.escape(words).replace(r"\{\}", figures_of_speed.FIGURE), "", text)
    found = {match[0] for match in COST.finditer(text)}
    assert found == set(NOT_MEASURED.get(page, {})), "put it into a table, into QUOTES, or into NOT_MEASURED"
