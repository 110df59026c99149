"""Write the tables of docs/measurements.md from what the benchmarks measured, docs/figures/data/speed/NAME.json.

    python tools/figures_of_speed.py                       # writes the tables
    python tools/figures_of_speed.py --measure             # measures all first: about an hour, with nothing beside it
    python tools/figures_of_speed.py --measure knn probe   # measures some first
    python tools/figures_of_speed.py --list                # the commands of each table

The page holds two lines for each table, between which everything is written by this command:

    <!-- table: knn -->
    <!-- end of table -->

A measurement replaces the file of its table only when all of its commands have succeeded. CUDA is measured by `make gpu`, on
a machine that has it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "figures" / "data" / "speed"
PAGE = ROOT / "docs" / "measurements.md"
sys.path.insert(0, str(ROOT / "benchmarks"))

from _results import Column, describe, markdown  # noqa: E402

COMMANDS: dict[str, tuple[str, ...]] = {
    "retrieval": (
        "benchmarks/retrieval.py --items 4000 8000 --rows ours-auto",
        "benchmarks/retrieval.py --items 31730 --rows ours-auto --repeats 1",
    ),
}
"""table -> the commands that fill it, after `python`"""

BLOCK = re.compile(r"(?<=<!-- table: )(?P<name>\w+)(?P<body> -->\n.*?)(?=<!-- end of table -->)", re.DOTALL)
"""A table of the page, from its name to its end."""


def measure(name: str) -> None:
    """Run the commands of a table, and keep what they measured."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        for command in COMMANDS[name]:
            started = time.perf_counter()
            print(f"python {command}", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, *shlex.split(command), "--json", str(file)], cwd=ROOT, check=True)
            print(f"took {time.perf_counter() - started:.0f} s\n", file=sys.stderr, flush=True)
            measured = json.loads(file.read_text(encoding="utf-8"))
            record = {"command": f"python {command}"}
            record |= {key: measured[key] for key in ("machine", "columns", "rows")}
            records.append(record)
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def load(name: str) -> list[dict[str, Any]]:
    """Return what the commands of a table measured, one record for each."""
    records: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return records


def block(records: list[dict[str, Any]]) -> str:
    """Return the commands, the machine and the table in Markdown; a second table where a command has other columns."""
    commands = "\n".join(f"    {record['command']}" for record in records)
    machines = dict.fromkeys(describe(record["machine"]) for record in records)
    tables: dict[tuple[Column, ...], list[Any]] = {}
    for record in records:
        columns = tuple(Column(*column) for column in record["columns"])
        tables.setdefault(columns, []).extend(record["rows"])
    return "\n\n".join([commands, *machines, *(markdown(columns, rows) for columns, rows in tables.items())])


def written(page: str) -> str:
    """Return the page with the tables that the data give."""
    return BLOCK.sub(lambda found: f"{found['name']} -->\n\n{block(load(found['name']))}\n\n", page)


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measure", nargs="*", choices=COMMANDS, metavar="TABLE", help="these, or all if none is named"
    )
    parser.add_argument("--list", action="store_true", help="print the commands of each table, and end")
    options = parser.parse_args()
    if options.list:
        for name, commands in COMMANDS.items():
            print(name, *(f"    python {command}" for command in commands), sep="\n")
        return
    if options.measure is not None:
        for name in options.measure or COMMANDS:
            measure(name)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
