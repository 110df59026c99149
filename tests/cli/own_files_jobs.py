"""Commands on files on two processes, each with a folder of copies of its own (see `tests.gloo_processes`)."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.files import journal
from fewshot_callbacks.storage.formats import FORMATS
from tests.remote_stores import counting_store

ROWS = 240
FILES = 6
LABELS = np.arange(ROWS) % 12
VECTORS = (np.eye(12, 8)[LABELS] + np.random.default_rng(0).normal(0, 0.4, (ROWS, 8))).astype(np.float32)
COLUMNS = {
    "labels": LABELS,
    "ids": np.arange(ROWS).astype(str),
    "groups": np.arange(ROWS) // 2,
    "camera": np.array(["roof", "door", "yard"])[np.arange(ROWS) % 3],
    "is_gallery": np.arange(ROWS) // 12 % 4 > 0,
}
OF_ALL = ("--labels", "labels", "--json", "--memory_mb", "0.02", "--metrics", "mAP", "recall@1", "pair_f1")
FOUND = (np.arange(ROWS)[:, None] + np.array([12, 24, 1, 36, 5])) % ROWS
JUDGEMENTS = "".join(f"{query} 0 {(query + 12) % ROWS} 1\n" for query in range(ROWS))
# Name -> the options of `fewshot evaluate`; the set is at counted://, the other files are in the folder.
EVALUATIONS: dict[str, list[str]] = {
    "one set": ["counted://set/*.npz", *OF_ALL],
    "queries and gallery": ["counted://both/*.npz", *OF_ALL, "--slices", "camera"],
    "two models": ["counted://set/*.npz", *OF_ALL, "--against", "counted://other/*.npz"],
    "labels in a file": ["counted://vectors/*.npy", *OF_ALL, "--labels", "labels.npy"],
    "judgements": ["counted://set/*.npz", "--judgements", "judgements.txt", "--json", "--metrics", "mAP"],
    "J": ["counted://set/*.npz", *OF_ALL, "J", "--dims", "4"],
    "one file": ["counted://whole.npz", *OF_ALL],
    "gallery in one file": ["counted://divided/*.npz", *OF_ALL],
    "damaged": ["counted://damaged/*.npz", *OF_ALL],
    "one has no rows": ["counted://empty/*.npz", *OF_ALL],
    "other dimension": ["counted://dims/*.npz", *OF_ALL],
    "two spellings": ["counted://spellings/*.npz", *OF_ALL],
    "nothing there": ["counted://nothing/*.npz", *OF_ALL],
}
# Name -> the words of a command line.
COMMANDS = {name: ["evaluate", *words] for name, words in EVALUATIONS.items()} | {
    "neighbours": ["nearest", "counted://set/*.npz", "-k", "5", "-o", "truth.parquet", "--memory_mb", "0.02"],
    "drawn neighbours": ["nearest", "counted://set/*.npz", "-k", "5", "-o", "drawn.parquet", "--queries", "20"],
    "neighbours in a gallery": ["nearest", "counted://both/*.npz", "-k", "3", "-o", "gallery.parquet"],
    "search quality": [
        *(
            "search-quality",
            "found.npy",
            "counted://set/*.npz",
            "--stored",
            "counted://vectors/*.npy",
            "-k",
            "5",
            "--json",
        ),
    ],
}


def write_sets(folder: Path) -> None:
    """Write the sets of the commands."""
    store = folder / "store"
    for name in ("set", "both", "other", "vectors", "divided", "damaged", "empty", "dims", "spellings"):
        (store / name).mkdir(parents=True)
    of_one_set = {name: values for name, values in COLUMNS.items() if name != "is_gallery"}
    np.savez(store / "whole.npz", embeddings=VECTORS, **of_one_set)
    others = VECTORS + np.random.default_rng(1).normal(0, 0.1, VECTORS.shape).astype(np.float32)
    words = np.array(["\u00e9clair", "the", "thing"])[LABELS % 3]
    for part, rows in enumerate(np.split(np.arange(ROWS), FILES)):
        whole = {"embeddings": VECTORS[rows], **{name: values[rows] for name, values in of_one_set.items()}}
        np.savez(store / "set" / f"{part}.npz", **whole)
        np.savez(store / "both" / f"{part}.npz", **whole, is_gallery=COLUMNS["is_gallery"][rows])
        # The first file of the other set is three times as large, so that its rows are divided elsewhere.
        padding = np.zeros(2 * (store / "set" / "0.npz").stat().st_size if part == 0 else 0, np.int8)
        np.savez(store / "other" / f"{part}.npz", **whole | {"embeddings": others[rows]}, padding=padding)
        np.save(store / "vectors" / f"{part}.npy", VECTORS[rows])
        np.savez(store / "divided" / f"{part}.npz", **whole, is_gallery=np.full(len(rows), part > 0))
        np.savez(store / "damaged" / f"{part}.npz", **whole)
        np.savez(
            store / "empty" / f"{part}.npz",
            **{name: values[: 0 if part else None] for name, values in whole.items()},
        )
        np.savez(store / "dims" / f"{part}.npz", **whole | {"embeddings": VECTORS[rows][:, : 4 if part > 2 else None]})
        spelt = np.char.replace(words[rows], "\u00e9", "e\u0301") if part > 2 else words[rows]
        np.savez(store / "spellings" / f"{part}.npz", **whole | {"labels": spelt})
    for part in (1, 4):  # one in each process
        (store / "damaged" / f"{part}.npz").write_bytes(b"damaged")
    np.save(folder / "labels.npy", LABELS)
    np.save(folder / "found.npy", COLUMNS["ids"][FOUND])
    (folder / "judgements.txt").write_text(JUDGEMENTS)


def ran(words: list[str]) -> tuple[int, str, str]:
    """Run a command, and return the exit status and what was printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


def killed(words: list[str]) -> int:
    """Run a command until its second writing, and return the exit status."""
    write = journal.StateFiles.write
    writings = []

    def write_twice(*arguments: Any) -> None:
        write(*arguments)
        writings.append(arguments)
        if len(writings) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal, "INTERVAL", 0)
        patched.setattr(journal, "COST_FACTOR", 0)
        patched.setattr(journal.StateFiles, "write", write_twice)
        return ran(words)[0]


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """Return what each command prints, and what this process reads for it."""
    import torch

    if rank == 0:
        write_sets(folder)
    torch.distributed.barrier()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(torch.distributed.get_world_size())}
    reads = counting_store(str(folder / "store"))
    opened: list[str] = []
    for ending, opener in list(FORMATS.items()):
        FORMATS[ending] = lambda file, opener=opener: (opened.append(file.name), opener(file))[1]
    found: dict[str, Any] = {}
    for name, words in COMMANDS.items():
        os.environ["FEWSHOT_CALLBACKS_CACHE"] = str(folder / f"{name} {rank}")
        reads.clear()
        opened.clear()
        found[name] = (*ran(words), sorted(reads), sorted(set(opened)))
    resumed = [*COMMANDS["queries and gallery"], "--resume", str(folder / "state")]
    os.environ["FEWSHOT_CALLBACKS_CACHE"] = str(folder / f"resumed {rank}")
    found["killed"] = killed(resumed)
    found["resumed"] = ran(resumed)
    torch.distributed.barrier()
    found["state"] = (folder / "state").exists()
    return found
