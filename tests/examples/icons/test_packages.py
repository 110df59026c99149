"""Packages and licences of themes, as dpkg or rpm tell them."""

from pathlib import Path

import pytest
from icons import packages
from icons.files import Theme
from icons.packages import Package, licences, packages_of

COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
License: GPL-3+
 The text of it.

Files: apps/*
License: CC-BY-SA-4.0  or GPL-3+

License: LGPL-3 (a remark)
"""


@pytest.fixture
def themes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Theme]:
    monkeypatch.setattr(packages, "DOCUMENTATION", tmp_path / "doc")
    (tmp_path / "doc" / "art-icons").mkdir(parents=True)
    (tmp_path / "doc" / "art-icons" / "copyright").write_text(COPYRIGHT)
    return [Theme(name, (tmp_path / name,), (), ()) for name in ("Art", "Own")]


def test_licences_are_the_short_names_of_the_copyright_file(themes: list[Theme]) -> None:
    assert licences("art-icons") == ("CC-BY-SA-4.0 or GPL-3+", "GPL-3+", "LGPL-3")
    assert licences("unknown") == ()


def test_dpkg_is_asked_once_for_all_files(themes: list[Theme], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def said(*command: str) -> str:
        asked.append(command[:2])
        if command[1] == "--show":
            return "1.2-3"
        return f"art-icons:all, other: {themes[0].homes[0] / 'index.theme'}\ndiversion by x: y"

    monkeypatch.setattr(packages, "_said", said)
    package = Package("art-icons", "1.2-3", licences("art-icons"))
    assert packages_of(themes) == {"Art": [package], "Own": []}
    assert asked == [("dpkg-query", "--search"), ("dpkg-query", "--show")]


def test_without_dpkg_rpm_is_asked(themes: list[Theme], monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*command: str) -> str:
        known = command[0] == "rpm" and command[-1].startswith(str(themes[0].homes[0]))
        return "art-icons\t1.2\tGPLv3+" if known else ""

    monkeypatch.setattr(packages, "_said", said)
    assert packages_of(themes) == {"Art": [Package("art-icons", "1.2", ("GPLv3+",))], "Own": []}


def test_a_machine_without_a_package_manager_knows_nothing(
    themes: list[Theme], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert packages_of(themes) == {"Art": [], "Own": []}
