"""Names of files: which ones systems make, how numbered ones are sorted, and when two are spellings of one."""

from __future__ import annotations

import functools
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fewshot_callbacks.system.terminal import printable

# What macOS, Windows, NAS boxes, file systems and interpreters put beside the files of their users; in lower case.
_MADE_BY_SYSTEMS = frozenset(
    {
        *("__macosx", "icon\r"),
        *("thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("@eadir", "@tmp", "@recycle", "@recently-snapshot", "#recycle", "#snapshot"),
        *("lost+found", "__pycache__"),
    }
)
# More names than these would make a message of a line one of several.
_NAMED_AT_MOST = 5


def is_system_name(name: str) -> bool:
    """Return whether a name is one that systems give, and not people: a hidden one, or a known one.

    Hidden are names that begin with a dot, such as `.DS_Store`, `.ipynb_checkpoints`, and `._photo.jpg`, in which macOS
    keeps the attributes of `photo.jpg`.

    Examples:
        >>> [is_system_name(name) for name in ("._photo.jpg", "Thumbs.db", "__MACOSX", "photo.jpg")]
        [True, True, True, False]
    """
    return name.startswith(".") or name.casefold() in _MADE_BY_SYSTEMS


def describe_system_names(names: Counter[str]) -> str:
    """Return a sentence that counts the names that were passed over; "" without a name.

    Examples:
        >>> describe_system_names(Counter({".DS_Store": 2, "__MACOSX": 1}))
        '3 names that systems make are passed over: .DS_Store 2, __MACOSX 1'
    """
    total = names.total()
    if not total:
        return ""
    first = sorted(names.items(), key=lambda item: (-item[1], item[0]))[:_NAMED_AT_MOST]
    named = [f"{printable(name)} {count:,}" for name, count in first]
    more = ", ..." if len(names) > _NAMED_AT_MOST else ""
    what = "name that systems make is" if total == 1 else "names that systems make are"
    return f"{total:,} {what} passed over: {', '.join(named)}{more}"


def natural_sort_key(name: str) -> tuple[tuple[tuple[int, int], ...], str]:
    """Return the key that sorts numbered names by their numbers, and all others by their letters.

    Examples:
        >>> sorted(["part-10", "part-2", "part-02b"], key=natural_sort_key)
        ['part-2', 'part-02b', 'part-10']
    """
    # A number is one letter, in the place of the digits. The name itself decides between 2 and 02.
    pieces = (
        [(ord("0"), int(piece))] if place % 2 else [(ord(letter), 0) for letter in piece]
        for place, piece in enumerate(re.split(r"([0-9]+)", name))
    )
    return tuple(itertools.chain.from_iterable(pieces)), name


def composed_form(name: str) -> str:
    """Return a name in the composed form of Unicode.

    macOS writes an é as an e and an accent, other systems as one letter; archives and lists keep either.
    """
    return unicodedata.normalize("NFC", name)


def paths_on_disk(files: Iterable[Path], top: Path) -> dict[Path, Path]:
    """Return the files that are there, as the disk spells them.

    A list may have another form of Unicode, or another case in the ending.

    Args:
        files: Paths below a folder, as a list spells them; others are not there.
        top: The folder.
    """

    @functools.cache
    def inside(folder: Path) -> dict[str, str]:  # quicker than a question for each file
        names = os.listdir(folder) if folder.is_dir() else []
        return {spelling_key(name): name for name in names} | {name: name for name in names}

    @functools.cache
    def on_disk(path: Path) -> Path | None:
        if top not in path.parents:
            return None
        folder = top if path.parent == top else on_disk(path.parent)
        if folder is None:
            return None
        names = inside(folder)
        name = names.get(path.name) or names.get(spelling_key(path.name))
        return None if name is None else folder / name

    return {file: path for file in files if (path := on_disk(file)) is not None}


def spelling_key(name: str) -> str:
    """Return what two spellings of a file have in common: the composed form, its ending in lower case.

    Examples:
        >>> spelling_key("Owl.JPG"), spelling_key("Owl.jpg")
        ('Owl.jpg', 'Owl.jpg')
    """
    stem, ending = os.path.splitext(composed_form(name))
    return stem + ending.lower()
