"""`fewshot warm`: it compiles the kernels that evaluations need, and prints the folder of the cache."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import config

from fewshot_callbacks.cli import main
from tests.messages import missing_facts

IN_CHILDREN = """
import json, os, sys
from pathlib import Path
import numpy as np
import torch
from numba.core.dispatcher import Dispatcher
import fewshot_callbacks
from fewshot_callbacks import Shards, discriminant_ratio, evaluate_retrieval, grouped_recall
from fewshot_callbacks.cli import main
from fewshot_callbacks.engine import evaluation, nearest as engine_nearest
from fewshot_callbacks.engine.pooled import negatives as pooled_negatives
from fewshot_callbacks.functional import embedding_health, knn_accuracy, nearest, near_duplicates, suspects

def evaluate(similarities):
    rows = torch.randn(6000, 16, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(6000) % 500
    np.save("rows.npy", rows.numpy())
    for similarity in similarities:
        evaluate_retrieval(rows[:60], labels[:60] % 5, similarity=similarity)
        evaluate_retrieval(rows, labels, similarity=similarity)
    evaluate_retrieval(rows.half().numpy(), labels.numpy(), metrics=("mAP", "eer", "pair_f1"))
    evaluate_retrieval(rows[:99], labels[:99] % 9, gallery=rows[99:], gallery_labels=labels[99:] % 9)
    evaluate_retrieval(rows[:60], labels[:60] % 5, query_ids=labels[:60], query_groups=labels[:60] // 7)
    evaluate_retrieval(Shards("rows.npy"), labels)
    for repeated in (rows[torch.arange(6000) // 3], rows[torch.arange(6000) // 3 * 7 % 2000]):
        evaluate_retrieval(repeated, labels)
        evaluate_retrieval(repeated[:99], labels[:99], gallery=repeated[99:], gallery_labels=labels[99:])
        evaluate_retrieval(repeated, labels, metrics=("mAP", "pair_f1"), max_queries=99)
        grouped_recall(repeated, labels, label_groups=50)
        suspects(repeated, labels)
    nearest(rows, k=3)
    near_duplicates(rows)
    suspects(rows, labels)
    knn_accuracy(rows[:99], labels[:99] % 9, rows[99:], labels[99:] % 9)
    embedding_health(rows, labels)
    discriminant_ratio(rows, labels)

def evaluate_in(first, further):
    evaluation.fastest = lambda *_: first
    pooled_negatives.cheapest = lambda estimates, precisions, *_: further if further in precisions else first
    engine_nearest.seconds_of_a_pair = lambda precision, *_: precision != first
    evaluate(("cosine",))

def loops():
    modules = [module for name, module in sys.modules.items() if name.startswith("fewshot_callbacks.")]
    found = {loop for module in modules for loop in vars(module).values() if isinstance(loop, Dispatcher)}
    return [f"{loop.py_func.__module__}.{loop.__name__} {types}" for loop in found for types in loop.signatures]

def in_a_child(name, work, *words):
    child = os.fork()
    if child == 0:
        work(*words)
        Path(name).write_text(json.dumps(loops()))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

in_a_child("warm", main, ["warm"])
in_a_child("evaluate", evaluate, ("cosine", "dot", "euclidean"))
for precisions in (("int8", "int8"), ("int8", "float64"), ("float32", "float32"), ("float64", "float64")):
    in_a_child("_".join(precisions), evaluate_in, *precisions)
"""
"""Which precisions are the fastest, of the ranks and of further passes, depends on the load of the machine."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="torch is imported once, and then forked")
def test_warm_compiles_what_evaluations_need(tmp_path):
    """Loops that the tests have compiled before are loaded: what is compared is which loops there are afterwards."""
    command = [sys.executable, "-c", IN_CHILDREN]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    warm = set(json.loads((tmp_path / "warm").read_text()))
    assert len(warm) > 40
    for evaluated in ("evaluate", "int8_int8", "int8_float64", "float32_float32", "float64_float64"):
        loops = set(json.loads((tmp_path / evaluated).read_text()))
        assert len(loops) > 20
        assert loops <= warm


FEW_LOOPS = """
import torch
from fewshot_callbacks import discriminant_ratio
from fewshot_callbacks.cli import main, warm
warm._evaluate = lambda **_: discriminant_ratio(torch.randn(6, 2), torch.arange(6) // 3)
main(["warm"])
"""


def test_warm_says_how_many_loops_it_compiled_and_where_they_are(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    command = [sys.executable, "-c", FEW_LOOPS]
    said = [subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(2)]
    (first, place), (nothing, again) = (done.stdout.splitlines() for done in said)
    files = list((tmp_path / "loops").rglob("*.nbc"))
    assert len(files) == int(re.search(r"(\d+) kernels", first)[1]) > 1
    assert missing_facts(place, (tmp_path / "loops",)) == []
    assert missing_facts(nothing, ("Nothing", "kernels")) == []
    assert again == place


WITHOUT_FOLDER = """
from numba.core.caching import _CacheLocator

def refuse(self):
    raise PermissionError(13, "Permission denied")

_CacheLocator.ensure_cache_path = refuse
from fewshot_callbacks.cli import main
print(main(["warm"]))
"""


def test_without_a_folder_that_can_be_written_warm_fails_with_one_line(tmp_path):
    command = [sys.executable, "-c", WITHOUT_FOLDER]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=600)
    assert done.stdout == "1\n"
    (line,) = done.stderr.splitlines()
    assert missing_facts(line, ("fewshot warm", "folder", "NUMBA_CACHE_DIR")) == []


def test_where_numba_compiles_nothing_warm_says_so(monkeypatch, capsys):
    monkeypatch.setattr(config, "DISABLE_JIT", True)
    assert main(["warm"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert missing_facts(line, ("fewshot warm", "NUMBA_DISABLE_JIT")) == []
