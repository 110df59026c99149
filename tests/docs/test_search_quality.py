"""The page on approximate indices shows what its first block prints."""

import re

import numpy as np
import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "search_quality.md").read_text(encoding="utf-8")
NUMBER = r"-?\d+\.\d+"


def test_the_page_shows_what_its_block_prints():
    [code, *_] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    [shown] = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    names = {"np": np}
    exec(code, names)
    printed = str(names["quality"])
    assert re.sub(NUMBER, "", printed) == re.sub(NUMBER, "", shown)
    numbers = [[float(number) for number in re.findall(NUMBER, text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)
