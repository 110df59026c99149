"""The copy in which mutants are tried: it replaces and removes nothing that was not copied there."""

import subprocess

import pytest

from tests.messages import refused
from tests.scripts import imported_script


@pytest.fixture
def tree(tmp_path):
    """A working tree of two files, and the folder of records."""
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for name in ("one.py", "two.py"):
        (root / name).write_text(name)
    return root, tmp_path / "state"


def copied(root, state):
    with imported_script("tools/mutants/working_tree.py") as working_tree:
        working_tree.open_state(state)
        working_tree.copy_working_tree(root, state)
    return sorted(path.name for path in (state / "tree").iterdir())


def test_copies_that_are_gone_are_removed_and_files_of_others_stay(tree):
    root, state = tree
    assert copied(root, state) == ["one.py", "two.py"]
    (state / "tree" / "mine.py").write_text("mine")
    (root / "two.py").unlink()
    (root / "one.py").write_text("changed")
    for _ in range(2):
        assert copied(root, state) == ["mine.py", "one.py"]
    assert (state / "tree" / "one.py").read_text() == "changed"
    assert (state / "tree" / "mine.py").read_text() == "mine"


def test_a_file_that_was_not_copied_is_not_replaced(tree):
    root, state = tree
    copied(root, state)
    (state / "tree" / "three.py").write_text("mine")
    (root / "three.py").write_text("three.py")
    with refused(SystemExit, state / "tree" / "three.py", "--state"):
        copied(root, state)
    assert (state / "tree" / "three.py").read_text() == "mine"


def test_a_folder_that_holds_something_else_is_refused(tree):
    root, state = tree
    (state / "tree").mkdir(parents=True)
    (state / "tree" / "mine.py").write_text("mine")
    with refused(SystemExit, state, ".fewshot_mutants.json", "--state"):
        copied(root, state)
    assert [path.name for path in state.iterdir()] == ["tree"]
    assert (state / "tree" / "mine.py").read_text() == "mine"
