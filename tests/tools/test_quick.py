"""`make quick` runs the tests that a file has."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("quick", ROOT / "tools" / "quick.py")
assert spec is not None
assert spec.loader is not None
quick = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quick)


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("fewshot_callbacks/engine/ranks.py", ["tests/engine/test_ranks.py"]),
        ("fewshot_callbacks/functional/_repeated.py", None),  # without tests of its name
        ("fewshot_callbacks/__init__.py", None),
        ("tests/engine/test_ranks.py", ["tests/engine/test_ranks.py"]),
        ("tests/engine/oracles.py", ["tests/engine"]),
        ("docs/evaluate/files.md", ["tests/docs/test_code_blocks.py::test_blocks_run[docs/evaluate/files.md]"]),
        ("docs/research/literature.md", []),  # no block of code
        ("fewshot_callbacks/engine/README.md", []),
        ("tests/engine/test_that_is_removed.py", []),
        ("Makefile", []),
    ],
)
def test_the_tests_of_a_file(file, tests):
    found = quick.tests_of(Path(file))
    assert all((ROOT / test.partition("::")[0]).exists() for test in found)
    if tests is None:
        assert len(found) > 0
    else:
        assert found == tests


def test_every_page_with_code_is_found():
    from tests.docs import pages

    names = {page.relative_to(ROOT) for page in pages.PAGES if page.relative_to(ROOT).parts[0] in ("docs", "README.md")}
    assert {page for page in names if not quick.tests_of(page)} <= {
        page for page in names if "invisible-code" in (ROOT / page).read_text(encoding="utf-8")
    }
