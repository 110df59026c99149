"""The tiles of a search keep the budget: measured from outside, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

MEASURE = """
import ctypes, gc, json, sys
import torch
from fewshot_callbacks import near_duplicates, nearest

torch.set_num_threads(1)
call, items, dim, memory_mb = json.loads(sys.argv[1])


def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024


def search(embeddings, **budget):
    if call == "nearest":
        return nearest(embeddings, k=10, **budget)
    # most pairs survive the estimates: a tile takes what it can take
    return near_duplicates(embeddings, at_least=-0.5, most=1000, **budget)


search(torch.randn(3000, dim))  # loads libraries and compiled code
embeddings = torch.randn(items, dim)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # what the first search has left may not serve this one
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
found = search(embeddings, memory_mb=memory_mb)
print((status("VmHWM") - before) / 1e6)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the accounts of Linux")
@pytest.mark.parametrize(
    ("call", "items", "dim", "memory_mb"),
    [
        ("nearest", 8000, 128, 24),
        ("near_duplicates", 8000, 32, 24),
        pytest.param("nearest", 31_730, 512, 64, marks=pytest.mark.exhaustive),
        pytest.param("near_duplicates", 31_730, 512, 64, marks=pytest.mark.exhaustive),
    ],
)
def test_no_more_memory_than_was_granted(call, items, dim, memory_mb):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps([call, items, dim, memory_mb])],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    megabytes = float(done.stdout)
    print(f"{call}, {items} items of {dim}: {megabytes:.1f} MB of {memory_mb}")
    assert megabytes < 1.1 * memory_mb
