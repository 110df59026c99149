"""Compiling is said once, by one process, and not where numba finds the kernels in its cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fewshot_callbacks._compiling import WORDS
from fewshot_callbacks.engine import compiled

SOON = "from fewshot_callbacks import _compiling; _compiling.AFTER = 0.0"  # a machine may need less than two seconds
MEASURE = """
import torch
from fewshot_callbacks import discriminant_ratio
print(float(discriminant_ratio(torch.arange(12.0).sqrt().reshape(6, 2), torch.arange(6) // 3)))
"""
TWICE = MEASURE + MEASURE.replace("sqrt()", "double().sqrt()")  # a kernel for each type
IN_A_CHILD = f"""
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=exec, args=({MEASURE!r}, {{}}))
child.start()
child.join()
assert child.exitcode == 0
"""


def said(cache: Path, code: str, **variables: str) -> list[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)} | variables
    done = subprocess.run(
        [sys.executable, "-c", f"{SOON}\n{code}"], capture_output=True, text=True, check=True, env=environment
    )
    assert float(done.stdout.split()[0]) > 0
    return done.stderr.splitlines()


def test_compiling_is_said_once_and_a_warm_cache_is_silent(tmp_path):
    assert said(tmp_path, TWICE).count(WORDS) == 1
    assert WORDS not in said(tmp_path, TWICE)


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        (MEASURE, {"RANK": "1"}),
        pytest.param(
            IN_A_CHILD,
            {},
            marks=pytest.mark.skipif(sys.platform == "win32", reason="Windows forks no processes"),
        ),
    ],
    ids=["another rank", "a worker"],
)
def test_other_processes_are_silent(code, variables, tmp_path):
    assert WORDS not in said(tmp_path, code, **variables)
    assert list(tmp_path.rglob("*.nbi"))  # it did compile


def test_a_loop_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path):
    """Numba looks at the file of the loop alone, and would go on with what it has compiled into it from another file."""
    folder = tmp_path / "some_engine"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "compiled.py").write_text(Path(compiled.__file__).read_text())
    (folder / "calling.py").write_text(
        "from some_engine.called import number\nfrom some_engine.compiled import kernel\n\n\n"
        "@kernel\ndef twice():\n    return 2 * number()\n"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(tmp_path)}
    for number in (1, 20):
        source = f"from some_engine.compiled import kernel\n\n\n@kernel\ndef number():\n    return {number}\n"
        (folder / "called.py").write_text(source)
        command = [sys.executable, "-c", "from some_engine.calling import twice; print(twice())"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
        assert int(done.stdout) == 2 * number
