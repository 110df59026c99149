"""The page of the glyphs, and the table beside it."""

from pathlib import Path

import pytest
from PIL import Image
from sheets import glyph_sheet, main

from fewshot_callbacks.data import Glyphs
from fewshot_callbacks.data.dataset import SPLITS


def test_sheet_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sheet", str(tmp_path / "sheet.png")]) == 0
    printed = capsys.readouterr().out
    for glyph_set in map(Glyphs, SPLITS):
        assert f"{len(glyph_set.class_names):,}" in printed
        assert f"{len(glyph_set):,}" in printed
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert min(sheet.size) > 500
        assert len(set(sheet.convert("L").tobytes())) > 20
    glyph_sheet(tmp_path / "val.png", "val", rows_per_script=1)
    assert (tmp_path / "val.png").stat().st_size < (tmp_path / "sheet.png").stat().st_size
    assert main(["--size", "4"]) == 1
    assert "size is 4" in capsys.readouterr().err
