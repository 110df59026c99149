"""Icons: a hard few-shot data set, drawn from the freedesktop icon themes of this machine.

A class is the name of an icon (`edit-cut`, `weather-snow`, `firefox`), and its images are the drawings of different artists.
Nothing is downloaded. `PYTHONPATH=examples python -m icons` prints the size of the set; README.md in this folder has the
rules.
"""

from icons.splits import IconThemes, SplitBy

__all__ = ["IconThemes", "SplitBy"]
