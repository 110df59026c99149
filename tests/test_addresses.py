"""The address of the repository, its version and its date stand in several files, and are the same in all."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fewshot_callbacks
from tests.scripts import ROOT, loaded

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
OWNER, NAME = REPOSITORY.removeprefix("https://github.com/").split("/")
NAMES = r"fewshot[_-]callbacks"
ANYWHERE = re.compile(
    rf"(?:github\.com/|/github/)([A-Za-z0-9-]+)/({NAMES}|{NAME})\b|([A-Za-z0-9-]+)\.github\.io/({NAMES}|{NAME})\b",
    re.IGNORECASE,
)
"""The repository or its site, of whichever owner."""
EXAMPLE = "someone"
"""The owner in addresses that are examples."""

needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files belong to the repository")


@pytest.fixture
def tool():
    with loaded("tools/set_address.py") as module:
        yield module


def field(name):
    """A field of CITATION.cff, which is YAML with one of a line."""
    return re.search(rf"^{name}: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)[1]


@needs_git
def test_every_address_is_that_of_pyproject(tool):
    found = {
        (str(path.relative_to(ROOT)), match[1] or match[3], match[2] or match[4])
        for path, text in tool.tracked_texts().items()
        for match in ANYWHERE.finditer(text)
        if EXAMPLE not in (match[1], match[3])
    }
    assert {"pyproject.toml", "CITATION.cff", "examples/colab.ipynb"} <= {str(Path(file)) for file, _, _ in found}
    assert {entry for entry in found if entry[1:] != (OWNER, NAME)} == set()


def test_addresses_of_the_project_belong_together():
    urls = PROJECT["urls"]
    assert urls["Homepage"] == urls["Documentation"] == f"https://{OWNER}.github.io/{NAME}/"
    assert urls["Issues"] == f"{REPOSITORY}/issues"
    assert urls["Changelog"] == f"{REPOSITORY}/blob/main/CHANGELOG.md"
    assert (field("repository-code"), field("url")) == (REPOSITORY, urls["Documentation"])
    notebook = (ROOT / "examples/colab.ipynb").read_text(encoding="utf-8")
    assert f'REPOSITORY = \\"git+{REPOSITORY}\\"' in notebook


@pytest.mark.parametrize(
    "address", ["someone/exact", "https://example.org/someone/exact", "https://github.com/someone"]
)
def test_what_is_no_address_is_refused(tool, address):
    with pytest.raises(SystemExit, match="is no address such as https://github"):
        tool.parts_of(address)


def test_the_version_stands_in_the_package_and_is_the_newest_release():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.search(r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE).groups()
    assert (version, date) == (field("version"), field("date-released"))
    assert fewshot_callbacks.__version__ == version
    assert "version" in PROJECT["dynamic"]


@needs_git
def test_one_command_moves_the_repository_and_its_site(tmp_path):
    page = (
        "git+https://github.com/{0}/{1}.git, https://github.com/{0}/{1}/issues, https://{0}.github.io/{1}/, "
        "https://colab.research.google.com/github/{0}/{1}/blob/main/examples/colab.ipynb; "
        f"not {OWNER}, github.com/{OWNER}/{NAME}2 or github.com/other/{NAME}"
    )
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/set_address.py").write_bytes((ROOT / "tools/set_address.py").read_bytes())
    (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nRepository = "{REPOSITORY}"\n', encoding="utf-8")
    (tmp_path / "page.md").write_text(page.format(OWNER, NAME), encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\0" + REPOSITORY.encode())
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    command = [sys.executable, "tools/set_address.py", "https://github.com/some-one/exact"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == {"page.md", "pyproject.toml"}
    assert "https://github.com/some-one/exact" in (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page.format("some-one", "exact")
    assert REPOSITORY.encode() in (tmp_path / "picture.png").read_bytes()
