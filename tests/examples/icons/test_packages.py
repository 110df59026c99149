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
SAID = {
    "dpkg-query": 'case $1 in --search) echo "art-icons:all, other: $2"; echo "diversion by x: y";; *) printf 1.2-3;; esac',
    "rpm": r"case $4 in */Art/*) printf 'art-icons\t1.2\tGPLv3+';; esac",
    "none": "",
}


@pytest.mark.parametrize(
    ("program", "version", "names"),
    [
        ("dpkg-query", "1.2-3", ("CC-BY-SA-4.0 or GPL-3+", "GPL-3+", "LGPL-3")),
        ("rpm", "1.2", ("GPLv3+",)),
        ("none", "", ()),
    ],
)
def test_the_package_manager_of_the_machine_is_asked(tmp_path: Path, monkeypatch, program, version, names) -> None:
    (tmp_path / "doc" / "art-icons").mkdir(parents=True)
    (tmp_path / "doc" / "art-icons" / "copyright").write_text(COPYRIGHT)
    (tmp_path / program).write_text(f"#!/bin/sh\n{SAID[program]}\n")
    (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(packages, "DOCUMENTATION", tmp_path / "doc")
    monkeypatch.setenv("PATH", str(tmp_path))
    themes = [Theme(name, (tmp_path / name,), (), ()) for name in ("Art", "Own")]
    expected = [Package("art-icons", version, names)] if names else []
    assert packages_of(themes) == {"Art": expected, "Own": []}
    assert licences("unknown") == ()
