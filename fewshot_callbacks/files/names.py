"""Names of files: names of system files, the order of numbered names, and different spellings of one name."""

from __future__ import annotations

import functools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fewshot_callbacks.system.terminal import printable

# Names of files that macOS, Windows, NAS boxes, file systems and interpreters add to users' folders; in lower case.
_MADE_BY_SYSTEMS = frozenset(
    {
        *("__macosx", "icon\r"),
        *("thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("@eadir", "@tmp", "@recycle", "@recently-snapshot", "#recycle", "#snapshot"),
        *("lost+found", "__pycache__"),
    }
)
# Largest number of names in a message, which should stay on one line.
_NAMED_AT_MOST = 5


def is_system_name(name: str) -> bool:
    """Return whether this is the name of a system file or folder: it is hidden, or a known name.

    Names that begin with a dot are hidden: `.DS_Store`, `.ipynb_checkpoints`, or `._photo.jpg`, in which macOS keeps the
    attributes of `photo.jpg`.

    Examples:
        >>> [is_system_name(name) for name in ("._photo.jpg", "Thumbs.db", "__MACOSX", "photo.jpg")]
        [True, True, True, False]
    """
    return name.startswith(".") or name.casefold() in _MADE_BY_SYSTEMS


def describe_system_names(names: Counter[str]) -> str:
    """Return a sentence that counts the skipped system files and folders; "" if there are none.

    Examples:
        >>> describe_system_names(Counter({".DS_Store": 2, "__MACOSX": 1}))
        '3 system files or folders skipped: .DS_Store 2, __MACOSX 1'
    """
    total = names.total()
    if not total:
        return ""
    first = sorted(names.items(), key=lambda item: (-item[1], item[0]))[:_NAMED_AT_MOST]
    counts = [f"{printable(name)} {count:,}" for name, count in first]
    if len(names) > _NAMED_AT_MOST:
        counts.append("...")
    subject = "system file or folder" if total == 1 else "system files or folders"
    return f"{total:,} {subject} skipped: {', '.join(counts)}"


def natural_sort_key(name: str) -> tuple[tuple[tuple[int, int], ...], str]:
    """Return the key that sorts numbered names by their numbers, and other names by their letters.

    Examples:
        >>> sorted(["part-10", "part-2", "part-02b"], key=natural_sort_key)
        ['part-2', 'part-02b', 'part-10']
    """
    letters: list[tuple[int, int]] = []
    for piece in re.findall(r"[0-9]+|[^0-9]", name):
        if piece.isascii() and piece.isdigit():
            letters.append((ord("0"), int(piece)))  # a number counts as one letter, among the digits
        else:
            letters.append((ord(piece), 0))
    return tuple(letters), name  # the name itself decides the order of 2 and 02


def composed_form(name: str) -> str:
    """Return a name in the composed form of Unicode.

    macOS writes é as an e and an accent, other systems as one letter.
    """
    return unicodedata.normalize("NFC", name)


def paths_on_disk(files: Iterable[Path], top: Path) -> dict[Path, Path]:
    """Return the files that exist as a dictionary: path in the list -> path as spelt on the disk.

    A list may use another form of Unicode, or another case in the ending. A path outside `top` counts as missing.
    """

    @functools.cache
    def names_in(folder: Path) -> dict[str, str]:  # listing a folder once is faster than looking for each file
        names = os.listdir(folder) if folder.is_dir() else []
        return {spelling_key(name): name for name in names} | {name: name for name in names}

    @functools.cache
    def on_disk(path: Path) -> Path | None:
        if top not in path.parents:
            return None
        folder = top if path.parent == top else on_disk(path.parent)
        if folder is None:
            return None
        names = names_in(folder)
        name = names.get(path.name) or names.get(spelling_key(path.name))
        return None if name is None else folder / name

    paths: dict[Path, Path] = {}
    for file in files:
        path = on_disk(file)
        if path is not None:
            paths[file] = path
    return paths


def spelling_key(name: str) -> str:
    """Return the key that all spellings of a name share: the composed form, with its ending in lower case.

    Examples:
        >>> spelling_key("Owl.JPG"), spelling_key("Owl.jpg")
        ('Owl.jpg', 'Owl.jpg')
    """
    stem, ending = os.path.splitext(composed_form(name))
    return stem + ending.lower()
