"""Compare the time of evaluations, or of neighbour searches, in this checkout and in another one.

    git worktree add ../before 2adb7ee
    python benchmarks/against.py ../before --items 4000 8000 --dim 512 128

Both evaluate the same items in turns, so that a busy machine slows both. The table shows the minimum processor seconds of
each checkout over all rounds, and the quotient; below 1 this checkout is faster. The values must be equal; each case whose
values differ is printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import DIFFICULTIES, make
from _results import Column, Results, add_file_option

COLUMNS = (
    Column("items", ",d"),
    Column("dim", ",d"),
    Column("evaluation of"),
    Column("embeddings"),
    Column("here, processor seconds", ".2f"),
    Column("there, processor seconds", ".2f"),
    Column("here / there", ".2f"),
    Column("values"),
)
FORMS = ("one set", "two sets", "identities", "nearest", "near duplicates")


def answer(checkout: Path) -> None:
    """Read cases from standard input, one per line, and print the processor seconds and two values of each case."""
    package = importlib.import_module("fewshot_callbacks")  # from the checkout in PYTHONPATH
    if not Path(package.__file__ or "").is_relative_to(checkout):
        raise SystemExit(f"{package.__file__} was imported, which is not in {checkout}.")
    held: tuple[Any, ...] = ((), None, None)
    for line in sys.stdin:
        items, dim, difficulty, form, threads = case = tuple(json.loads(line))
        torch.set_num_threads(threads)
        if held[0] != case[:3]:
            held = case[:3], *make(items, dim, difficulty)
        _, embeddings, labels = held
        order = torch.randperm(items, generator=torch.Generator().manual_seed(0))
        one, other = order[: items // 2], order[items // 2 :]
        # The sets are passed by position, because checkouts may name these arguments differently.
        sets: tuple[torch.Tensor, ...] = (embeddings, labels)
        ids: dict[str, Any] = {}
        if form == "two sets":
            sets = (embeddings[one], labels[one], embeddings[other], labels[other])
        elif form == "identities":
            sets = (embeddings, labels, embeddings, labels)
            ids = {"query_ids": torch.arange(items), "gallery_ids": torch.arange(items)}
        started = time.process_time()
        if form == "nearest":
            values = [package.nearest(embeddings, k=10).scores.sum().item()]
        elif form == "near duplicates":
            values = [package.near_duplicates(embeddings, min_score=0.9).total]
        else:
            report = package.evaluate_retrieval(*sets, **ids)
            values = [report.mAP, report.decision.f1]
        print(json.dumps([time.process_time() - started, *values]), flush=True)


def worker(checkout: Path) -> subprocess.Popen[str]:
    """Start a process that runs cases with the package of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--answer", str(checkout)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
    )


def asked(process: subprocess.Popen[str], case: list[Any]) -> list[float]:
    """Return the answer of a process to a case."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(case), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise SystemExit("A process ended. Its error is printed above.")
    found: list[float] = json.loads(line)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of the other checkout")
    parser.add_argument("--items", type=int, nargs="+", default=[4000, 8000])
    parser.add_argument("--dim", type=int, nargs="+", default=[512])
    parser.add_argument(
        "--difficulty", nargs="+", default=["well-trained", "middling", "hard", "random"], choices=DIFFICULTIES
    )
    parser.add_argument("--form", nargs="+", default=["one set"], choices=FORMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    add_file_option(parser)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        return answer(options.checkout)
    if not (options.checkout / "fewshot_callbacks").is_dir():
        parser.error(f"{options.checkout} is not a checkout: it has no folder fewshot_callbacks.")
    processes = [worker(folder) for folder in (Path(__file__).resolve().parents[1], options.checkout.resolve())]
    cases = [
        [items, dim, difficulty, form, options.threads]
        for items in options.items
        for dim in options.dim
        for form in options.form
        for difficulty in options.difficulty
    ]
    with Results(COLUMNS, threads=options.threads, file=options.json) as results:
        for case in cases:
            values = {tuple(asked(process, case)[1:]) for process in processes}  # warmed up
            rounds = [[asked(process, case)[0] for process in processes] for _ in range(options.rounds)]
            here, there = map(min, zip(*rounds, strict=True))
            items, dim, difficulty, form, _ = case
            verdict = "equal" if len(values) == 1 else "**differ**"
            results.add(items, dim, form, difficulty, here, there, here / there, verdict)
    for process in processes:
        process.kill()
    return None


if __name__ == "__main__":
    main()
