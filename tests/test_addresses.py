"""Addresses, version and date stand in several files, and are the same in all; nothing waits to be filled in."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import fewshot_callbacks
from tests.scripts import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
REPOSITORY = re.compile(r"(?:github\.com/|/github/)([\w-]+/fewshot[_-]callbacks)\b", re.IGNORECASE)
"""The repository, of whichever owner."""
SITE = re.compile(r"([\w-]+)\.github\.io/fewshot[_-]callbacks\b", re.IGNORECASE)
"""Its site on GitHub Pages."""
EXAMPLE = "someone"
"""The owner in docs/project/releasing.md and tools/release_check.py, whose commands show what an address is."""
UNFILLED = re.compile(
    r"\bOWNE[R]\b|\bexample\.(?:org|com|net)\b|\b(?:TOD[O]|FIXM[E]|XX[X]|TB[D])\b|\b(?:YOUR|MY)_[A-Z]{2,}"
    r"|(?i:\blorem ipsum|\bplace[-_ ]?holder\b(?!=)|<your[ -])"
)
"""Words that stand for something missing. An argument of that name in a call is none. Single letters in brackets keep the
pattern from finding itself."""

needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files belong to the repository")


def repository_texts() -> dict[str, str]:
    """Return the text files of the checkout by their paths: those that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    files = [Path(name) for name in names if name and (ROOT / name).is_file()]
    contents = {file.as_posix(): (ROOT / file).read_bytes() for file in files}
    return {path: content.decode("utf-8") for path, content in contents.items() if b"\0" not in content}


def matches(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return file and text of each match in the repository, without data: the outputs of notebooks and drawings."""
    found = []
    for path, text in repository_texts().items():
        if path.endswith(".svg"):
            continue
        words = re.sub(r'"image/png": ".*"', "", text)
        found += [(path, match[1] if pattern.groups else match[0]) for match in pattern.finditer(words)]
    return found


@needs_git
def test_nothing_waits_to_be_filled_in():
    assert matches(UNFILLED) == []


@pytest.mark.parametrize(
    "text",
    [
        "https://github.com/OWNE" + "R/fewshot_callbacks",
        "https://example.or" + "g/",
        "# TOD" + "O: write this",
        "a place" + "holder",
        "YOUR_" + "NAME",
    ],
)
def test_what_waits_is_recognised(text):
    assert UNFILLED.search(text)
    assert not UNFILLED.search('textwrap.shorten(text, 300, placeholder=" ...")')


@needs_git
def test_every_address_is_that_of_pyproject():
    """Without an address in pyproject.toml, no file may name one."""
    address = PROJECT.get("urls", {}).get("Repository", "").removeprefix("https://github.com/")
    owner = address.partition("/")[0]
    repositories = {entry for entry in matches(REPOSITORY) if not entry[1].startswith(f"{EXAMPLE}/")}
    sites = {entry for entry in matches(SITE) if entry[1] != EXAMPLE}
    assert {entry for entry in repositories if entry[1] != address} == set()
    assert {entry for entry in sites if entry[1] != owner} == set()


def test_the_version_stands_in_the_package_and_is_the_newest_release():
    """Before the first release, all changes are unreleased."""
    changes, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    first, *releases = re.findall(r"^## (.+)$", changes, re.MULTILINE)
    fields = dict(re.findall(r"^([\w-]+): (.+)$", citation, re.MULTILINE))
    assert first == "[Unreleased]"
    assert fields["version"] == fewshot_callbacks.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", fields["date-released"])
    assert releases[:1] in ([], [f"[{fields['version']}] - {fields['date-released']}"])


def test_the_pages_that_name_a_version_name_this_one():
    pages = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/start/install.md", "docs/project/releasing.md")
    }
    release = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert f"fewshot_callbacks-{fewshot_callbacks.__version__}-py3-none-any.whl" in pages["docs/start/install.md"]
    tag = f"git tag v{fewshot_callbacks.__version__} && git push origin v{fewshot_callbacks.__version__}"
    assert tag in pages["docs/project/releasing.md"]
    assert tag in release


INSTALLS_BY_NAME = re.compile(
    r"""(?:(?:(?:pip3?|uv|pipx|poetry|conda|mamba|pixi)\b[^\n]{0,20}\b(?:install|add|run|download)|uvx|--with|--from)\b"""
    r"""[^\n]*?[\s"'`=(]fewshot[-_.]callbacks(?:\[[^\]\n]*\])?(?:[=<>~!]=?[\w.*]+)?(?=["'`\s.,;:)\\]|$)(?!["']?\s*@)(?!/)"""
    r"""|\bfewshot[-_.]callbacks(?:\[[^\]\n]*\])?\s*(?:[=~!]=|[<>]=?)\s*\d)""",
    re.IGNORECASE | re.MULTILINE,
)
"""A command that installs what an index has under the name of this package, which may be somebody else's; or a requirement
with a version, which makes a tool do so."""
BROKEN_LINE = re.compile(r"""\\\n\s*|["']\s*\n\s*f?["']""")
"""Where a command of a shell, or a text of Python, continues on the next line."""
SAYS_IT = {"tests/test_addresses.py", "tests/tools/test_release_check.py"}
IS_PUBLISHED = PYPROJECT["tool"].get("release-check", {}).get("published", False)
"""Whether the name belongs to this project: `tools/release_check.py --published` records it."""


def installs_by_name(text: str) -> bool:
    """Return whether a text installs this package by its name, also in a command of several lines."""
    return INSTALLS_BY_NAME.search(BROKEN_LINE.sub("", text)) is not None


@needs_git
@pytest.mark.skipif(IS_PUBLISHED, reason="the name on the package index belongs to this project")
def test_nothing_installs_this_package_by_its_name():
    assert [path for path, text in repository_texts().items() if path not in SAYS_IT and installs_by_name(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install fewshot-callbacks",
        "Run pip install 'fewshot-callbacks[report]'.",
        "python -m pip install -U fewshot_callbacks==0.2.0",
        '%pip install --quiet "fewshot-callbacks[all]"',
        "uv pip install fewshot-callbacks",
        "uv add fewshot.callbacks",
        "f\"Run pip install 'fewshot-callbacks[{extra}]'.\"",
        'subprocess.run([sys.executable, "-m", "pip", "install", "fewshot-callbacks"])',
        'message = (\n    "Run pip install "\n    "fewshot-callbacks[report]."\n)',
        "RUN pip install --no-cache-dir torch \\\n    fewshot-callbacks",
        "uvx fewshot-callbacks demo",
        "uv run --with fewshot-callbacks train.py",
        "pipx run fewshot-callbacks",
        "pixi add fewshot-callbacks",
        'dependencies = ["torch", "fewshot-callbacks[all]>=0.2"]',
        "fewshot_callbacks == 0.2.0",
    ],
)
def test_an_installation_by_name_is_found(text):
    assert installs_by_name(text)


@pytest.mark.parametrize(
    "text",
    [
        'pip install ".[all]"',
        'pip install "fewshot_callbacks-0.2.0-py3-none-any.whl[all]"',
        'pip install "fewshot-callbacks[all] @ file:///content/checkout"',
        "pip install pyarrow",
        "Run pip install '.[report]' in the checkout of this package, or pip install jinja2",
    ],
)
def test_other_installations_are_not(text):
    assert not installs_by_name(text)
