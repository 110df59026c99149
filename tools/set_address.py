"""Move the address of the repository: python tools/set_address.py https://github.com/someone/fewshot_callbacks.

The address is read from `[project.urls]` in pyproject.toml, and changed in every file that git tracks: the repository, its
issues and badges, the notebook, and the site on GitHub Pages. `tests/test_addresses.py` finds one that was left behind.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = re.compile(r"https://github\.com/([A-Za-z0-9-]+)/([\w.-]+)")


def current() -> tuple[str, str]:
    """The owner and the name of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return parts_of(project["urls"]["Repository"])


def parts_of(address: str) -> tuple[str, str]:
    """The owner and the name in the address of a repository."""
    match = REPOSITORY.fullmatch(address.removesuffix(".git").removesuffix("/"))
    if match is None:
        raise SystemExit(f"{address} is no address such as https://github.com/someone/fewshot_callbacks")
    return match[1], match[2]


def moved(text: str, old: tuple[str, str], new: tuple[str, str]) -> str:
    """Replace the address of the repository and that of its site, wherever they stand in a text."""
    text = re.sub(rf"(github\.com/|/github/){'/'.join(map(re.escape, old))}(?![\w-])", rf"\g<1>{'/'.join(new)}", text)
    site, new_site = ("{}.github.io/{}".format(*parts) for parts in (old, new))
    return re.sub(rf"(?<![\w-]){re.escape(site)}(?![\w-])", new_site, text)


def tracked_texts() -> dict[Path, str]:
    """The text files of the checkout: those that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    texts = {}
    for path in (ROOT / name for name in names if name):
        content = path.read_bytes() if path.is_file() else b"\0"
        if b"\0" not in content:
            texts[path] = content.decode("utf-8")
    return texts


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    old, new = current(), parts_of(sys.argv[1])
    for path, text in tracked_texts().items():
        if (changed := moved(text, old, new)) != text:
            path.write_bytes(changed.encode("utf-8"))
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
