"""A test that needs a library of the extra `test-integrations` is skipped without it; the reason names the package."""

import re
import tomllib

import pytest

from tests.integration_packages import EXTRA, MODULES, integration, skipped_without_integrations
from tests.messages import refused
from tests.scripts import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def packages(extra: str) -> list[str]:
    """The names of the packages of an extra, without those of the package itself."""
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS[extra]]
    return [name for name in names if name != "fewshot-callbacks"]


def test_the_modules_are_those_of_the_extra():
    assert sorted(MODULES) == packages(EXTRA)


def test_no_package_is_in_both_extras():
    assert set(packages("test")) & set(packages(EXTRA)) == set()


def test_every_test_installation_of_the_project_takes_both():
    """`test-integrations` brings `test` with it."""
    assert "fewshot-callbacks[test]" in EXTRAS[EXTRA]
    assert f"fewshot-callbacks[{EXTRA},check]" in EXTRAS["dev"]


def test_without_a_module_the_test_is_skipped_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(MODULES, "a-package", ["a_package"])
    facts = ("a_package.part", "pip install -e '.[test-integrations]'")
    with refused(pytest.skip.Exception, *facts):
        integration("a_package.part")
    with refused(pytest.skip.Exception, *facts), skipped_without_integrations():
        raise ModuleNotFoundError("No module named 'a_package.part'", name="a_package.part")


def test_a_module_of_no_extra_is_an_error():
    with refused(AssertionError, "torch", "MODULES"):
        integration("torch")
    with pytest.raises(ModuleNotFoundError), skipped_without_integrations():
        raise ModuleNotFoundError("No module named 'fewshot_callbacks.new'", name="fewshot_callbacks.new")
