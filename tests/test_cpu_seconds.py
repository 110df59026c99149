"""A test above the ceiling fails, whether it computes itself or in a process that it starts; compiling is not counted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import subprocess, sys, time
import numba

BUSY = "import time\\nwhile time.process_time() < 1.5: pass"

def test_cheap():
    time.sleep(1.2)

def test_dear():
    exec(BUSY, {})
    until = time.process_time() + 1.5
    while time.process_time() < until: pass

def test_dear_elsewhere():
    subprocess.run([sys.executable, "-c", BUSY])

def test_compiles():
    text = "def total(x):\\n" + "".join(f"    for i in range({k}): x += i % {k + 2}\\n" for k in range(60)) + "    return x"
    names = {}
    exec(text, names)
    numba.njit(names["total"])(1.0)
"""


@pytest.mark.slow
def test_a_test_above_the_ceiling_fails(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    words = ["-p", "tests.cpu_seconds", "--ceiling=0.9", "-p", "no:cacheprovider", "test_some.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = {line.rpartition("::")[2].split()[0] for line in ran.stdout.splitlines() if line.startswith("ERROR test_")}
    assert failed == {"test_dear", "test_dear_elsewhere"}, ran.stdout + ran.stderr
