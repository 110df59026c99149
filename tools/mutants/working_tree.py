"""Copies the working tree to the folder where mutants are tried; files that it did not write stay there."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

# A file in each folder of records that `tools/mutants/run.py` has made; it lists the files that were copied to `tree`.
MARK = ".fewshot_mutants.json"


def open_state(folder: Path) -> None:
    """Make a folder of records, or check that this program has made it.

    Raises:
        SystemExit: The folder contains files, and this program did not make it: records, logs and copies would replace them.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise SystemExit(
            f"{folder} holds files and no {MARK}, so that this program has not made it. Pass another --state; if an earlier "
            f"version made it, write {{}} to {folder / MARK}."
        )
    folder.mkdir(exist_ok=True)
    if not (folder / MARK).exists():
        (folder / MARK).write_text("{}")


def copy_working_tree(root: Path, state: Path) -> None:
    """Copy the files that git tracks, or would track, to `tree`. Equal files keep their time, so compiled files stay valid.

    Python files that an earlier call copied and that are gone from the working tree are removed. All other files stay.

    Args:
        root: The working tree.
        state: A folder that `open_state` has seen.

    Raises:
        SystemExit: A file of the working tree would replace one in `tree` that was not copied there.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    names = {name for name in listed.stdout.decode().split("\0") if name and (root / name).is_file()}
    tree, mark = state / "tree", state / MARK
    copied = set(json.loads(mark.read_text()).get("copied", ()))
    foreign = sorted(name for name in names - copied if differs(root / name, tree / name))
    if foreign:
        raise SystemExit(
            f"{tree / foreign[0]} was not copied there by this program, and would be replaced. Remove it, or pass another "
            "--state."
        )
    # Before anything is copied: a call that is interrupted leaves nothing that the next one does not know.
    mark.write_text(json.dumps({"copied": sorted(names | copied)}))
    for name in names:
        source, copy = root / name, tree / name
        if not copy.exists() or differs(source, copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    for name in copied - names:
        if name.endswith(".py"):
            (tree / name).unlink(missing_ok=True)
    mark.write_text(json.dumps({"copied": sorted(names)}))


def differs(source: Path, copy: Path) -> bool:
    """Whether a copy is there, and has another content."""
    return copy.exists() and copy.read_bytes() != source.read_bytes()
