"""The versions that `make` installs: constraints.txt and .github/oldest.txt hold what pyproject.toml asks for."""

import os
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SYSTEMS = {
    "linux": {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"},
    "macos": {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix", "platform_machine": "arm64"},
    "windows": {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt", "platform_machine": "AMD64"},
}


def pins(file: str) -> list[Requirement]:
    """The lines of a file of constraints, without comments."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def version(pin: Requirement) -> str:
    [specifier] = pin.specifier
    assert specifier.operator == "==", pin
    return specifier.version


def asked(*extras: str) -> dict[str, list[Requirement]]:
    """Name of a package -> what pyproject.toml asks of it; without names, in all its parts."""
    optional = PROJECT["optional-dependencies"]
    lists = [optional[extra] for extra in extras] if extras else [PROJECT["dependencies"], *optional.values()]
    found: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, chain(*lists)):
        if requirement.name != PROJECT["name"]:
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_dependency_is_locked_once_within_its_bounds(system, python):
    environment = default_environment() | SYSTEMS[system]
    environment |= {"python_version": python, "python_full_version": f"{python}.9"}
    locked: dict[str, list[str]] = {}
    for pin in pins("constraints.txt"):
        if pin.marker is None or pin.marker.evaluate(environment):
            locked.setdefault(canonicalize_name(pin.name), []).append(version(pin))
    assert not {name: versions for name, versions in locked.items() if len(versions) > 1}
    for name, requirements in asked().items():
        assert name in locked, f"{name} is not locked: make lock"
        for requirement in requirements:
            assert locked[name][0] in requirement.specifier, f"{requirement} is locked at {locked[name][0]}: make lock"


def test_the_lock_names_no_address_and_no_file():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--" not in text  # no options: of an index, of hashes
    assert all(pin.url is None and not pin.extras for pin in pins("constraints.txt"))  # pip refuses extras there


def test_the_lock_has_what_its_second_input_holds():
    locked = {canonicalize_name(pin.name): version(pin) for pin in pins("constraints.txt") if pin.marker is None}
    for held in pins("tools/lock.in"):
        assert locked[canonicalize_name(held.name)] in held.specifier, held


@pytest.mark.skipif(not (ROOT / ".github").exists(), reason="not part of the source distribution")
def test_the_oldest_versions_are_within_their_bounds():
    requirements = asked()
    for pin in pins(".github/oldest.txt"):
        for requirement in requirements.get(canonicalize_name(pin.name), ()):
            assert version(pin) in requirement.specifier, f"{pin} is not {requirement}"


def test_hooks_before_a_commit_have_the_versions_of_make_check():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    revisions = {entry["repo"].rpartition("/")[2].removesuffix("-pre-commit"): entry["rev"] for entry in hooks}
    for tool in ("ruff", "typos"):
        assert revisions[tool].removeprefix("v") in asked("check")[tool][0].specifier


PRETENDED = """#!/bin/sh
# stands for Python: makes an environment, and installs into it as $HOW says
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo made >> "$LOG" ;;
  *--editable*) echo installing >> "$LOG"; case "$HOW" in fail) exit 1 ;; interrupt) kill -TERM 0 ;; esac ;;
esac
"""


def test_an_interrupted_installation_begins_anew_and_a_failed_one_is_tried_again(tmp_path):
    if shutil.which("make") is None or sys.platform == "win32":
        pytest.skip("needs make and a shell")
    python, log, venv = tmp_path / "python", tmp_path / "log", tmp_path / "venv"
    python.write_text(PRETENDED)
    python.chmod(0o755)
    stamp = venv / ".for-test"

    def make(how: str) -> list[str]:
        log.write_text("")
        words = ["make", f"PYTHON={python}", f"VENV={venv}", str(stamp)]
        environment = os.environ | {"HOW": how, "LOG": str(log)}
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, start_new_session=True, check=False
        )
        assert (done.returncode == 0) == stamp.exists() == (how == "succeed")
        return log.read_text().split()

    assert make("fail") == ["made", "installing"]
    assert make("fail") == ["installing"]  # what was there before is kept
    assert make("interrupt") == ["installing"]
    assert make("succeed") == ["made", "installing"]
    assert make("succeed") == []
