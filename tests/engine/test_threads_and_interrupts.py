"""Threads do each task once, errors and interrupts stop them, and the settings of torch are what they were."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import computing, engine_options
from fewshot_callbacks.engine.threads import split, work_off
from fewshot_callbacks.functional import nearest
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.cases import made
from tests.reports import assert_same

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _threads_end():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, as in a terminal; a shell starts what runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("tasks", [0, 1, 2, 5, 60])
def test_every_task_is_done_once_and_each_thread_has_a_space(threads, tasks):
    seen, callers, lock = [], [], threading.Lock()

    def work(number, space):
        time.sleep(0.0005)
        with lock:
            seen.append(number)
            space.add(threading.current_thread())

    spaces = work_off(range(tasks), work, threads, set, lambda: callers.append(threading.current_thread()))
    assert sorted(seen) == list(range(tasks))
    assert 1 <= len(spaces) <= (threads if tasks > 1 else 1)
    assert max(map(len, spaces)) <= 1  # a space serves one thread
    assert set(callers) <= {threading.current_thread()}
    assert threads > 1 or len(callers) == tasks


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_leaves_nothing_behind(threads):
    """What it holds on its way, a group of processes for instance, is free with it, not when garbage is collected."""

    class Held:
        pass

    def evaluate():
        held = Held()
        held_by.append(weakref.ref(held))

        def work(number, space):
            raise ArithmeticError("no more numbers")

        work_off(range(9), work, threads, lambda: held)

    held_by: list[weakref.ref[Held]] = []
    gc.collect()
    gc.disable()
    try:
        with suppress(ArithmeticError):
            evaluate()
        assert held_by[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("threads", [1, 3])
def test_tasks_are_taken_as_they_are_needed(threads):
    taken, done, most, lock = 0, 0, 0, threading.Lock()

    def tasks():
        nonlocal taken, most
        for number in range(300):
            taken += 1
            most = max(most, taken - done)
            yield number

    def work(number, space):
        nonlocal done
        with lock:
            done += 1

    work_off(tasks(), work, threads)
    assert (taken, done) == (300, 300)
    assert most <= threads + 2


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["task", "list", "between", "space"])
def test_what_is_raised_reaches_the_caller_and_stops_the_others(threads, error, where):
    begun, lock = [], threading.Lock()

    def raise_in(place, number=0):
        if place == where and number in (0, 7):
            raise error(f"of a {where}")

    def tasks():
        for number in range(1, 500):
            raise_in("list", number)
            yield number

    def work(number, space):
        with lock:
            begun.append(number)
        raise_in("task", number)
        time.sleep(0.001)

    with pytest.raises(error, match=f"of a {where}"):
        work_off(tasks(), work, threads, lambda: raise_in("space"), lambda: raise_in("between"))
    assert len(begun) < 100


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_between_tasks_or_while_others_end_theirs(threads, interruptible):
    """The helper interrupts when the calling thread has nothing more to do but wait."""
    ended, main = [], threading.current_thread()

    def work(number, space):
        if threading.current_thread() is not main or threads == 1:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        work_off(range(2) if threads == 2 else range(50), work, threads)
    assert len(ended) == (2 if threads == 2 else 0)


def test_an_interrupt_before_all_threads_have_started_stays_one(monkeypatch):
    started, begun, start = [], [], threading.Thread.start

    def interrupted(self):
        if started:
            raise KeyboardInterrupt
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work_off(range(200), lambda number, space: (begun.append(number), time.sleep(0.001)), 3)
    assert len(begun) < 100
    assert not started[0].is_alive()


@pytest.mark.parametrize("inference", [False, True])
def test_threads_write_into_the_callers_tensors_without_gradients(inference):
    """Lightning validates and tests in inference mode, which is a thread's own in PyTorch."""
    settings = set()
    with torch.inference_mode(inference), computing():
        written = torch.zeros(8)

        def work(number, space):
            written[number : number + 1].fill_(number)
            settings.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()))

        work_off(range(8), work, 2)
        assert written.tolist() == list(range(8))
    assert settings == {(False, False, 1)}


def test_slices_cover_a_range():
    for number, most in ((0, 5), (1, 5), (5, 5), (11, 5)):
        parts = split(number, most)
        assert [n for part in parts for n in range(number)[part]] == list(range(number))
        assert all(part.stop - part.start <= most for part in parts)


# ------------------------------------------------------------------------------------------------- whole evaluations


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("raised", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("road", [{}, {"height": 16, "batch": 64}, {"plain": True}])
def test_torch_has_as_many_threads_as_before(threads, raised, road):
    def progress(done, total):
        if raised:
            raise raised("in the bar")

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with engine_options(**road), nullcontext() if raised is None else pytest.raises(raised, match="in the bar"):
            evaluate_retrieval(*made(200, 20, 8), label_groups=None, progress=progress)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_settings_of_products_are_put_back_also_after_an_error(setting):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        with computing():
            assert torch.get_float32_matmul_precision() == "highest"
        with pytest.raises(ZeroDivisionError), computing():
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


def test_products_stay_float32_under_autocast_and_have_no_gradient():
    weights = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (weights @ weights).dtype == torch.bfloat16
        with computing():
            product = weights @ weights
        assert torch.is_autocast_enabled("cpu")
    assert product.dtype == torch.float32
    assert not product.requires_grad
    assert torch.is_grad_enabled()


AROUND = {
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("road", [{}, {"plain": True}, {"batch": 50, "collected": 10}, {"precision": "float64"}])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "hamming"])
def test_what_is_switched_on_around_a_call_changes_nothing(name, road, similarity):
    rows, labels = made(120, 12, 8, noise=2.0)
    if similarity == "hamming":
        rows = rows.sign()
    means = () if similarity == "hamming" else ("prototype_accuracy",)
    options = {"similarity": similarity, "metrics": (*DEFAULT_METRICS, *means, "auc_pr", "eer"), "label_groups": 3}
    with engine_options(**road):
        plain, list_of = evaluate_retrieval(rows, labels, **options), nearest(rows, k=3, similarity=similarity)
        with AROUND[name]():
            inside, others = evaluate_retrieval(rows, labels, **options), nearest(rows, k=3, similarity=similarity)
    assert_same(plain, inside)
    assert torch.equal(list_of.indices, others.indices)
    assert torch.equal(list_of.scores, others.scores)


FLUSHING = """
import json, sys
import numpy as np, torch
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval

flush, threads = json.loads(sys.argv[1])
data = []
for tiny in (40, 4):
    rows = np.random.default_rng(0).normal(size=(40, 5))
    rows[:tiny] *= 1e-41
    data += [(tiny, torch.from_numpy(rows).to(dtype)) for dtype in (torch.float32, torch.float64)]
if flush:  # now, since NumPy and torch would flush the data as well
    assert torch.set_flush_denormal(True)
found = []
for tiny, rows in data:
    for similarity in ("cosine", "dot", "euclidean"):
        with engine_options(threads=threads):
            report = evaluate_retrieval(
                rows, torch.arange(40) % 8, similarity=similarity, label_groups=3, threshold=0.0,
                metrics=(*DEFAULT_METRICS, "prototype_accuracy", "auc_pr", "eer"),
            )
        found.append([tiny, similarity, report.metrics(), report.per_query["mAP"].tolist(), report["threshold"]])
tiniest = np.array([5e-324])
assert ((tiniest * np.array([1.0]))[0] == 0) == flush, "the mode is not what it was"
print(json.dumps(found, default=float))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a processor whose mode can be set")
def test_numbers_too_small_to_be_normal_count_whatever_the_mode_of_the_processor():
    """Rows of 1e-41 end, and have the values that they have without the mode, which is put back."""

    def values(flush, threads):
        arguments = [sys.executable, "-c", FLUSHING, json.dumps([flush, threads])]
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain = values(False, 1)
    assert values(True, 1) == plain
    assert values(True, 2) == plain
