"""Write the tables of docs/research/measurements.md, and README's figures, from docs/figures/data/speed/NAME.json.

    python tools/figures_of_speed.py                       # writes the tables
    python tools/figures_of_speed.py --measure             # measures everything first: about an hour, on an idle machine
    python tools/figures_of_speed.py --measure knn probe   # measures some tables first
    python tools/figures_of_speed.py --gpu FILE            # takes the GPU tables from the output of `make gpu`
    python tools/figures_of_speed.py --list                # prints the commands of each table

The page has two lines for each table. This command writes everything between them:

    <!-- table: knn -->
    <!-- end of table -->

A new table needs a benchmark with `--json` (benchmarks/_results.py), its commands in `COMMANDS`, and these lines on the
page. Commit before you measure, because figures belong to a commit.

Two more parts of the page are written from the data. `<!-- machine -->` to `<!-- end of machine -->` describes the machine
of most tables; a table from another machine names it. `<!-- summary -->` to `<!-- end of summary -->` has the seconds of
some evaluations (`SUMMARY`).

`QUOTES` lists README's figures: the words around them, and their place in the data. A measurement replaces the file of its
table only after all of its commands have succeeded. `make gpu` measures a GPU, on a machine that has one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "figures" / "data" / "speed"
PAGE = ROOT / "docs" / "research" / "measurements.md"
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT / "benchmarks"))

from _results import Column, describe, machine, markdown, threads_of  # noqa: E402

RETRIEVAL = "python benchmarks/retrieval.py"
RETRIEVAL_ON_AVX2 = (
    "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 NUMBA_CPU_NAME=haswell " + RETRIEVAL
)

COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("python benchmarks/plan.py --items 8000 16000 --dim 128 --seconds 1",),
    "retrieval": (
        f"{RETRIEVAL} --items 4000 8000 --rows ours-auto",
        f"{RETRIEVAL} --items 31730 --rows ours-auto --repeats 1",
    ),
    "retrieval_large": (f"{RETRIEVAL} --scenario-a --rows ours-auto",),
    "retrieval_dimensions": (
        f"{RETRIEVAL} --items 8000 --dim 128 --rows ours-auto --difficulty well-trained hard",
        f"{RETRIEVAL} --items 8000 --dim 64 --rows ours-auto --difficulty well-trained hard",
    ),
    "retrieval_avx2": (
        f"{RETRIEVAL_ON_AVX2} --items 8000 --rows ours-auto --difficulty well-trained hard",
        f"{RETRIEVAL_ON_AVX2} --items 31730 --rows ours-auto --difficulty well-trained hard --repeats 1",
    ),
    "retrieval_repeated": (
        f"{RETRIEVAL} --items 8000 31730 --dim 256 --rows ours-auto --difficulty repeated heavy-tailed --repeats 1",
        f"{RETRIEVAL} --scenario-a --dim 256 --rows ours-auto --difficulty heavy-tailed",
    ),
    "retrieval_degenerate": (
        f"{RETRIEVAL} --items 8000 --rows ours-auto argsort --difficulty near-collapsed collapsed --repeats 1",
    ),
    "retrieval_large_classes": (
        f"{RETRIEVAL} --items 30000 --per-class 3000 --rows ours-auto --difficulty middling --repeats 1",
    ),
    "real": (
        "python benchmarks/real.py --sets paragraphs files voices glyphs --items 8000 2000 1000 8000",
        "python benchmarks/real.py --sets paragraphs paragraphs --items 31730 200000 --rounds 1",
    ),
    "first_use": ("python benchmarks/first_use.py",),
    "small_sets": (
        "python benchmarks/small_sets.py --difficulty well-trained",
        "python benchmarks/small_sets.py --difficulty hard",
    ),
    "retrieval_forms": (
        f"{RETRIEVAL} --items 8000 --rows ours-auto ours-two-sets ours-opis codes grouped"
        " --difficulty middling hard --repeats 1",
    ),
    "grouped_growth": ("python benchmarks/grouped_growth.py --threads 1 --rounds 2",),
    "judgements": ("python benchmarks/judgements.py --items 8000 31730",),
    "peers": (
        f"{RETRIEVAL} --items 8000 --repeats 1 --difficulty hard random"
        " --rows ours-auto argsort pml pml-torch pml-max-bin torchmetrics sklearn",
    ),
    "information_retrieval": ("python benchmarks/information_retrieval.py --repeats 1",),
    "episodes": ("python benchmarks/episodes.py --sizes 32 --repeats 3",),
    "questions": ("python benchmarks/questions.py --rounds 2",),
    "overhead": ("python benchmarks/overhead.py --repeats 9 --steps 100",),
    "discriminant_ratio": ("python benchmarks/variance_ratio.py --cost",),
    "pictures": ("python benchmarks/pictures.py",),
    "health": ("python benchmarks/health.py",),
    "knn": ("python benchmarks/knn.py",),
    "probe": ("python benchmarks/probe.py",),
    "near_duplicates": ("python benchmarks/near_duplicates.py --threads 1 --rounds 1",),
    "trials": ("python benchmarks/trials.py",),
    "repeated": ("python benchmarks/repeated.py",),
    "losses": ("python benchmarks/losses.py", "python benchmarks/losses.py --micro-batch"),
    "scale": ("python benchmarks/scale.py --items 600000 --queries 20000 --processes 2 4 --kill",),
    "processes": ("python benchmarks/processes.py --items 31730 --difficulty well-trained hard",),
    "image_loading": ("python benchmarks/image_loading.py",),
}
"""table -> the commands that fill it"""


class Figure(NamedTuple):
    """The place of a number in the data."""

    table: str
    row: str
    """the full text of one cell in its row; the first such row counts"""
    column: str
    form: str
    part: int = 0
    """index in a cell of several numbers: 0 is the median, 1 the minimum, 2 the maximum"""


class SummaryFigure(NamedTuple):
    """A cell of the summary."""

    words: str
    """difficulties of its line"""
    column: int


def _time_and_memory(row: str) -> tuple[Figure, Figure]:
    return (
        Figure("peers", row, "hard, x product", ".2g"),
        Figure("peers", row, "peak MB beyond the data", ",.0f", part=2),
    )


TRAINING_STEP = "a training step, J and variance ratio of every batch"

LARGE = "31,730 512-dimensional, well-trained to hard"

QUOTES: dict[str, tuple[Figure | SummaryFigure, ...]] = {
    "31,730 512-dimensional embeddings takes {} seconds and at most {} MB beyond": (
        SummaryFigure(LARGE, 1),
        SummaryFigure(LARGE, 2),
    ),
    "about {} ms to a training step of {} ms, which is too little to measure reliably: steps took {} to {} times as long.": (
        Figure("overhead", TRAINING_STEP, "it adds, ms", ".0f"),
        Figure("overhead", TRAINING_STEP, "without it, ms", ".0f"),
        Figure("overhead", TRAINING_STEP, "with it, x without", ".2f", part=1),
        Figure("overhead", TRAINING_STEP, "with it, x without", ".2f", part=2),
    ),
    "over all pairs ({} s). Memory": (
        Figure("peers", "evaluate_retrieval, default metrics", "product, seconds", ".1f"),
    ),
    "| all of its metrics | **{} ×** | **{} MB** |": _time_and_memory("evaluate_retrieval, default metrics"),
    "| pytorch-metric-learning, `k=None` | mAP | {} × | {} MB |": _time_and_memory("pytorch-metric-learning, k=None"),
    "| only MAP@R, truncated | {} × | {} MB |": _time_and_memory(
        'pytorch-metric-learning, k="max_bin_count", only MAP@R'
    ),
    "| only mAP, drops scores ≤ 0 | {} × | {} MB |": _time_and_memory("torchmetrics RetrievalMAP, only mAP"),
    "| scikit-learn, query by query | only mAP | {} × | {} MB |": _time_and_memory(
        "scikit-learn average_precision_score for each query"
    ),
    "| sorting each row by hand | only mAP | {} × | {} MB |": _time_and_memory("rows sorted in chunks, only mAP"),
}
"""Texts of README with placeholders, and the figures that fill them"""


class Case(NamedTuple):
    """A line of the summary: an evaluation that retrieval.py has timed in multiples of the product."""

    words: str
    table: str
    items: int
    difficulties: tuple[str, ...]


SUMMARY = (
    Case("4,000 512-dimensional, well-trained to hard", "retrieval", 4000, ("well-trained", "hard")),
    Case("8,000 512-dimensional, well-trained to hard", "retrieval", 8000, ("well-trained", "hard")),
    Case(LARGE, "retrieval", 31_730, ("well-trained", "hard")),
    Case("158,652 512-dimensional, well-trained", "retrieval_large", 158_652, ("well-trained",)),
    Case("31,730 256-dimensional, long tails and equal rows", "retrieval_repeated", 31_730, ("heavy-tailed",)),
    Case("158,652 256-dimensional, long tails and equal rows", "retrieval_repeated", 158_652, ("heavy-tailed",)),
)

FIGURE = r"[^\s*]+(?: to [^\s*]+)?"
"""A figure of README, or a minimum and a maximum."""

BLOCK = re.compile(r"(?<=<!-- table: )(?P<name>\w+) -->\n(?:(?!<!-- table: ).)*?(?=<!-- end of table -->)", re.DOTALL)
"""A table of the page, from its name to its end."""


def measure(name: str) -> None:
    """Run the commands of a table, and save their measurements."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        for command in COMMANDS[name]:
            file.unlink(missing_ok=True)
            started = time.perf_counter()
            print(command, file=sys.stderr, flush=True)
            run(command, file)
            print(f"took {time.perf_counter() - started:.0f} s\n", file=sys.stderr, flush=True)
            measured = json.loads(file.read_text(encoding="utf-8"))
            record = {"command": command}
            record |= {key: measured[key] for key in ("machine", "columns", "rows")}
            records.append(record)
    store(name, records)


def store(name: str, records: list[dict[str, Any]]) -> None:
    """Write the measurements of a table."""
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def run(command: str, file: Path) -> None:
    """Run a command line with environment variables before `python`, and let it write its table to a file.

    All kernels are compiled before, for the processor that the variables name.
    """
    words = shlex.split(command)
    start = words.index("python")
    variables = dict(word.split("=", 1) for word in words[:start])
    arguments = [sys.executable, *words[start + 1 :], "--json", str(file)]
    environment = os.environ | variables
    subprocess.run([sys.executable, "-m", "fewshot_callbacks", "warm"], cwd=ROOT, env=environment, check=True)
    subprocess.run(arguments, cwd=ROOT, env=environment, check=True)


def load(name: str) -> list[dict[str, Any]]:
    """Return the measurements of a table, one record per command."""
    records: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return records


def block(records: list[dict[str, Any]]) -> str:
    """Return the commands, the machine and the table in Markdown; commands with other columns get a second table."""
    commands = "\n".join(f"    {record['command']}" for record in records)
    machines = dict.fromkeys(_described(record["machine"]) for record in records)
    tables: dict[tuple[Column, ...], list[Any]] = {}
    for record in records:
        columns = tuple(Column(*column) for column in record["columns"])
        tables.setdefault(columns, []).extend(record["rows"])
    return "\n\n".join([commands, *machines, *(table(columns, rows) for columns, rows in tables.items())])


def _described(about: dict[str, str | int]) -> str:
    """Return threads and commit of a table, and its machine unless it is the machine that the page names once for all."""
    is_common = describe(about, threads=False) == common_machine()
    words = f"{threads_of(about).capitalize()}." if is_common else describe(about)
    return f"{words.removesuffix('.')}, commit {about['commit']}."


def table(columns: tuple[Column, ...], rows: list[Any]) -> str:
    """Return a Markdown table. Cells that all rows of retrieval.py share go above it, because the page is narrow."""
    above = []
    shown = []
    for place, column in enumerate(columns):
        cells = {str(row[place]) for row in rows}
        if column.title in ("dim", "what") and len(cells) == 1:
            cell = cells.pop()
            above.append(f"{cell} dimensions" if column.title == "dim" else cell)
        else:
            shown.append(place)
    narrow = markdown([columns[place] for place in shown], [[row[place] for place in shown] for row in rows])
    return f"All rows: {'; '.join(above)}.\n\n{narrow}" if above else narrow


def common_machine() -> str:
    """Return the machine of most tables, without its threads."""
    machines = (describe(record["machine"], threads=False) for name in COMMANDS for record in load(name))
    return Counter(machines).most_common(1)[0][0]


def summary() -> str:
    """Return the table of `SUMMARY` in Markdown."""
    columns = [Column("embeddings"), Column("seconds", "s"), Column("most MB beyond the embeddings", "s")]
    return markdown(columns, [_line_of_summary(case) for case in SUMMARY])


def _line_of_summary(case: Case) -> list[str]:
    """Return the cells of a case."""
    seconds, memory = _cost(case)
    least, most = (f"{limit:.1f}" if limit < 10 else f"{limit:.0f}" for limit in (min(seconds), max(seconds)))
    return [case.words, least if least == most else f"{least} to {most}", f"{memory:,.0f}"]


def _cost(case: Case) -> tuple[list[float], float]:
    """Return the seconds of a case for each of its difficulties, and the peak memory over all difficulties."""
    for record in load(case.table):
        titles = [Column(*column).title for column in record["columns"]]
        for row in record["rows"]:
            cells = dict(zip(titles, row, strict=True))
            multiples = [cells.get(f"{difficulty}, x product") for difficulty in case.difficulties]
            if cells.get("items") == case.items and None not in multiples:
                seconds = [_middle(multiple) * _middle(cells["product, seconds"]) for multiple in multiples]
                memory = cells["peak MB beyond the data"]
                return seconds, max(memory) if isinstance(memory, list) else memory
    raise LookupError(f"{case.table}.json has no row of {case.items} items with {case.difficulties}.")


def _middle(cell: Any) -> float:
    """Return the median of a cell, or its only number."""
    return cell[0] if isinstance(cell, list) else cell


def written(page: str) -> str:
    """Return the page with tables from the data."""
    page = BLOCK.sub(lambda found: f"{found['name']} -->\n\n{block(load(found['name']))}\n\n", page)
    for name, text in (("machine", common_machine()), ("summary", summary())):
        part = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page, times = part.subn(lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page)
        if times != 1:
            raise LookupError(f"the page has <!-- {name} --> {times} times, not once")
    return page


def value(figure: Figure | SummaryFigure) -> str:
    """Return the text of a figure in README."""
    if isinstance(figure, SummaryFigure):
        [case] = [case for case in SUMMARY if case.words == figure.words]
        return _line_of_summary(case)[figure.column]
    for record in load(figure.table):
        titles = [Column(*column).title for column in record["columns"]]
        for row in record["rows"] if figure.column in titles else ():
            if figure.row in row:
                cell = row[titles.index(figure.column)]
                return format(cell[figure.part] if isinstance(cell, list) else cell, figure.form)
    raise LookupError(f"{figure.table}.json has no row {figure.row!r} with {figure.column!r}.")


def quoted(text: str) -> str:
    """Return README with figures from the data.

    Raises:
        LookupError: A text of `QUOTES` does not appear in README exactly once.
    """
    for words, figures in QUOTES.items():
        pattern = re.escape(words).replace(r"\{\}", FIGURE)
        filled = words.format(*map(value, figures))
        text, times = re.subn(pattern, lambda _, filled=filled: filled, text)
        if times != 1:
            raise LookupError(f"README has these words {times} times, not once: {words!r}")
    return text


def main() -> None:
    """Measure the chosen tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measure", nargs="*", choices=COMMANDS, metavar="TABLE", help="these, or all if none is named"
    )
    parser.add_argument("--gpu", type=Path, metavar="FILE", help="build/gpu_check.json, which `make gpu` has written")
    parser.add_argument("--list", action="store_true", help="print the commands of each table, and end")
    options = parser.parse_args()
    if options.list:
        for name, commands in COMMANDS.items():
            print(name, *(f"    {command}" for command in commands), sep="\n")
        return
    if options.measure is not None:
        if str(machine(1)["commit"]).endswith("-dirty"):
            parser.error(
                "fewshot_callbacks/ or benchmarks/ has uncommitted changes. Commit them: figures are of a commit."
            )
        for name in options.measure or COMMANDS:
            measure(name)
    if options.gpu is not None:
        for name, records in json.loads(options.gpu.read_text(encoding="utf-8"))["tables"].items():
            store(name, records)
    page = written(PAGE.read_text(encoding="utf-8"))
    readme = quoted(README.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    README.write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
