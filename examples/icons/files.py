"""Finds the icon themes of a machine and their files, as the freedesktop Icon Theme Specification lays them out.

https://specifications.freedesktop.org/icon-theme-spec/latest/: a theme is a folder of that name in one or more base
folders; its `index.theme` lists the folders of icons with their sizes and contexts, and the themes it inherits from.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from configparser import ConfigParser, SectionProxy
from configparser import Error as ConfigError
from dataclasses import dataclass
from pathlib import Path

VECTOR = ".svg"
SUFFIXES = (".png", VECTOR)

# Applications put their own icons into "hicolor" and "locolor", and "default" names a mouse cursor: none of them is a style.
NO_STYLE = frozenset({"hicolor", "locolor", "default"})

# Words at the end of a theme's name that mark a variant of the same drawings, not another artist.
_SHADES = {"dark", "darker", "darkest", "light", "lighter", "lightest", "black", "white", "mono", "grey", "gray"}
_COLOURS = {"blue", "brown", "cyan", "green", "magenta", "orange", "pink", "purple", "red", "teal", "violet", "yellow"}
VARIANT_WORDS = frozenset(_SHADES | _COLOURS | {"hidpi", "classic", "symbolic"})
_GENERIC_WORDS = frozenset({"icon", "icons", "theme", "themes"})


@dataclass(frozen=True)
class IconFolder:
    """A folder of icons of one size, as `index.theme` describes it; sizes are in pixels of the screen.

    Attributes:
        path: Inside the folder of the theme.
        size: Nominal size times scale.
        smallest: The smallest size that the icons are meant for.
        largest: The largest one.
        context: What the icons represent ("Actions", "Applications", ...); empty if the theme does not specify it.
    """

    path: str
    size: int
    smallest: int
    largest: int
    context: str

    def distance(self, size: int) -> int:
        """How far the icons are from a size, as the specification measures it.

        Examples:
            >>> IconFolder("scalable/apps", 48, 16, 256, "Applications").distance(32)
            0
            >>> IconFolder("48x48/apps", 48, 48, 48, "Applications").distance(32)
            16
        """
        return max(self.smallest - size, size - self.largest, 0)


@dataclass(frozen=True)
class Theme:
    """An installed icon theme.

    Attributes:
        name: Name of the theme's folder.
        homes: Folders of the theme, at most one in each base folder, the most important first.
        inherits: The themes in which its missing icons are looked up.
        folders: Folders of icons, in the order of `index.theme`.
    """

    name: str
    homes: tuple[Path, ...]
    inherits: tuple[str, ...]
    folders: tuple[IconFolder, ...]


@dataclass(frozen=True)
class IconFile:
    """The best file of an icon in a family.

    Attributes:
        path: Path of the file; a link is not followed.
        context: Context of the folder.
        target: The name of the icon that the file links to; its own name if it is not a link.
    """

    path: Path
    context: str
    target: str


def base_folders(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Where icon themes are: `~/.icons`, `$XDG_DATA_HOME/icons`, and `icons` in each of `$XDG_DATA_DIRS`.

    Args:
        environment: The variables.

    Returns:
        The folders, the most important first, whether they exist or not.

    Examples:
        >>> [str(folder) for folder in base_folders({"HOME": "/h", "XDG_DATA_DIRS": "/a:/b"})]
        ['/h/.icons', '/h/.local/share/icons', '/a/icons', '/b/icons']
    """
    home = Path(environment.get("HOME") or Path.home())
    data_home = _absolute([environment.get("XDG_DATA_HOME", "")]) or [home / ".local" / "share"]
    data = _absolute((environment.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":"))
    return tuple(dict.fromkeys([home / ".icons", *(folder / "icons" for folder in [*data_home, *data])]))


def _absolute(words: Iterable[str]) -> list[Path]:
    """The specification of base directories has relative paths ignored."""
    return [Path(word) for word in words if word and Path(word).is_absolute()]


def find_themes(roots: Iterable[Path]) -> list[Theme]:
    """All themes with an `index.theme` that lists folders, in the order of their names; broken ones are left out.

    Args:
        roots: The base folders, the most important first.

    Returns:
        The themes; a theme of several base folders once, described by the first `index.theme` that can be read.
    """
    homes: dict[str, list[Path]] = defaultdict(list)
    for root in roots:
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if folder.is_dir() and folder.name.casefold() not in NO_STYLE:
                homes[folder.name].append(folder)
    themes = []
    for name, folders in sorted(homes.items()):
        index = next(filter(None, (_read_index(folder / "index.theme") for folder in folders)), None)
        if index is not None:
            themes.append(Theme(name, tuple(folders), *index))
    return themes


def _read_index(file: Path) -> tuple[tuple[str, ...], tuple[IconFolder, ...]] | None:
    """Return the parents of a theme, and its folders; None if the file has neither."""
    index = ConfigParser(interpolation=None, strict=False, allow_no_value=True, delimiters=("=",))
    try:
        index.read_string(file.read_text(encoding="utf-8-sig", errors="replace"))
    except (OSError, ConfigError):
        return None
    if "Icon Theme" not in index:
        return None
    listed = [*_words(index["Icon Theme"], "Directories"), *_words(index["Icon Theme"], "ScaledDirectories")]
    folders = [_folder(index[path]) for path in dict.fromkeys(listed) if path in index]
    known = tuple(folder for folder in folders if folder is not None)
    return (_words(index["Icon Theme"], "Inherits"), known) if known else None


def _words(section: SectionProxy, key: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in (section.get(key) or "").split(",") if word.strip())


def _folder(section: SectionProxy) -> IconFolder | None:
    """Return the folder of a section; None if its numbers are not numbers."""
    try:
        scale, nominal = int(section.get("Scale", "1")), int(section["Size"])
        kind = (section.get("Type") or "Threshold").casefold()
        if kind == "scalable":
            smallest, largest = int(section.get("MinSize", str(nominal))), int(section.get("MaxSize", str(nominal)))
        else:  # a threshold allows an icon at nearby sizes; it does not mean another picture
            smallest = largest = nominal
    except (KeyError, TypeError, ValueError):
        return None
    return IconFolder(section.name, nominal * scale, smallest * scale, largest * scale, section.get("Context") or "")


def families(themes: Sequence[Theme]) -> dict[str, list[Theme]]:
    """Themes of one artist together: variants in dark, light and colours.

    A theme belongs to the family of another one if both names are equal but for words of `VARIANT_WORDS` at the end
    (Papirus-Dark), if it inherits from the other one, directly or not, and its name begins with that name (gnome-human),
    or if most of its folders are links into the other one (ePapirus). An icon that a theme only inherits
    counts for the theme that drew it.

    Args:
        themes: The themes.

    Returns:
        For each family, its themes: the one with the shortest name first, which also names the family.
    """
    by_name = {theme.name.casefold(): theme for theme in themes}
    grouped: dict[tuple[str, ...], list[Theme]] = defaultdict(list)
    for theme in themes:
        owner = by_name.get(_owner_of_folders(theme).casefold(), theme)
        key = _key(owner.name)
        ancestors = (_key(name) for name in _ancestors(owner, by_name))
        grouped[min((other for other in ancestors if other == key[: len(other)]), key=len, default=key)].append(theme)
    sorted_groups = (sorted(group, key=lambda theme: (len(theme.name), theme.name)) for group in grouped.values())
    return {group[0].name: group for group in sorted(sorted_groups, key=lambda group: group[0].name.casefold())}


def _ancestors(theme: Theme, by_name: Mapping[str, Theme]) -> set[str]:
    """The names of all installed themes that a theme inherits from, directly or not; themes may inherit in circles."""
    found: set[str] = set()
    waiting = [theme]
    while waiting:
        for parent in waiting.pop().inherits:
            if parent.casefold() in by_name and parent.casefold() not in found:
                found.add(parent.casefold())
                waiting.append(by_name[parent.casefold()])
    return found - {theme.name.casefold()}


def _owner_of_folders(theme: Theme) -> str:
    """Return the theme with most of the icon folders after links are followed: usually the theme itself."""
    owners: Counter[str] = Counter()
    for home in theme.homes:
        for folder in theme.folders:
            if (home / folder.path).is_dir():
                above = Path(os.path.realpath(home / folder.path)).parts[: -len(Path(folder.path).parts)]
                owners[above[-1] if above else ""] += 1
    return max(owners, key=lambda name: (owners[name], name == theme.name), default=theme.name)


def _key(name: str) -> tuple[str, ...]:
    words = [word for word in re.split(r"[-_ ]+", name.casefold()) if word not in _GENERIC_WORDS]
    while len(words) > 1 and words[-1] in VARIANT_WORDS:
        words.pop()
    return tuple(words) or (name.casefold(),)


def icon_files(family: Sequence[Theme], size: int, *, vectors: bool, symbolic: bool) -> dict[str, IconFile]:
    """For each icon of a family, the file that is nearest to a size; pixels come before vectors at equal distance.

    Among equally near files, the file of the earlier theme comes first, then the larger file, then the file in the folder
    that the theme lists first.

    Args:
        family: Themes of the family, the most important first.
        size: Wanted height and width, in pixels.
        vectors: Whether SVG can be drawn.
        symbolic: Whether symbolic icons (one colour, for menus) count.

    Returns:
        The files by the names of the icons, in the order of the names.
    """
    best: dict[str, tuple[tuple[int, bool, int, int], Path, str]] = {}
    for position, theme in enumerate(family):
        for folder in theme.folders:
            if not symbolic and "symbolic" in folder.path.casefold():
                continue
            distance = folder.distance(size)
            for home in theme.homes:
                for file in _listed(home / folder.path):
                    name, suffix = os.path.splitext(file)
                    vector = suffix == VECTOR
                    if suffix not in SUFFIXES or (vector and not vectors) or (not symbolic and _is_symbolic(name)):
                        continue
                    rank = (distance, vector, position, -folder.size)
                    if name not in best or rank < best[name][0]:
                        best[name] = (rank, home / folder.path / file, folder.context)
    return {name: _icon_file(name, path, context) for name, (_, path, context) in sorted(best.items())}


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []  # a theme may list folders that it does not have


def _is_symbolic(name: str) -> bool:
    return name.endswith(("-symbolic", "-symbolic-rtl", "-symbolic-ltr", ".symbolic"))


def _icon_file(name: str, path: Path, context: str) -> IconFile:
    target = Path(os.path.realpath(path)).stem if path.is_symlink() else name
    return IconFile(path, context, target)


def installed_state(themes: Sequence[Theme]) -> list[str]:
    """What changes when icons are added, removed or replaced: the times of all folders of icons, as lines of text.

    A package manager replaces a file by renaming a new one over it, which changes the time of the folder.
    """
    lines = []
    for theme in themes:
        for home in theme.homes:
            for path in ("index.theme", *(folder.path for folder in theme.folders)):
                try:
                    lines.append(f"{home / path} {os.stat(home / path).st_mtime_ns}")
                except OSError:
                    continue
    return lines
