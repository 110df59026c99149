"""The hooks before a commit check what `make check` checks, with the same tools."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
HOOKS = {
    entry["repo"]: entry
    for entry in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
}
CHECK = {
    requirement.name: requirement.specifier
    for requirement in map(
        Requirement,
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"][
            "check"
        ],
    )
}


@pytest.mark.parametrize(
    ("repository", "tool", "ids"),
    [
        (
            "https://github.com/astral-sh/ruff-pre-commit",
            "ruff",
            {"ruff-check": "ruff check .", "ruff-format": "ruff format"},
        ),
        ("https://github.com/crate-ci/typos", "typos", {"typos": "typos"}),
    ],
)
def test_a_hook_has_a_version_that_the_extra_allows(repository, tool, ids):
    entry = HOOKS[repository]
    assert entry["rev"].removeprefix("v") in CHECK[tool]
    assert [hook["id"] for hook in entry["hooks"]] == list(ids)
    recipe = re.search(r"^check: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert all(f"$(BIN)/{command}" in recipe for command in ids.values())
