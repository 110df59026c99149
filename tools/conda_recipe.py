"""Print the recipe.yaml for conda-forge from pyproject.toml and the archive of a release.

python tools/conda_recipe.py v0.2.0.tar.gz    # the archive of the tag v0.2.0 from the repository

Put the output into recipes/fewshot-callbacks/recipe.yaml of conda-forge/staged-recipes.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path

from release_check import ADDRESS, ROOT, address_of, pyproject, version_of

CONDA_NAMES = {"torch": "pytorch"}
"""Packages that have another name on conda-forge."""


def recipe(root: Path, archive: Path) -> str:
    """Return the recipe.yaml for conda-forge; its requirements are the dependencies of pyproject.toml."""
    project, address, version = pyproject(root)["project"], address_of(root), version_of(root)
    if address is None:
        raise SystemExit("The recipe needs the address. Run python tools/release_check.py --address first.")
    [build] = pyproject(root)["build-system"]["requires"]
    [(command, function)] = project["scripts"].items()
    run = "\n    - ".join(conda_requirement(words) for words in project["dependencies"])
    return f"""\
schema_version: 1

context:
  python_min: "{project["requires-python"].removeprefix(">=")}"

package:
  name: {project["name"]}
  version: {version}

source:
  url: {address}/archive/refs/tags/v{version}.tar.gz
  sha256: {hashlib.sha256(archive.read_bytes()).hexdigest()}

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
      - {command} = {function}

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
    - {conda_requirement(build)}
  run:
    - python >=${{{{ python_min }}}}
    - {run}

tests:
  - python:
      imports:
        - fewshot_callbacks
      python_version:
        - ${{{{ python_min }}}}.*
        - "*"
      pip_check: true

about:
  homepage: {address}
  repository: {address}
  documentation: {project["urls"]["Documentation"]}
  license: {project["license"]}
  license_file: {project["license-files"][0]}
  summary: {project["description"]}

extra:
  recipe-maintainers:
    - {re.fullmatch(ADDRESS, address)[1]}
"""


def conda_requirement(requirement: str) -> str:
    """Return a pip requirement in conda syntax: `torch>=2.6` becomes `pytorch >=2.6`."""
    parts = re.fullmatch(r"([\w.-]+)([<>=!~][^;]*)?", requirement)
    if parts is None:
        raise SystemExit(
            f"{requirement!r} has an extra or a marker, which conda does not have. Depend on plain packages."
        )
    return f"{CONDA_NAMES.get(parts[1], parts[1])} {parts[2] or ''}".strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the archive of the tag")
    print(recipe(ROOT, parser.parse_args().archive), end="")
