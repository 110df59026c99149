"""Run the tests of files that differ from a commit (HEAD), the tests of new files, and the tests of the layers.

A file of the package is tested by the tests of its name (`engine/ranks.py`: `tests/engine/test_ranks.py` or
`tests/engine/ranks`). If there are none, it is tested by the files of its test folder that name its classes or functions,
the most frequent first, at most `MOST_FILES`; if there are none, by the whole folder. A page is tested by its code blocks.
`make test-rest` and `make test-all` run the slow tests and long sweeps.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Maximum number of test files for a file without tests of its name.
MOST_FILES = 3
ALWAYS = ("tests/test_architecture.py", "tests/test_public_names.py", "tests/test_defaults.py")


def lines_of_git(*words: str) -> list[str]:
    """Return the output of a git command."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def changed(base: str) -> list[Path]:
    """Return the files that differ from a commit, and new files."""
    differing = lines_of_git("diff", "--name-only", base)
    return [Path(line) for line in (*differing, *lines_of_git("ls-files", "--others", "--exclude-standard"))]


def tests_of(file: Path) -> list[str]:
    """Return the tests of one file as pytest arguments; empty for a file that no test reads by its name."""
    if file.suffix == ".md":
        return [f"tests/docs/test_code_blocks.py::test_blocks_run[{file.as_posix()}]"] if has_code(file) else []
    if file.suffix != ".py" or not (ROOT / file).exists():
        return []
    if file.parts[0] == "tests":
        return [file.as_posix()] if file.name.startswith("test_") else files_or_folder(file.parent)
    if file.parts[0] == "fewshot_callbacks":
        return tests_of_module(file)
    return []


def has_code(page: Path) -> bool:
    """Return whether a page (README or docs) has code that the tests run."""
    text = (ROOT / page).read_text(encoding="utf-8") if (ROOT / page).exists() else ""
    is_read = page.parts[0] == "docs" or page.as_posix() in ("README.md", "CONTRIBUTING.md")
    return is_read and bool(re.search(r"^ *```(python|bash)", text, flags=re.M))


def tests_of_module(file: Path) -> list[str]:
    """Return the tests of a file in the package."""
    folder, name = Path("tests", *file.parts[1:-1]), file.stem.strip("_")
    named = [path.as_posix() for path in (folder / f"test_{name}.py", folder / name) if (ROOT / path).exists()]
    folder = next(path for path in (folder, *folder.parents) if (ROOT / path).is_dir())
    return named or tests_that_name(file, folder) or files_or_folder(folder)


def files_or_folder(folder: Path) -> list[str]:
    """Return the folder; for the root of all tests, return only its own files."""
    if len(folder.parts) > 1:
        return [folder.as_posix()]
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("test_*.py"))


def tests_that_name(file: Path, folder: Path) -> list[str]:
    """Return the files of a test folder that name the classes and functions of a file most often."""
    defined = re.findall(r"^(?:class|def) (\w+)", (ROOT / file).read_text(encoding="utf-8"), flags=re.M)
    if not defined:
        return []
    name_of_file = re.compile(rf"\b(?:{'|'.join(defined)})\b")
    counts = {
        path.relative_to(ROOT).as_posix(): len(name_of_file.findall(path.read_text(encoding="utf-8")))
        for path in sorted((ROOT / folder).rglob("test_*.py"))
    }
    naming = sorted((path for path, count in counts.items() if count), key=lambda path: -counts[path])
    return naming[:MOST_FILES]


def main(base: str = "HEAD") -> int:
    """Run the tests in one process: another process would take four seconds to import torch and Lightning."""
    found = dict.fromkeys(test for file in changed(base) for test in tests_of(file))
    words = ["-m", "pytest", "-x", "-m", "not slow and not exhaustive", *ALWAYS, *found]
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
