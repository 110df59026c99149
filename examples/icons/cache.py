"""Loads the icons of this machine from the cache, or draws them; if there are too few, an error lists what to install."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import PIL
import platformdirs

from fewshot_callbacks.data.glyphs import load_or_draw
from icons.drawing import VERSION, DrawnIcons, draw_icons, svg_version
from icons.files import Theme, base_folders, families, find_themes, installed_state

FEWEST_FAMILIES, FEWEST_CLASSES = 6, 100  # below, a message says what to install

INSTALL = """On Debian, Ubuntu and Colab (as root, else with sudo; a name that your release lacks can be left out):
    apt-get install -y --no-install-recommends adwaita-icon-theme gnome-icon-theme mate-icon-theme oxygen-icon-theme \
breeze-icon-theme elementary-xfce-icon-theme papirus-icon-theme numix-icon-theme suru-icon-theme moka-icon-theme \
faba-icon-theme deepin-icon-theme obsidian-icon-theme gnome-human-icon-theme tango-icon-theme lxde-icon-theme \
yaru-theme-icon ukui-themes
On Fedora:
    sudo dnf install adwaita-icon-theme gnome-icon-theme mate-icon-theme oxygen-icon-theme breeze-icon-theme \
elementary-xfce-icon-theme papirus-icon-theme numix-icon-theme tango-icon-theme lxde-icon-theme yaru-icon-theme
and for the themes that are drawn in SVG: pip install resvg_py"""


def installed_themes(roots: Sequence[str | os.PathLike[str]] | None = None) -> list[Theme]:
    """Return the icon themes in `roots`, by default in the folders of the specification.

    Args:
        roots: Folders with themes.

    Returns:
        The themes, in the order of their names.

    Raises:
        FileNotFoundError: One of `roots` does not exist.
    """
    if roots is None:
        return find_themes(base_folders())
    for root in roots:
        if not Path(root).is_dir():
            raise FileNotFoundError(
                f"There is no folder {root}. Name the folders that hold themes, such as /usr/share/icons."
            )
    return find_themes(Path(root) for root in roots)


def cache_file(themes: Sequence[Theme], size: int = 32, min_families: int = 6, *, symbolic: bool = False) -> Path:
    """Return the path of the cached drawing; the name changes with everything that the drawing depends on.

    Args:
        themes: The themes; adding, removing or replacing one of their files changes the name.
        size: See `IconThemes`.
        min_families: See `IconThemes`.
        symbolic: See `IconThemes`.

    Returns:
        The path, whether the file exists or not.

    Examples:
        >>> cache_file([]).name
        'icons-32px-6families-....pt'
    """
    made_with = [f"{VERSION} {PIL.__version__} {svg_version()} {size} {min_families} {symbolic}"]
    fingerprint = hashlib.sha256("\n".join(made_with + installed_state(themes)).encode()).hexdigest()[:12]
    folder = os.environ.get("FEWSHOT_CALLBACKS_CACHE") or platformdirs.user_cache_dir("fewshot_callbacks")
    return Path(folder) / f"icons-{size}px-{min_families}families-{fingerprint}.pt"


def load_drawing(
    size: int = 32,
    min_families: int = 6,
    *,
    symbolic: bool = False,
    roots: Sequence[str | os.PathLike[str]] | None = None,
) -> DrawnIcons:
    """Return all icons before they are split: from the cache if it is valid; otherwise they are drawn and cached.

    Args:
        size: See `IconThemes`.
        min_families: See `IconThemes`.
        symbolic: See `IconThemes`.
        roots: See `IconThemes`.

    Returns:
        The icons, and what each rule left out.

    Raises:
        ValueError: Too few themes are installed. With `roots`, only a set without a class is refused.
        FileNotFoundError: One of `roots` does not exist.
    """
    themes = installed_themes(roots)
    _check_families(len(families(themes)), FEWEST_FAMILIES if roots is None else 1)
    file = cache_file(themes, size, min_families, symbolic=symbolic)
    drawn = load_or_draw(file, DrawnIcons, lambda: draw_icons(themes, size, min_families, symbolic=symbolic), "icon")
    _check_classes(drawn, min_families, FEWEST_CLASSES if roots is None else 1)
    return drawn


def _check_families(found: int, needed: int) -> None:
    if found < needed:
        raise ValueError(
            f"{found} families of icon themes are installed; a data set needs {needed} or more, of other artists each. "
            f"{INSTALL}"
        )


def _check_classes(drawn: DrawnIcons, min_families: int, needed: int) -> None:
    if len(drawn.names) < needed:
        raise ValueError(
            f"{len(drawn.names)} names of icons have pictures of {min_families} families or more (min_families); a data set "
            f"needs {needed} or more. Use a smaller min_families, or install more themes. {INSTALL}"
        )
