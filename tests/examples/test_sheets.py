"""The page of the glyphs, and the table beside it."""

from pathlib import Path

import pytest
from PIL import Image
from sheets import glyph_sheet, main

from fewshot_callbacks.data import Glyphs
from fewshot_callbacks.data.dataset import SPLITS


def test_sheet_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [main([]), main(["--size", "4"])] == [0, 1]
    printed, refused = capsys.readouterr()
    sizes = [f"{number:,}" for each in map(Glyphs, SPLITS) for number in (len(each.class_names), len(each))]
    assert [size for size in sizes if size not in printed] == []
    assert "size is 4" in refused
    glyph_sheet(tmp_path / "val.png", "val", rows_per_script=1, dpi=100)
    with Image.open(tmp_path / "val.png") as sheet:
        assert (sheet.size[0] > 500, len(set(sheet.convert("L").tobytes())) > 20) == (True, True)
