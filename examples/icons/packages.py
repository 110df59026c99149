"""Which packages of the system brought the icon themes, in which version and under which licences."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from icons.files import Theme

DOCUMENTATION = Path("/usr/share/doc")  # the folder of each package's `copyright` file, by Debian's policy


@dataclass(frozen=True)
class Package:
    """A package of the system; all fields are empty where it is unknown.

    Attributes:
        name: Name in the package manager.
        version: The installed one.
        licences: Short names from its copyright file.
    """

    name: str = ""
    version: str = ""
    licences: tuple[str, ...] = ()


def packages_of(themes: Sequence[Theme]) -> dict[str, list[Package]]:
    """The packages that the `index.theme` files of themes belong to.

    Args:
        themes: The themes.

    Returns:
        For each theme, by its name; none where no package manager (dpkg or rpm) lists its files.
    """
    files = {str(home / "index.theme"): theme.name for theme in themes for home in theme.homes}
    found: dict[str, list[Package]] = {theme.name: [] for theme in themes}
    known: dict[str, Package] = {}
    for line in _said("dpkg-query", "--search", *files).splitlines():
        owner, _, file = line.partition(": ")
        if file in files:
            name = owner.split(",")[0].split(":")[0]
            if name not in known:
                version = _said("dpkg-query", "--show", "--showformat=${Version}", name)
                known[name] = Package(name, version, licences(name))
            found[files[file]].append(known[name])
    if not known:
        for file, theme in files.items():
            words = _said("rpm", "-qf", "--queryformat", "%{NAME}\t%{VERSION}\t%{LICENSE}", file).split("\t")
            if len(words) == 3:
                found[theme].append(Package(words[0], words[1], (words[2],)))
    return found


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def licences(package: str) -> tuple[str, ...]:
    """The short names of the licences in a package's machine-readable copyright file; none where there is no such file."""
    try:
        text = (DOCUMENTATION / package / "copyright").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    names = (re.sub(r"\s*\(.*|,$", "", name) for name in re.findall(r"^ *License: *(\S.*)$", text, re.MULTILINE))
    return tuple(sorted({re.sub(r"\s+", " ", name).strip() for name in names}))


def described(packages: Sequence[Package]) -> tuple[str, str]:
    """Packages with their versions, and their licences, each as one line.

    Args:
        packages: Packages of one family; one may occur several times.

    Returns:
        `name version, ...` and `licence, ...`.

    Examples:
        >>> described([Package("art-icons", "1.2-3", ("GPL-3",)), Package("art-icons", "1.2-3", ("GPL-3",))])
        ('art-icons 1.2-3', 'GPL-3')
    """
    distinct = list(dict.fromkeys(packages))
    every = sorted({licence for package in distinct for licence in package.licences})
    return ", ".join(f"{package.name} {package.version}" for package in distinct), ", ".join(every)
