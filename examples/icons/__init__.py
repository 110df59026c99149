"""Icons: a hard few-shot data set that Linux desktops hold, drawn from the freedesktop icon themes of this machine.

A class is the name of an icon (`edit-cut`, `weather-snow`, `firefox`), its images are the drawings of different artists.
Nothing is downloaded; `PYTHONPATH=examples python -m icons` prints what is there, README.md in this folder the rules.
"""

from icons.splits import IconThemes, SplitBy

__all__ = ["IconThemes", "SplitBy"]
