"""Lines of text files, read the same way for all systems, editors and spreadsheets that may have written them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import NamedTuple

from fewshot_callbacks.errors import InputError


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        number: Number of the line in the file, from 1.
    """

    number: int
    text: str

    def words(self) -> list[str]:
        """Return the words between spaces and tabs. Other white space may be part of a name."""
        return re.split(r"[ \t]+", self.text)

    def cells(self, separator: str) -> list[str]:
        """Return the cells between separators, as a spreadsheet reads them, without spaces at their ends.

        A cell in quotes may contain a separator.
        """
        try:
            row = next(csv.reader([self.text], delimiter=separator, skipinitialspace=separator != "\t"))
        except csv.Error:
            # A carriage return inside a name, or a cell of more than 131,072 characters, is not from a spreadsheet.
            row = self.text.split(separator)
        return [cell.strip(" \t") for cell in row]


def read_lines(file: Path) -> list[Line]:
    r"""Return the lines of a file that are not empty.

    A byte-order mark is not part of the first line. Lines only end at `\n` or `\r\n`: `str.splitlines` would break a name
    that contains one of Unicode's eight other separators.

    Raises:
        ValueError: If the file is not text in UTF-8; the message names it.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}. Save it as UTF-8.") from None
    lines = (Line(number, line.strip(" \t")) for number, line in enumerate(re.split(r"\r?\n", text), start=1))
    return [line for line in lines if line.text]
