"""The address of the repository, its version and its date stand in several files, and are the same in all."""

import re
import tomllib

import pytest

import fewshot_callbacks
from tests.scripts import ROOT, imported_script

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
OWNER, NAME = REPOSITORY.removeprefix("https://github.com/").split("/")
NAMES = rf"(fewshot[_-]callbacks|{NAME})\b"
ANYWHERE = re.compile(rf"(?:github\.com/|/github/)([\w-]+)/{NAMES}|([\w-]+)\.github\.io/{NAMES}", re.IGNORECASE)
"""The repository or its site, of whichever owner."""
EXAMPLE = "someone"
"""The owner in addresses that are examples."""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files belong to the repository")
def test_every_address_is_that_of_pyproject():
    with imported_script("tools/set_address.py") as tool:
        found = {
            (path.relative_to(ROOT).as_posix(), match[1] or match[3], match[2] or match[4])
            for path, text in tool.tracked_texts().items()
            for match in ANYWHERE.finditer(text)
            if EXAMPLE not in (match[1], match[3])
        }
        with pytest.raises(SystemExit, match="is no address such as https://github"):
            tool.parts_of("someone/exact")
    assert {"pyproject.toml", "CITATION.cff", "examples/colab.ipynb"} <= {file for file, _, _ in found}
    assert {entry for entry in found if entry[1:] != (OWNER, NAME)} == set()


def test_the_version_stands_in_the_package_and_is_the_newest_release():
    changes, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    released = re.search(r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE).groups()
    fields = dict(re.findall(r"^([\w-]+): (.+)$", citation, re.MULTILINE))
    assert released == (fields["version"], fields["date-released"]) == (fewshot_callbacks.__version__, released[1])
