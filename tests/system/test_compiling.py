"""Compiling is announced once, by one process, and not at all if numba finds the kernels in its cache."""

import inspect
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import fewshot_callbacks.functional  # noqa: F401 - imports all loops
from fewshot_callbacks.engine import compiled
from fewshot_callbacks.system.compile_notice import notice_for
from fewshot_callbacks.system.loop_cache import describe_loop
from tests.messages import missing_facts

FORKED = """
import multiprocessing, os, sys
from pathlib import Path
import torch
from fewshot_callbacks import discriminant_ratio
from fewshot_callbacks.system import compile_notice
compile_notice.NOTICE_AFTER = 0.0  # a machine may need less than two seconds

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
    kept = list(Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbc"))
    for file in kept if not warm else ():
        file.unlink()
    print(work.__name__, file=sys.stderr, flush=True)
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert list(Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbc"))  # it did compile
"""
"""Torch is imported once, and each case is a process forked from that; all but the last begin with an empty cache."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="torch is imported once, and then forked")
def test_compiling_is_said_once_by_the_first_process_and_not_with_a_warm_cache(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    words = notice_for("fewshot_callbacks.functional._scatter_kernel")
    assert done.stderr.split("\n")[:-1] == ["worker", "another_rank", "twice", words, "twice"]


def test_the_notice_names_what_its_loops_are_for():
    """A first evaluation, J and a search for neighbours each compile loops of their own, and each says which."""
    modules = ("engine.counting", "engine.nearest", "engine.relevance", "functional._scatter_kernel")
    said = [notice_for(f"fewshot_callbacks.{module}") for module in modules]
    assert len(set(said)) == len(modules)
    for words, what in zip(said, ("exact retrieval", "nearest", "judgements", "J"), strict=True):
        assert missing_facts(words, ("fewshot_callbacks", what, "fewshot warm")) == []


HELPER = """
import json, os, sys, time, traceback
from pathlib import Path
import torch
from numba.core import config
from fewshot_callbacks.system import import_time, loop_cache

for line in sys.stdin:
    folder, script, words = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.argv = ["-c", *words]
        config.CACHE_DIR = f"{folder}/kept"
        import_time.STARTED = time.time()
        failed = 0
        try:
            exec(script, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            failed = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Numba is imported once, and each script runs in a process forked from that."""


@pytest.fixture(scope="module")
def helper():
    if not hasattr(os, "fork"):
        yield None
        return
    command = [sys.executable, "-B", "-c", HELPER]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def engine(tmp_path, helper):
    """A small package with compiled loops; returns a function that runs a script beside it."""
    folder = tmp_path / "some_engine"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "compiled.py").write_text(Path(compiled.__file__).read_text())
    (folder / "calling.py").write_text(CALLING)
    write_number(folder, "return 1")

    def run(script, *words):
        if helper is None:
            environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": f"{tmp_path};{ROOT}"}
            command = [sys.executable, "-B", "-c", script, *words]
            return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
        helper.stdin.write(json.dumps([str(tmp_path), script, words]) + "\n")
        helper.stdin.flush()
        status = int(helper.stdout.readline())
        said = [(tmp_path / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(script, status, *said)

    return run


ROOT = Path(__file__).parents[2]
CALLING = """
from some_engine import called
from some_engine.called import Pair, number
from some_engine.compiled import inlined, kernel

@kernel
def twice(value):
    return 2 * number() * value

@kernel
def through_a_module(value):
    return called.FACTOR * value

@kernel
def first_of(pair):
    return pair.first

def of_any(term):
    @kernel
    def applied(value):
        return term(value)
    return applied

@inlined
def minus_one(value):
    return value - 1.0

@inlined
def plus_one(value):
    return value + 1.0

down, up = of_any(minus_one), of_any(plus_one)

@kernel
def both(value):
    return 10.0 * down(value) + up(value)
"""
PRINTED = """
from some_engine.calling import Pair, down, first_of, through_a_module, twice, up
print(twice(1.0), through_a_module(1.0), first_of(Pair(*PAIR)), down(1.0), up(1.0))
"""


def write_number(folder, body, factor="FACTOR = 1", fields="first second"):
    lines = ("from collections import namedtuple", "from some_engine.compiled import kernel", factor,
             f"Pair = namedtuple('Pair', '{fields}')", "@kernel", "def number():", f"    {body}")  # fmt: skip
    (folder / "called.py").write_text("\n".join(lines) + "\n")


def printed(done):
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def test_a_loop_is_compiled_anew_when_anything_that_it_depends_on_has_changed(engine, tmp_path):
    """Numba looks at the file of the loop alone, and would go on with what it has compiled into it from another file."""
    script = PRINTED.replace("*PAIR", "5.0, 7.0")
    folder, kept = tmp_path / "some_engine", tmp_path / "kept"
    assert printed(engine(script)) == [2, 1, 5, 0, 2]
    (called,) = (folder / "called.py",)
    time = called.stat().st_mtime_ns
    for change, expected in (
        ({"body": "return 9"}, [18, 1, 5, 0, 2]),
        ({"body": "return 1", "factor": "FACTOR = 3"}, [2, 3, 5, 0, 2]),
        ({"body": "return 1", "fields": "second first"}, [2, 1, 7, 0, 2]),
        ({"body": "return 1"}, [2, 1, 5, 0, 2]),
    ):
        write_number(folder, **change)
        os.utime(called, ns=(time, time))  # nobody looks at the time
        before = set(kept.rglob("*.nbc"))
        assert printed(engine(script)) == expected
    assert set(kept.rglob("*.nbc")) == before  # those of the first run, which are still there


NUMBERS = """
import sys
from some_engine.compiled import kernel

def scaled(factor):
    @kernel
    def apply(value):
        return factor * value
    return apply

GLOBAL, CLOSURE, DEFAULT = map(float, sys.argv[1:])
in_closure = scaled(CLOSURE)
del CLOSURE

@kernel
def with_default(value, addend=DEFAULT):
    return value + addend

del DEFAULT

@kernel
def all_three(value):
    return GLOBAL * 100.0 + in_closure(10.0) + with_default(value)
"""


def test_numbers_that_the_source_does_not_tell_are_part_of_the_name(engine, tmp_path):
    (tmp_path / "some_engine" / "numbers_of_the_process.py").write_text(NUMBERS)
    script = "from some_engine.numbers_of_the_process import all_three; print(all_three(0.0))"
    counts = []
    for words, expected in (("123", 123), ("923", 923), ("193", 193), ("129", 129), ("123", 123)):
        assert printed(engine(script, *words)) == [expected]
        counts.append(len(list((tmp_path / "kept").rglob("*all_three*.nbc"))))
    assert counts == [1, 2, 3, 4, 4]


UNKNOWN = {
    "replaced while it is imported": """
from pathlib import Path
Path(__file__).write_text(Path(__file__).read_text().replace("2 *", "3 *"))
from some_engine.compiled import kernel
@kernel
def twice(value):
    return 2 * value
""",
    "a loop of another decorator": """
from some_engine.compiled import kernel
from some_engine.plain import once
@kernel
def twice(value):
    return 2 * once(value)
""",
    "an array in a closure": """
import numpy as np
from some_engine.compiled import kernel
def make(factors):
    @kernel
    def times(value):
        return len(factors) * value
    return times
twice = make(np.ones(2))
""",
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_loop_of_which_something_is_not_known_is_not_kept(engine, tmp_path, what):
    (tmp_path / "some_engine" / "unknown.py").write_text(UNKNOWN[what])
    (tmp_path / "some_engine" / "plain.py").write_text("import numba\nonce = numba.njit(lambda value: value)\n")
    done = engine("from some_engine.unknown import twice; print(twice(1), twice(1.5))")
    assert printed(done) == [2, 3]
    assert list((tmp_path / "kept").rglob("*.nbc")) == []


def test_loops_in_a_zip_file_are_not_kept(engine, tmp_path):
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        for file in (tmp_path / "some_engine").glob("*.py"):
            packed.write(file, f"some_engine/{file.name}")
    done = engine(
        "import sys; sys.path.insert(0, 'packed.zip')\nfrom some_engine.calling import twice; print(twice(1))"
    )
    assert printed(done) == [2]
    assert [*tmp_path.rglob("*.nbc")] == []


def test_a_loop_with_a_number_that_a_process_has_changed_is_not_kept(engine):
    change = """
from some_engine import called
from some_engine.calling import through_a_module
before = through_a_module(1)
called.FACTOR = 5
print(before, through_a_module(1.0))
"""
    assert printed(engine(change)) == [1, 5]
    assert printed(engine("from some_engine.calling import through_a_module as f; print(f(1), f(1.0))")) == [1, 1]


MOMENT = """
import os, sys, time
from some_engine.called import number
from some_engine.calling import twice
replace, ready = os.replace, os.pipe()
number()  # so that one loop alone is left to compile

def slow(before, after):
    def replaced(*paths):
        time.sleep(before)
        replace(*paths)
        time.sleep(after)
    return replaced

children = []
for value, before, after in ((1, 0.5, 1.5), (1.0, 1, 0)):  # the first to begin is the last to end
    children.append(os.fork())
    if children[-1] == 0:
        os.replace = slow(before, after)
        os.close(ready[1])
        os.read(ready[0], 1)  # until all are there
        assert twice(value) == 2
        os._exit(0)
os.close(ready[1])
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="numba is imported once, and then forked")
def test_processes_that_compile_one_loop_for_two_types_at_one_moment_leave_both(engine):
    assert engine(MOMENT).returncode == 0
    done = engine("from some_engine.calling import twice; print(twice(1), twice(1.5), twice(3), twice(3.5))")
    assert printed(done) == [2, 3, 6, 7]


def test_loops_of_one_name_that_two_processes_have_compiled_are_told_apart(engine):
    """Each process numbers what it compiles: `down` in one and `up` in the other have one name and one number."""
    for name in ("down", "up"):
        assert engine(f"from some_engine.calling import {name}; {name}(1.0)").returncode == 0
    assert printed(engine("from some_engine.calling import both; print(both(1.0), both(5.0))")) == [2, 46]


UPGRADE = """
import os, sys, time
from pathlib import Path
from fewshot_callbacks.system import import_time
from some_engine.compiled import kernel  # numba is imported before the fork

replace = os.replace

def slow(*paths):
    time.sleep(0.6)
    replace(*paths)
    time.sleep(0.6)

def working(is_old):
    import_time.STARTED = time.time()
    from some_engine.calling import twice
    if is_old:
        os.write(there[1], b" ")
        os.read(written[0], 1)  # the file is another one now
        os.replace = slow
    assert twice(1.0) == (2 if is_old else 40)
    os._exit(0)

there, written, children = os.pipe(), os.pipe(), []
for is_old in (True, False):
    children.append(os.fork())
    if children[-1] == 0:
        working(is_old)
    if is_old:
        os.read(there[0], 1)
        called = Path("some_engine/called.py")
        called.write_text(called.read_text().replace("return 1", "return 20"))
        os.write(written[1], b" ")
        time.sleep(float(sys.argv[1]))
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="numba is imported once, and then forked")
@pytest.mark.parametrize("seconds", ["0", "1"])
def test_an_upgrade_beside_a_running_process_leaves_no_loop_of_the_old_code(engine, seconds):
    done = engine(UPGRADE, seconds)
    assert done.returncode == 0, done.stderr
    assert printed(engine("from some_engine.calling import twice; print(twice(1.0), twice(2.0))")) == [40, 80]


def test_loops_that_cannot_be_loaded_are_compiled_anew_with_one_line(engine, tmp_path):
    script = PRINTED.replace("*PAIR", "5.0, 7.0")
    whole = printed(engine(script))
    files = sorted((tmp_path / "kept").rglob("*.nb*"))
    assert len(files) > 4
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4  # one bit
        file.write_bytes([content, content[:-9], b"", b"words"][number % 4])
    done = engine(script)
    assert printed(done) == whole
    (line,) = done.stderr.splitlines()
    assert missing_facts(line, ("kernel", tmp_path / "kept")) == []
    again = engine(script)
    assert (printed(again), again.stderr) == (whole, "")


FULL = """
import resource, signal, sys
from some_engine.compiled import kernel
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))  # as a full disk: the beginning of a file has room
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the size of files is limited as on a full disk")
def test_a_full_disk_ends_no_run(engine, tmp_path):
    done = engine(FULL + PRINTED.replace("*PAIR", "5.0, 7.0"))
    assert printed(done) == [2, 1, 5, 0, 2]
    (line,) = done.stderr.splitlines()
    assert missing_facts(line, ("kernels", tmp_path / "kept", "NUMBA_CACHE_DIR")) == []
    assert [file for file in (tmp_path / "kept").rglob("*") if file.is_file()] == []


NOT_WRITABLE = """
from numba.core.caching import _CacheLocator

def refuse(self):
    raise PermissionError(13, "Permission denied")

_CacheLocator.ensure_cache_path = refuse
"""
HITS = (
    "from some_engine.calling import twice; print(twice(1), len(twice.stats.cache_hits), len(twice.stats.cache_misses))"
)


def test_loops_in_a_folder_that_cannot_be_written_are_loaded(engine):
    assert printed(engine(HITS)) == [2, 0, 1]
    done = engine(NOT_WRITABLE + HITS)
    assert printed(done) == [2, 1, 0]
    assert done.stderr == ""


def test_without_the_cache_loops_are_compiled_and_a_warning_says_so(engine, tmp_path):
    """A newer numba may have moved the private parts that the cache needs."""
    done = engine(
        "import sys; sys.modules['fewshot_callbacks.system.loop_cache'] = None\n"
        "from some_engine.calling import twice; print(twice(1))"
    )
    assert printed(done) == [2]
    assert missing_facts(done.stderr, ("numba", "twenty seconds")) == []
    assert [*tmp_path.rglob("*.nbc")] == []


def test_no_folder_for_loops_is_said_once(engine):
    done = engine(NOT_WRITABLE + "import some_engine.calling")
    assert done.returncode == 0
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


def test_old_loops_are_removed_and_files_of_others_are_not(engine, tmp_path):
    assert printed(engine("from some_engine.calling import twice; print(twice(1))")) == [2]
    (file,) = (tmp_path / "kept").rglob("*calling.twice*.nbc")
    name, _, _ = file.name.removesuffix(".nbc").rpartition(".")
    for number in range(100):
        of_another_code = file.with_name(f"{name}.{number:032x}.nbc")
        of_another_code.write_bytes(file.read_bytes())
        os.utime(of_another_code, (number, number))
    foreign = {file.with_name(f"{name}.{255:032x}.nbc"): "words", file.with_name(f"{name}.txt"): "words"}
    for path, text in foreign.items():
        path.write_text(text)
        os.utime(path, (0, 0))
    rest = file.with_name(f"{file.name}.00ff00ff00ff00ff")  # of a process that was killed while it wrote
    rest.write_bytes(b"")
    os.utime(rest, (0, 0))
    assert printed(engine("from some_engine.calling import twice; print(twice(1), twice(1.0))")) == [2, 2]
    assert all(path.read_text() == text for path, text in foreign.items())
    left = {path for path in file.parent.glob(f"{name}*") if path not in foreign}
    assert len(left) == 48
    assert file in left  # it was in use
    assert rest not in left
    assert {path.name for path in left} >= {f"{name}.{number:032x}.nbc" for number in range(54, 100)}


def test_it_is_known_what_each_loop_of_the_package_depends_on():
    modules = [sys.modules[name] for name in sys.modules if name.startswith("fewshot_callbacks.")]
    loops = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    descriptions = [describe_loop(loop) for loop in loops.values()]
    assert len(set(descriptions)) == len(descriptions) > 40


def test_loops_name_nothing_that_their_description_leaves_out():
    """Numbers, loops, modules, and named tuples of modules with loops, whose source is described."""
    modules = [sys.modules[name] for name in sys.modules if name.startswith("fewshot_callbacks.")]
    loops = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    with_loops = {loop.py_func.__module__ for loop in loops.values()}
    numbers = (int, float, np.generic, np.dtype)
    for loop in loops.values():
        for name, value in inspect.getclosurevars(loop.py_func).globals.items():
            is_fields = isinstance(value, type) and issubclass(value, tuple) and value.__module__ in with_loops
            assert is_fields or isinstance(value, (Dispatcher, ModuleType, *numbers)), (loop.py_func.__qualname__, name)
