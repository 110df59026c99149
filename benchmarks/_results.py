"""The table of a benchmark: printed as Markdown row by row, and saved as JSON for docs/research/measurements.md.

>>> print(markdown((Column("items"), Column("seconds", ".1f")), [["31,730", (2.41, 2.38, 2.5)], ["8,000", None]]))
| items | seconds |
| --- | ---: |
| 31,730 | 2.4 (2.4 to 2.5) |
| 8,000 | |
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

Cell = str | float | tuple[float, float, float] | None
"""text, a number, (median, minimum, maximum), or None for an empty cell"""


class Column(NamedTuple):
    """A column of a table."""

    title: str
    form: str = ""
    """format of the numbers, for example ".2f"; empty for text"""


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a Markdown table; number columns are aligned right."""
    lines = [
        _line([column.title for column in columns]),
        _line(["---:" if column.form else "---" for column in columns]),
        *(_line([written(cell, column.form) for cell, column in zip(row, columns, strict=True)]) for row in rows),
    ]
    return "\n".join(lines)


def written(cell: Cell, form: str) -> str:
    """Return the text of a cell."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, (tuple, list)):
        middle, least, greatest = (format(number, form) for number in cell)
        return f"{middle} ({least} to {greatest})"
    return format(cell, form)


def _line(cells: Sequence[str]) -> str:
    return " ".join(["|", *(f"{cell} |" if cell else "|" for cell in cells)])


class Results:
    """The rows of a table, printed as they are measured and written to a file at the end or on an interrupt.

        with Results((Column("row"), Column("seconds", ".2f")), threads=2, file=options.json) as results:
            results.add("ours", 1.23)

    Args:
        columns: Columns of the table.
        threads: Number of threads in use.
        file: Path of the JSON file; None writes no file.
        device: Any other device that computes, for example the name of a GPU.
        more: Further entries of the file, in addition to machine, columns and rows.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        *,
        threads: int,
        file: str | None,
        device: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.columns = tuple(columns)
        self.rows: list[list[Cell]] = []
        self.machine = machine(threads, device)
        self.file = file
        self.more = dict(more or {})

    def __enter__(self) -> Results:
        print(describe(self.machine) + "\n", flush=True)
        print(markdown(self.columns, ()), flush=True)
        return self

    def add(self, *cells: Cell) -> None:
        """Print a row with one cell per column."""
        row = list(cells)
        print(markdown(self.columns, [row]).splitlines()[-1], flush=True)
        self.rows.append(row)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is None:
            return
        record = {"machine": self.machine, "columns": self.columns, "rows": self.rows} | self.more
        Path(self.file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def add_file_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json` to a benchmark."""
    parser.add_argument("--json", metavar="FILE", help="also write the table and the machine to this file")


def machine(threads: int, device: str | None = None) -> dict[str, str | int]:
    """Return what the figures depend on: processor and its fast products, threads, versions, commit and date."""
    processor, flags = _processor()
    about: dict[str, str | int] = {
        "processor": processor,
        "products": _fast_products(flags),
        "cores": os.cpu_count() or 0,
        "threads": threads,
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "commit": _commit(),
        "date": datetime.datetime.now().astimezone().date().isoformat(),
    }
    if device is not None:
        about["device"] = device
    simulated = {
        name: os.environ[name]
        for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "NUMBA_CPU_NAME")
        if name in os.environ
    }
    if simulated:
        about["simulated"] = " ".join(f"{name}={value}" for name, value in simulated.items())
    return about


def threads_of(about: dict[str, str | int]) -> str:
    """Return the number of threads in words."""
    return "one thread" if about["threads"] == 1 else f"{about['threads']} threads"


def describe(about: dict[str, str | int], *, threads: bool = True) -> str:
    """Return a machine in one sentence, with or without the number of threads."""
    day = datetime.date.fromisoformat(str(about["date"]))
    words = [f"{about['processor']} ({about['products']})", f"torch {about['torch']}", f"{day:%B %Y}"]
    if threads:
        words.insert(1, threads_of(about))
    if "device" in about:
        words.insert(0, str(about["device"]))
    if "simulated" in about:
        words.append(f"simulated by `{about['simulated']}`")
    return ", ".join(words) + "."


def _processor() -> tuple[str, frozenset[str]]:
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return name, flags
    for line in file.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = frozenset(value.split())
    return name, flags


def _fast_products(flags: frozenset[str]) -> str:
    """Return the types of products that a processor computes faster than float32."""
    has_bytes = bool(flags & {"avx512_vnni", "avx_vnni", "amx_int8"})
    has_bfloat16 = bool(flags & {"avx512_bf16", "amx_bf16"})
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "instructions not known"
    fast = [name for name, has in (("byte", has_bytes), ("bfloat16", has_bfloat16)) if has]
    return f"{vectors} with {' and '.join(fast)} products" if fast else f"{vectors} alone"


def _version_of(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the measured commit, with "-dirty" if the package or the benchmarks have uncommitted changes."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "fewshot_callbacks", "benchmarks")
    return f"{commit or 'not known'}{'-dirty' if changed else ''}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
