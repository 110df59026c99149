"""Results that pages print as text are those of their blocks."""

import re

from tests.docs import pages


def test_the_leakage_of_the_page_is_what_its_block_prints() -> None:
    page = (pages.ROOT / "docs" / "data_quality.md").read_text(encoding="utf-8")
    [(printed, block)] = re.findall(r"```text\n(.*?)\n```\n\n```python\n(.*?)```", page, flags=re.S)
    namespace = pages.names()
    exec(block, namespace)
    assert str(namespace["leaks"]) == printed
