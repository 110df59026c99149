"""The page of the glyphs, and the printed table."""

from pathlib import Path

import pytest
from PIL import Image
from sheets import glyph_sheet, main

from fewshot_callbacks.data import Glyphs
from fewshot_callbacks.data.dataset import SPLITS
from tests.messages import missing_facts


def test_a_sheet_of_glyphs_is_drawn_and_the_numbers_of_each_split_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [main([]), main(["--size", "4"])] == [0, 1]
    printed, said = capsys.readouterr()
    sizes = [f"{number:,}" for each in map(Glyphs, SPLITS) for number in (len(each.class_names), len(each))]
    assert [size for size in sizes if size not in printed] == []
    assert missing_facts(said, (4, "size >= 8")) == []
    glyph_sheet(tmp_path / "val.png", "val", rows_per_script=1, dpi=100)
    with Image.open(tmp_path / "val.png") as sheet:
        assert (sheet.size[0] > 500, len(set(sheet.convert("L").tobytes())) > 20) == (True, True)
