"""Keeps compiled loops on disk, so that a later process of the same code need not compile them.

Numba's own cache numbers its files and lists them in an index, which it writes first; and it takes the file that a loop
stands in for all that the loop depends on. Processes of two versions of the code, or two that compile at one moment,
can so be given each other's loops. Here the name of a file is a hash of all that its loop was compiled from, as this
process has it in memory, so that no process ever sees a loop of other code; and a file carries a hash of its content.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import secrets
import sys
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

from fewshot_callbacks.system.compile_notice import say_once

# Stands at the beginning of every file that is written here.
_MARK = b"fewshot_callbacks compiled loop 1\n"
# Files of a function that stay: for several types, processors and versions of the code. When another one is written, those
# are removed that were not used for longest.
_MOST_FILES = 48
# Seconds after which a file is removed that a killed process has left half written.
_UNFINISHED_SECONDS = 86400.0

_DIGEST_BYTES = 32
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic)


class _UnknownDependencyError(Exception):
    """Raised where it is not known what a loop depends on."""


def cache_on_disk(loop: Any) -> Any:
    """Let a loop be loaded from the disk where it is kept, and be kept where it was compiled; return the loop."""
    if not isinstance(loop, Dispatcher):  # NUMBA_DISABLE_JIT, for debuggers: nothing is compiled
        return loop
    try:
        loop._cache = LoopCache(loop)  # type: ignore[attr-defined]
    except RuntimeError:  # no folder can be written: neither beside the module, nor the user's, nor NUMBA_CACHE_DIR
        warnings.warn(
            "numba finds no folder in which it can keep the compiled loops of fewshot_callbacks: each process compiles "
            "them anew, in about twenty seconds. Name a folder that can be written in NUMBA_CACHE_DIR.",
            stacklevel=1,  # one place for all loops, so that it is shown once
        )
    return loop


def name_by_content(loop: Any) -> None:
    """Give a loop that is made inside a function a name that no other loop has.

    Machine code has names: that of the function, the types, and the number of the function in its process. Loops that one
    function makes share a name. If two processes compile one of them each, both may have the same number; and a process
    that loads both from the disk calls one for the other. So a hash of what the loop is compiled from ends its name.
    """
    if not isinstance(loop, Dispatcher):
        return
    description = "\n".join(describe_loop(loop))
    loop.py_func.__qualname__ += f"_{hashlib.sha256(description.encode()).hexdigest()[:16]}"


class LoopCache(FunctionCache):
    """What numba asks for a compiled loop; a file for each combination of types, in the folder that numba chooses.

    Args:
        loop: A function that numba compiles.

    Raises:
        RuntimeError: No folder can be written.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__(loop.py_func)
        self._loop = loop
        self._folder = Path(self.cache_path)
        name = f"{loop.py_func.__module__}.{loop.py_func.__qualname__}".replace("<", "").replace(">", "")
        self._name = name
        # With all loops that one function makes, of any version: without the hash of `name_by_content`.
        common_name = re.sub("_[0-9a-f]{16}$", "", name)
        self._file_name = re.compile(rf"{re.escape(common_name)}(_[0-9a-f]{{16}})?\.[0-9a-f]{{32}}\.nbc(\.[0-9a-f]+)?")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the loop for some types; None where none is kept, or a damaged one."""
        target_context.refresh()
        file = self._file(sig, target_context.codegen())
        if file is None:
            return None
        try:
            content = file.read_bytes()
            mark = content[: len(_MARK)]
            digest = content[len(_MARK) :][:_DIGEST_BYTES]
            loop = content[len(_MARK) + _DIGEST_BYTES :]
            if mark != _MARK or hashlib.sha256(loop).digest() != digest:
                raise ValueError("it was cut or changed")
            loaded = self._impl.rebuild(target_context, pickle.loads(loop))
        except FileNotFoundError:
            return None
        except Exception as error:  # unpickling and LLVM promise no class of error
            say_once(f"A compiled loop in {self._folder} cannot be loaded ({error}): it is compiled anew.")
            return None
        with suppress(OSError):  # others may own it; the time says which loops are in use
            os.utime(file)
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a loop that was compiled, where there is room."""
        file = self._file(sig, data.codegen)
        if file is None or not self._impl.check_cachable(data):
            return
        loop = dumps(self._impl.reduce(data))
        new = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with new.open("xb") as opened:
                opened.write(_MARK + hashlib.sha256(loop).digest() + loop)
            new.replace(file)
            self._remove_oldest()
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            if not (isinstance(error, PermissionError) and file.exists()):  # on Windows another process reads it
                say_once(
                    f"Compiled loops cannot be kept in {self._folder} ({error.strerror or error}): later runs compile them "
                    "anew. Make room, or name another folder in NUMBA_CACHE_DIR."
                )

    def flush(self) -> None:
        """Remove all files of this function."""
        for file, _ in self._files_by_use():
            file.unlink(missing_ok=True)

    def _file(self, sig: Any, codegen: Any) -> Path | None:
        """Return where a loop is kept; None where it is not known what it depends on, so that it must not be kept."""
        try:
            code = "\n".join(describe_loop(self._loop))
        except _UnknownDependencyError:
            return None
        arguments, result = sigutils.normalize_signature(sig)
        compiled_for = [_described_type(kind) for kind in (*arguments, result)]
        compiled_by = (sys.version_info, numba.__version__, np.__version__, codegen.magic_tuple())
        key = hashlib.sha256(f"{compiled_by}\n{compiled_for}\n{code}".encode()).hexdigest()[:32]
        return self._folder / f"{self._name}.{key}.nbc"

    def _files_by_use(self) -> list[tuple[Path, float]]:
        """Return the files of this function that were written here with the time of their last use, the latest first."""
        files = []
        for file in self._folder.glob("*.nbc*"):
            if self._file_name.fullmatch(file.name):
                with suppress(OSError), file.open("rb") as opened:
                    if opened.read(len(_MARK)) in (_MARK, b""):
                        files.append((file, os.fstat(opened.fileno()).st_mtime))
        return sorted(files, key=lambda file_and_time: -file_and_time[1])

    def _remove_oldest(self) -> None:
        """Remove files beyond the number that stays, and what killed processes have left half written."""
        by_use = self._files_by_use()
        whole = [file for file, _ in by_use if file.suffix == ".nbc"]
        too_old = time.time() - _UNFINISHED_SECONDS
        unfinished = [file for file, used in by_use if file.suffix != ".nbc" and used < too_old]
        for file in [*whole[_MOST_FILES:], *unfinished]:
            file.unlink(missing_ok=True)


def describe_loop(loop: Any) -> Iterator[str]:
    """Yield what a loop is compiled from: its code, its constants, and those of all that it calls.

    Two loops of one description give the same machine code. Lines and comments take no part.

    Raises:
        _UnknownDependencyError: The code refers to a value of another kind than numbers, words, modules and functions.
    """
    # the identity of a function -> its number: a function that calls itself is described once
    numbers: dict[int, int] = {}
    waiting: list[Any] = [loop]
    while waiting:
        callee = waiting.pop()
        if id(callee) in numbers:
            yield f"function {numbers[id(callee)]}"
            continue
        numbers[id(callee)] = len(numbers)
        function = callee.py_func if isinstance(callee, Dispatcher) else callee
        if isinstance(callee, Dispatcher):
            yield f"options {_described_options(callee.targetoptions)}"
        yield from _described_code(function.__code__)
        yield f"defaults {_described_constant(function.__defaults__)}"
        named = list(_referred(function))
        for name, value in named:
            if isinstance(value, Dispatcher | types.FunctionType):
                yield f"{name} is a function"
            else:
                yield f"{name} = {_described_value(value)}"
        waiting += [value for _, value in named if isinstance(value, Dispatcher | types.FunctionType)]


def _described_code(code: types.CodeType) -> Iterator[str]:
    """Yield what the bytecode of a function does, without its place in a file."""
    yield f"{code.co_name} {code.co_argcount} {code.co_kwonlyargcount} {code.co_flags} {code.co_code.hex()}"
    yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    yield getattr(code, "co_exceptiontable", b"").hex()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _described_code(constant)
        else:
            yield _described_constant(constant)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _referred(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of everything that a function refers to outside of itself.

    A name may be that of a global and of an attribute: too much is described then, which does no harm.
    """
    names = list(dict.fromkeys(_names_in(function.__code__)))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents
    for name in names:
        value = function.__globals__.get(name)
        if name not in function.__globals__:
            continue
        yield name, value
        if _is_of_the_same_package(value, function):
            inside = {within: vars(value)[within] for within in names if within in vars(value)}
            if any(_is_of_the_same_package(each, function) for each in inside.values()):
                raise _UnknownDependencyError(f"a module in {name}")
            yield from ((f"{name}.{within}", each) for within, each in inside.items())


def _is_of_the_same_package(value: Any, function: types.FunctionType) -> bool:
    """Find out whether a value is a module that changes with the function: its values take part, not only its version."""
    if not isinstance(value, types.ModuleType):
        return False
    return value.__name__.partition(".")[0] == function.__module__.partition(".")[0]


def _described_value(value: Any) -> str:
    """Describe a value that a loop refers to.

    Raises:
        _UnknownDependencyError: It is of another kind.
    """
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__} {getattr(value, '__version__', '')}"
    if isinstance(value, types.BuiltinFunctionType | type | np.ufunc):
        # a named tuple has fields, which numba knows by their places
        return f"{getattr(value, '__module__', '')}.{value.__name__} {getattr(value, '_fields', ())}"
    return _described_constant(value)


def _described_constant(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_described_constant, value))})"
    if isinstance(value, frozenset):
        return f"set of {sorted(map(_described_constant, value))}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array {value.dtype.str} {value.shape} {np.ascontiguousarray(value).tobytes().hex()}"
    if not isinstance(value, _CONSTANTS):
        raise _UnknownDependencyError(type(value).__name__)
    return f"{type(value).__name__} {value!r}"


def _described_options(options: dict[str, Any]) -> str:
    """Describe how a function is compiled; a set has no order of its own."""
    return repr([(name, sorted(value) if isinstance(value, set) else value) for name, value in sorted(options.items())])


def _described_type(kind: Any) -> str:
    """Describe a type of numba: the name of a named tuple does not hold those of its fields."""
    members = [*getattr(kind, "types", ()), *(each for each in [getattr(kind, "dtype", None)] if each is not None)]
    return f"{kind} {getattr(kind, 'fields', ())} [{', '.join(map(_described_type, members))}]"
