"""The first cell of the notebook installs the package from a checkout or from an uploaded wheel, and never by its name."""

import importlib.util
import json
import re
import tomllib

import pytest

from tests.messages import refused
from tests.scripts import ROOT

ADDRESS = (
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {}).get("Repository")
)
CELLS = json.loads((ROOT / "examples/colab.ipynb").read_text(encoding="utf-8"))["cells"]
[INSTALL] = [text for cell in CELLS if "%pip install" in (text := "".join(cell["source"]))]


def requirements(folder, monkeypatch):
    """What the cell installs if it runs in a folder."""
    code, count = re.subn(r"%pip install --quiet \"\{requirement\}\"", "installed.append(requirement)", INSTALL)
    assert count == 1
    monkeypatch.chdir(folder)
    installed = []
    exec(code, {"installed": installed})
    return installed


@pytest.fixture
def notebook_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


def test_a_package_that_is_there_is_left_alone(tmp_path, monkeypatch):
    assert requirements(tmp_path, monkeypatch) == []


@pytest.mark.skipif(ADDRESS is None, reason="the repository has no address")
def test_without_a_source_beside_it_the_repository_is_installed(notebook_folder, monkeypatch):
    assert requirements(notebook_folder, monkeypatch) == [f"fewshot-callbacks[all] @ git+{ADDRESS}"]


@pytest.mark.skipif(ADDRESS is not None, reason="the repository has an address")
def test_without_a_source_beside_it_nothing_is_installed_and_it_says_what_to_upload(notebook_folder, monkeypatch):
    with refused(ModuleNotFoundError, notebook_folder, "python -m build --wheel", "dist/fewshot_callbacks-*.whl"):
        requirements(notebook_folder, monkeypatch)


def test_the_newest_uploaded_wheel_is_installed(notebook_folder, monkeypatch):
    for version in ("0.1.0", "0.2.0"):
        (notebook_folder / f"fewshot_callbacks-{version}-py3-none-any.whl").touch()
    wheel = notebook_folder / "fewshot_callbacks-0.2.0-py3-none-any.whl"
    assert requirements(notebook_folder, monkeypatch) == [f"fewshot-callbacks[all] @ {wheel.as_uri()}"]


@pytest.mark.parametrize("place", [".", "..", "clone"])
def test_a_checkout_comes_before_a_wheel(notebook_folder, place, monkeypatch):
    checkout = (notebook_folder / place).resolve()
    (checkout / "fewshot_callbacks").mkdir(parents=True)
    (checkout / "fewshot_callbacks" / "py.typed").touch()
    (notebook_folder / "fewshot_callbacks-0.2.0-py3-none-any.whl").touch()
    assert requirements(notebook_folder, monkeypatch) == [f"fewshot-callbacks[all] @ {checkout.as_uri()}"]
