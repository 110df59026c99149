"""`fewshot warm`: what it compiles is what evaluations need, and it says where that is kept."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import config

from fewshot_callbacks.cli import main
from tests.messages import missing_facts

EVALUATIONS = """
import numpy as np
import torch
from numba.core.event import install_listener
import fewshot_callbacks
from fewshot_callbacks import Shards, discriminant_ratio, evaluate_retrieval, grouped_recall
from fewshot_callbacks.functional import embedding_health, knn_accuracy, nearest, near_duplicates, suspects
from fewshot_callbacks.system.loop_cache import CompiledLoops

rows = torch.randn(6000, 16, generator=torch.Generator().manual_seed(1))
labels = torch.arange(6000) % 500
np.save("rows.npy", rows.numpy())
loops = CompiledLoops()
with install_listener("numba:compile", loops):
    for similarity in ("cosine", "dot", "euclidean"):
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
print(loops.count)
"""

FASTEST = """
import sys
from fewshot_callbacks.engine import evaluation, nearest
from fewshot_callbacks.engine.pooled import negatives

first, further = sys.argv[1:]
evaluation.fastest = lambda *_: first
negatives.cheapest = lambda estimates, precisions, *_: further if further in precisions else first
nearest.seconds_of_a_pair = lambda precision, *_: precision != first
"""


def fresh_python(tmp_path, *words):
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path / "loops"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, *words]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_warm_compiles_what_evaluations_need_once(tmp_path):
    first, place = fresh_python(tmp_path, "-m", "fewshot_callbacks", "warm")
    number = re.search(r"(\d+) loops", first)[1]
    files = list((tmp_path / "loops").rglob("*.nbc"))
    assert len(files) == int(number) > 50
    assert missing_facts(place, (tmp_path / "loops",)) == []
    assert fresh_python(tmp_path, "-c", EVALUATIONS) == ["0"]
    # Which precisions are the fastest, of the ranks and of further passes, depends on the load of the machine.
    for precisions in (("int8", "int8"), ("int8", "float64"), ("float32", "float32"), ("float64", "float64")):
        assert fresh_python(tmp_path, "-c", FASTEST + EVALUATIONS, *precisions) == ["0"]
    nothing, again = fresh_python(tmp_path, "-m", "fewshot_callbacks", "warm")
    assert missing_facts(nothing, ("Nothing", "loops")) == []
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
