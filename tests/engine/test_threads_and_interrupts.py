"""Threads do each task once, errors and interrupts stop them, and the settings of torch are what they were."""

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import computing, engine_options, run_tasks
from fewshot_callbacks.functional import nearest
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.cases import clustered_items, sampled_product
from tests.messages import refused
from tests.reports import assert_same


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


@pytest.mark.parametrize(("threads", "number"), [(1, 0), (1, 60), (2, 1), (3, 2), (2, 60), (8, 60)])
def test_every_task_is_taken_when_it_is_needed_and_done_once(threads, number):
    """A workspace serves one thread, and the caller hears of its own tasks alone."""
    taken, done, most, callers, lock = 0, [], 0, [], threading.Lock()
    workspaces = []

    def tasks():
        nonlocal taken, most
        for taken in range(1, number + 1):
            most = max(most, taken - len(done))
            yield taken

    def work(task, workspace):
        time.sleep(0.0005)
        with lock:
            done.append(task)
            workspace.add(threading.current_thread())

    def new_workspace():
        workspaces.append(set())
        return workspaces[-1]

    run_tasks(tasks(), work, threads, new_workspace, lambda: callers.append(threading.current_thread()))
    assert sorted(done) == list(range(1, number + 1))
    assert most <= threads + 2
    assert 1 <= len(workspaces) <= (threads if number > 1 else 1)
    assert max(map(len, workspaces)) <= 1
    assert set(callers) <= {threading.current_thread()}
    assert threads > 1 or len(callers) == number


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_leaves_nothing_behind(threads):
    """What is on its way, a group of processes for instance, is free with it, not when garbage is collected."""
    alive = weakref.WeakSet()

    class Held:
        def __init__(self, number):
            alive.add(self)

    def work(task, space):
        raise ArithmeticError

    gc.disable()
    try:
        with suppress(ArithmeticError):
            run_tasks(map(Held, range(9)), work, threads)
        assert not alive
    finally:
        gc.enable()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
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

    with refused(error, where):
        run_tasks(tasks(), work, threads, lambda: raise_in("space"), lambda: raise_in("between"))
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
        run_tasks(range(2) if threads == 2 else range(50), work, threads)
    assert len(ended) == (2 if threads == 2 else 0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupt_while_threads_start_stays_one_and_leaves_none_at_work(monkeypatch, has_begun):
    """Ctrl-C may come before the second thread has begun, or after it, while `start` waits to hear of it."""
    started, begun, ended, start = [], [], [], threading.Thread.start

    def interrupted(self):
        if started and not has_begun:
            raise KeyboardInterrupt
        started.append(self)
        start(self)
        if len(started) == 2:
            time.sleep(0.02)  # by now it works on a task
            raise KeyboardInterrupt

    def work(number, space):
        begun.append(number)
        time.sleep(0.2 if threading.current_thread() in started[1:] else 0.05)
        ended.append(number)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(range(200), work, 3)
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 100
    assert not any(thread.is_alive() for thread in started)


# ------------------------------------------------------------------------------------------------- whole evaluations


@pytest.mark.parametrize("raised", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("road", [{"height": 16, "batch_counters": 64}, {"as_on_device": True}])
def test_torch_is_set_as_before(raised, road):
    """While the engine computes it has one thread, and products of float32 are what they are called."""

    def settings():
        return torch.get_num_threads(), torch.get_float32_matmul_precision()

    def progress(done, total):
        assert settings() == (1, "highest")
        if raised:
            raise raised("in the bar")

    before = settings()
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    try:
        with engine_options(**road), nullcontext() if raised is None else refused(raised, "bar"):
            evaluate_retrieval(*clustered_items(200, 20, 8), label_groups=None, progress=progress)
        assert settings() == (3, "medium")
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


def test_torch_is_set_as_before_once_the_last_of_several_threads_has_ended():
    """The precision of products is that of the whole process: a thread that ends first leaves it to the others."""
    first_is_in, second_is_in, seen = threading.Event(), threading.Event(), []

    def first():
        with computing():
            first_is_in.set()
            second_is_in.wait(30)

    def second():
        first_is_in.wait(30)
        with computing():
            second_is_in.set()
            thread.join(30)
            seen.append((torch.get_num_threads(), torch.get_float32_matmul_precision()))

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        thread, other = threading.Thread(target=first), threading.Thread(target=second)
        thread.start()
        other.start()
        other.join(60)
        assert seen == [(1, "highest")]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


AROUND = {"autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16), "inference": torch.inference_mode}
AROUND_ROADS = (
    {"threads": 2},
    {"as_on_device": True},
    {"batch_counters": 50, "buffer_pairs": 10},
    {"precision": "float64"},
)


@pytest.mark.parametrize(
    ("name", "road", "similarity"),
    sampled_product(AROUND, range(4), ["cosine", "dot", "euclidean", "hamming"], count=8),
)
def test_what_is_switched_on_around_a_call_changes_nothing(name, road, similarity):
    """Lightning validates and tests in inference mode, which is a thread's own in PyTorch."""
    rows, labels = clustered_items(120, 12, 8, noise=2.0)
    rows, means = (rows.sign(), ()) if similarity == "hamming" else (rows, ("prototype_accuracy",))
    options = {"similarity": similarity, "metrics": (*DEFAULT_METRICS, *means, "auc_pr", "eer"), "label_groups": 3}

    def found():
        near = nearest(rows, k=3, similarity=similarity)
        return evaluate_retrieval(rows, labels, **options), near.indices.tolist(), near.scores.tolist()

    with engine_options(**AROUND_ROADS[road]):
        plain, *lists = found()
        with AROUND[name]():
            inside, *others = found()
    assert_same(plain, inside)
    assert lists == others
