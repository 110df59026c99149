"""Run the tests of the files that differ from a commit (HEAD), of new files, and those of the layers.

A file of the package has the tests of its name (`engine/ranks.py`: `tests/engine/test_ranks.py` or `tests/engine/ranks`).
Without them it has the files of its folder of tests that name one of its classes or functions, the most frequent first, at
most `MOST_FILES`; and without these the whole folder. Slow tests and long sweeps are left to `make test-rest` and
`make test-all`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Number of files of tests that are run for a file without tests of its name.
MOST_FILES = 3
ALWAYS = ("tests/test_architecture.py", "tests/test_public_names.py", "tests/test_defaults.py")


def lines_of_git(*words: str) -> list[str]:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def changed(base: str) -> list[Path]:
    """The files that differ from a commit, and new ones."""
    differing = lines_of_git("diff", "--name-only", base)
    return [Path(line) for line in (*differing, *lines_of_git("ls-files", "--others", "--exclude-standard"))]


def files_or_folder(folder: Path) -> list[Path]:
    """The folder; of that of all tests the files that lie in it."""
    return (
        [folder]
        if len(folder.parts) > 1
        else sorted(path.relative_to(ROOT) for path in (ROOT / folder).glob("test_*.py"))
    )


def tests_of(file: Path) -> list[Path]:
    """The tests of one file; none for a file that is neither of the package nor a test."""
    if file.parts[0] == "tests" and file.suffix == ".py":
        return [file] if file.name.startswith("test_") else files_or_folder(file.parent)
    if file.parts[0] != "fewshot_callbacks" or file.suffix != ".py":
        return []
    folder, name = Path("tests", *file.parts[1:-1]), file.stem.strip("_")
    named = [folder / f"test_{name}.py", folder / name]
    found = [path for path in named if (ROOT / path).exists()]
    folder = next(path for path in (folder, *folder.parents) if (ROOT / path).is_dir())
    return found or tests_that_name(file, folder) or files_or_folder(folder)


def tests_that_name(file: Path, folder: Path) -> list[Path]:
    """The files of a folder of tests that name the classes and functions of a file most often."""
    defined = re.findall(r"^(?:class|def) (\w+)", (ROOT / file).read_text(encoding="utf-8"), flags=re.M)
    if not defined:
        return []
    name_of_file = re.compile(rf"\b(?:{'|'.join(defined)})\b")
    counts = {
        path.relative_to(ROOT): len(name_of_file.findall(path.read_text(encoding="utf-8")))
        for path in sorted((ROOT / folder).rglob("test_*.py"))
    }
    naming = sorted((path for path, count in counts.items() if count), key=lambda path: -counts[path])
    return naming[:MOST_FILES]


def main(base: str = "HEAD") -> int:
    """Run them, in one process: a second one would import torch and Lightning anew, for four seconds."""
    found = dict.fromkeys(test for file in changed(base) for test in tests_of(file))
    files = [str(path) for path in found if (ROOT / path).exists()]
    words = ["-m", "pytest", "-x", "-m", "not slow and not exhaustive", *ALWAYS, *files]
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
