"""Packages and licences of themes, as dpkg or rpm tell them."""

from pathlib import Path

import pytest
from icons import packages
from icons.files import Theme
from icons.packages import Package, packages_of

COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
License: GPL-3+
 The text of it.
License: CC-BY-SA-4.0  or GPL-3+
License: LGPL-3 (a remark)
"""
DPKG = 'case $1 in --search) echo "art-icons:all, other: $2"; echo "diversion by x: y";; *) printf 1.2-3;; esac'
RPM = r"case $4 in */Art/*) printf 'art-icons\t1.2\tGPLv3+';; esac"


@pytest.mark.parametrize(
    ("program", "says", "expected"),
    [
        ("dpkg-query", DPKG, [Package("art-icons", "1.2-3", ("CC-BY-SA-4.0 or GPL-3+", "GPL-3+", "LGPL-3"))]),
        ("rpm", RPM, [Package("art-icons", "1.2", ("GPLv3+",))]),
        ("none", "", []),
    ],
)
def test_the_package_manager_of_the_machine_is_asked(tmp_path: Path, monkeypatch, program, says, expected) -> None:
    (tmp_path / "doc" / "art-icons").mkdir(parents=True)
    (tmp_path / "doc" / "art-icons" / "copyright").write_text(COPYRIGHT)
    (tmp_path / program).write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(packages, "DOCUMENTATION", tmp_path / "doc")
    monkeypatch.setenv("PATH", str(tmp_path))
    themes = [Theme(name, (tmp_path / name,), (), ()) for name in ("Art", "Own")]
    assert packages_of(themes) == {"Art": expected, "Own": []}
    assert packages.licences("unknown") == ()
