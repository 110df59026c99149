"""Tasks on threads: each is done once, none overlaps another that changes the same, errors and interrupts arrive."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch

from fewshot_callbacks.engine.cpu.counter import TileCounter
from fewshot_callbacks.engine.threads import Task, run_tasks
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.cases import made
from tests.engine.cases import engine


def alive() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread is not threading.current_thread()}


def nothing(_) -> None:
    pass


@pytest.mark.parametrize("spaces", [1, 2, 3, 8])
@pytest.mark.parametrize("tasks", [0, 1, 5, 60])
def test_every_task_is_done_once_and_its_size_is_told(spaces, tasks):
    seen, sizes, lock = [], [], threading.Lock()

    def work(space, number):
        with lock:
            seen.append((space, number))

    jobs = [Task(frozenset({number % 4}), lambda s, n=number: work(s, n), 10 + number) for number in range(tasks)]
    before = alive()
    run_tasks(jobs, [f"space {number}" for number in range(spaces)], sizes.append)
    assert sorted(number for _, number in seen) == list(range(tasks))
    assert sorted(sizes) == [10 + number for number in range(tasks)]
    assert {space for space, _ in seen} <= {f"space {number}" for number in range(spaces)}
    assert alive() <= before


def test_tasks_that_change_the_same_thing_never_overlap_and_others_do():
    generator = torch.Generator().manual_seed(0)
    changes = [frozenset(torch.randint(0, 6, (2,), generator=generator).tolist()) for _ in range(120)]
    at_work, most, overlaps, lock = [], 0, [], threading.Lock()

    def work(_, own):
        nonlocal most
        with lock:
            overlaps.extend(other for other in at_work if own & other)
            at_work.append(own)
            most = max(most, len(at_work))
        time.sleep(0.0005)
        with lock:
            at_work.remove(own)

    run_tasks([Task(own, lambda s, o=own: work(s, o), 1) for own in changes], [None] * 3, lambda _: None)
    assert overlaps == []
    assert most > 1


def test_a_space_serves_one_task_at_a_time():
    spaces = [threading.Lock() for _ in range(3)]

    def work(space):
        assert space.acquire(blocking=False)
        time.sleep(0.0005)
        space.release()

    run_tasks([Task(frozenset(), work, 1) for _ in range(40)], spaces, lambda _: None)


def test_tasks_that_share_nothing_begin_in_their_order():
    begun, lock = [], threading.Lock()

    def work(_, number):
        with lock:
            begun.append(number)

    run_tasks([Task(frozenset({0}), lambda s, n=n: work(s, n), 1) for n in range(30)], [None] * 3, lambda _: None)
    assert begun == list(range(30))


@pytest.mark.parametrize("spaces", [1, 3])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
def test_what_a_task_raises_reaches_the_caller_and_the_threads_end(spaces, error):
    done, begun = [], []

    def work(_, number):
        begun.append(number)
        if number == 3:
            raise error("of a task")

    before = alive()
    # all of them wait for what the failing task has taken
    tasks = [Task(frozenset({0}), lambda s, n=n: work(s, n), n) for n in range(50)]
    with pytest.raises(error, match="of a task"):
        run_tasks(tasks, [None] * spaces, done.append)
    assert begun == [0, 1, 2, 3]
    assert done == [0, 1, 2]
    assert alive() <= before


@pytest.mark.parametrize("spaces", [1, 3])
def test_an_interrupt_in_the_caller_stops_the_threads(spaces):
    begun, lock = [], threading.Lock()

    def work(_):
        with lock:
            begun.append(1)
        time.sleep(0.001)

    def done(_):
        raise KeyboardInterrupt("of the user")

    before = alive()
    with pytest.raises(KeyboardInterrupt, match="of the user"):
        run_tasks([Task(frozenset({n}), work, 1) for n in range(500)], [None] * spaces, done)
    assert len(begun) < 400
    assert alive() <= before


def test_an_interrupt_before_all_threads_have_started_stays_one(monkeypatch):
    started = []

    def start(self):
        if started:
            raise KeyboardInterrupt
        started.append(self)
        original(self)

    original = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_tasks([Task(frozenset(), nothing, 1)] * 4, [None] * 3, nothing)
    assert not started[0].is_alive()


def test_one_space_or_one_task_runs_in_the_calling_thread():
    threads = []
    for tasks, spaces in ((4, 1), (1, 4)):
        run_tasks(
            [Task(frozenset(), lambda _: threads.append(threading.current_thread()), 1)] * tasks,
            [None] * spaces,
            nothing,
        )
    assert set(threads) == {threading.current_thread()}


def test_done_is_called_in_the_calling_thread_and_gradients_are_off_in_the_others():
    callers, gradients, own = set(), [], []

    def work(_):
        gradients.append(torch.is_grad_enabled())
        own.append(torch.get_num_threads())

    before = torch.get_num_threads()
    run_tasks([Task(frozenset(), work, 1)] * 20, [None] * 3, lambda _: callers.add(threading.current_thread()))
    assert callers == {threading.current_thread()}
    assert gradients == [False] * 20
    assert own == [1] * 20
    assert torch.get_num_threads() == before


@contextmanager
def with_threads(number):
    """Give torch another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TestThreadsOfTheCaller:
    @pytest.mark.parametrize("threads", [1, 2, 3])
    @pytest.mark.parametrize("both", [True, False])
    def test_are_as_many_as_before(self, threads, both):
        with with_threads(threads), engine(threads=None, layout=(32, 32, 10_000 if both else 64), pilot=True):
            evaluate_retrieval(*made(200, 20, 8), group_size=None)
            assert torch.get_num_threads() == threads

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_also_when_an_evaluation_fails(self, threads, error, monkeypatch):
        def fail(*_):
            raise error("in a tile")

        monkeypatch.setattr(TileCounter, "count", fail)
        before = alive()
        for pilot in (False, True):
            with with_threads(threads), engine(threads=None, layout=(32, 32, 10_000), pilot=pilot):
                with pytest.raises(error, match="in a tile"):
                    evaluate_retrieval(*made(200, 20, 8), group_size=None)
                assert torch.get_num_threads() == threads
        assert alive() <= before

    def test_also_when_the_progress_is_interrupted(self):
        def interrupt(done, total):
            raise KeyboardInterrupt("progress")

        before = alive()
        with with_threads(3), engine(threads=None, layout=(32, 32, 10_000)):
            with pytest.raises(KeyboardInterrupt, match="progress"):
                evaluate_retrieval(*made(200, 20, 8), group_size=None, progress=interrupt)
            assert torch.get_num_threads() == 3
        assert alive() <= before


@pytest.mark.parametrize("spaces", [1, 3])
def test_tasks_are_taken_as_they_are_needed(spaces):
    taken, done, most = 0, 0, 0

    def tasks():
        nonlocal taken, most
        for number in range(1000):
            taken += 1
            most = max(most, taken - done)
            yield Task(frozenset({number % 7}), nothing, 1)

    def note(_):
        nonlocal done
        done += 1

    run_tasks(tasks(), [None] * spaces, note)
    assert (taken, done) == (1000, 1000)
    assert spaces > 1 or most == 2  # with threads, `done` may be told later


@pytest.mark.parametrize("spaces", [1, 3])
def test_an_error_while_tasks_are_made_reaches_the_caller(spaces):
    def tasks():
        yield from [Task(frozenset(), nothing, 1)] * 5
        raise ValueError("of the list")

    before = alive()
    with pytest.raises(ValueError, match="of the list"):
        run_tasks(tasks(), [None] * spaces, nothing)
    assert alive() <= before


@pytest.mark.parametrize("inference", [False, True])
def test_threads_write_into_the_callers_tensors_in_its_inference_mode(inference):
    """Lightning validates and tests in inference mode, which is a thread's own in PyTorch."""
    with torch.inference_mode(inference):
        written = torch.zeros(8)
        tasks = [Task(frozenset(), lambda _, n=number: written[n : n + 1].fill_(n), 1) for number in range(8)]
        run_tasks(tasks, [None, None], nothing)
        assert written.tolist() == list(range(8))
