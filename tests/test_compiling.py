"""Compiling is said once, by one process, and not where numba finds the kernels in its cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fewshot_callbacks._compiling import words_of
from fewshot_callbacks.engine import compiled

FORKED = """
import multiprocessing, os, sys
from pathlib import Path
import torch
from fewshot_callbacks import _compiling, discriminant_ratio
_compiling.AFTER = 0.0  # a machine may need less than two seconds

def measured(dtype):
    assert float(discriminant_ratio(torch.arange(12, dtype=dtype).sqrt().reshape(6, 2), torch.arange(6) // 3)) > 0

def worker():
    process = multiprocessing.get_context("fork").Process(target=measured, args=(torch.float32,))
    process.start()
    process.join()
    assert process.exitcode == 0

def another_rank():
    os.environ["RANK"] = "1"
    measured(torch.float32)

def twice():  # a kernel for each type
    measured(torch.float32)
    measured(torch.float64)

for work, warm in ((worker, False), (another_rank, False), (twice, False), (twice, True)):
    kept = list(Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nb[ci]"))
    for file in kept if not warm else ():
        file.unlink()
    print(work.__name__, file=sys.stderr, flush=True)
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert list(Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbi"))  # it did compile
"""
"""Torch is imported once, and each case is a process forked from that; all but the last begin with an empty cache."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="torch is imported once, and then forked")
def test_compiling_is_said_once_by_the_first_process_and_not_with_a_warm_cache(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    words = words_of("fewshot_callbacks.functional._scatter_kernel")
    assert done.stderr.split("\n")[:-1] == ["worker", "another_rank", "twice", words, "twice"]


def test_it_is_said_what_is_compiled():
    """A first evaluation, J and a search for neighbours each compile loops of their own, and each says which."""
    modules = ("engine.counting", "engine.nearest", "engine.relevance", "functional._scatter_kernel")
    said = [words_of(f"fewshot_callbacks.{module}") for module in modules]
    assert len(set(said)) == len(modules)
    for words, what in zip(said, ("exact retrieval", "nearest", "judgements", "J"), strict=True):
        assert f"compiles its loops for {what}" in words


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
