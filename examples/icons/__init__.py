"""Icons: a hard few-shot data set that Linux desktops hold, drawn from the freedesktop icon themes of this machine.

A class is the name of an icon (`edit-cut`, `weather-snow`, `firefox`), its images are the drawings of different artists.
Nothing is downloaded; `PYTHONPATH=examples python -m icons` prints what is there, README.md in this folder the rules.
"""

from fewshot_callbacks.data._episodic import split_of
from icons.data_module import IconThemesDataModule
from icons.splits import IconThemes, SplitBy, check_settings, load_splits

__all__ = ["IconThemes", "IconThemesDataModule", "SplitBy", "check_settings", "load_splits", "split_of"]
