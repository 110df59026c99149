"""Keeps compiled loops on disk, so that a later process of the same code need not compile them.

Numba's own cache numbers its files and lists them in an index, which it writes first. It also assumes that a loop depends
on nothing but the file that defines it. So processes of two versions of the code, or two that compile at the same time, can
load each other's loops. Here the name of a file is a hash of everything that its loop was compiled from, as this process
has it in memory: no process ever loads a loop of other code. A file also holds a hash of its content.
"""

from __future__ import annotations

import hashlib
import inspect
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
from itertools import takewhile
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import config, event, sigutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.system.compile_notice import say_once

# The first bytes of every file that is written here.
_MARK = b"fewshot_callbacks compiled loop 1\n"
# Largest number of files of a function, for several types, processors and versions of the code. When one more is written,
# the files that were not used for the longest time are removed.
_MOST_FILES = 48
# Seconds after which an incomplete file is removed: a killed process has left it.
_UNFINISHED_SECONDS = 86400.0

_DIGEST_BYTES = 32
# The caches of all loops of this process.
_CACHES: list[LoopCache] = []
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic)


class _UnknownDependencyError(Exception):
    """Raised if it is not known what a loop depends on."""


def cache_on_disk(loop: Any) -> Any:
    """Return the loop. From now on it is loaded from the disk if it is there, and stored there once it was compiled."""
    if not isinstance(loop, Dispatcher):  # NUMBA_DISABLE_JIT, for debuggers: nothing is compiled
        return loop
    cache = LoopCache(loop)
    loop._cache = cache  # type: ignore[attr-defined]
    _CACHES.append(cache)
    if not cache.is_writable and not cache.has_files():
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


def named_folder() -> str:
    """Return the folder that NUMBA_CACHE_DIR names; empty if it names none."""
    return str(config.CACHE_DIR)  # type: ignore[attr-defined]


def folders_of_new_loops() -> list[Path]:
    """Return the folders where loops are stored that this process compiles; empty if none can be written."""
    return sorted({cache.folder for cache in _CACHES if cache.is_writable})


class CompiledLoops(event.Listener):
    """Counts the loops of this package that are compiled. Loops that are loaded from the disk are not counted.

    Examples:
        >>> loops = CompiledLoops()
        >>> with event.install_listener("numba:compile", loops):
        ...     pass
        >>> loops.count
        0
    """

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: event.Event) -> None:
        """Do nothing."""

    def on_end(self, event: event.Event) -> None:
        """Count one loop, if it belongs to this package."""
        if event.data["dispatcher"].py_func.__module__.startswith("fewshot_callbacks."):
            self.count += 1


def _folders_of(file: str) -> list[Path]:
    """Return where numba may keep the loops of a Python file, in its order: NUMBA_CACHE_DIR, beside the file, the user's."""
    name = _CacheLocator.get_suitable_cache_subpath(file)
    folders = [Path(file).parent / "__pycache__", Path(AppDirs(appname="numba", appauthor=False).user_cache_dir) / name]
    if named_folder():
        folders.insert(0, Path(named_folder()) / name)
    return folders


class _ReadOnlyLocator(_CacheLocator):
    """The first of the folders of a Python file, for a process that can write none of them."""

    def __init__(self, file: str) -> None:
        self._file = file

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _ReadOnlyLocator:
        """Return the locator of a function. Numba asks for it if all its own locators found no folder."""
        return cls(py_file)

    def ensure_cache_path(self) -> None:
        """Accept a folder that cannot be written."""

    def get_cache_path(self) -> str:
        """Return the folder that is named in a message."""
        return str(_folders_of(self._file)[0])

    def get_source_stamp(self) -> str:
        """Return nothing: the names of files depend on the code."""
        return ""

    def get_disambiguator(self) -> str:
        """Return nothing: the names of files depend on the code."""
        return ""


class _LoopFiles(CompileResultCacheImpl):
    """Numba's way to store and load a loop, which may also be in a folder that cannot be written."""

    _locator_classes: list[Any] = [*CompileResultCacheImpl._locator_classes, _ReadOnlyLocator]  # noqa: RUF012 - as numba has it


class LoopCache(FunctionCache):
    """The cache that numba asks for a compiled loop: a file for each combination of types.

    New loops are stored in the first folder that can be written. Loops are also loaded from the folders before it, which
    another user may have filled, as in an image of a container.

    Args:
        loop: A function that numba compiles.
    """

    _impl_class = _LoopFiles

    def __init__(self, loop: Any) -> None:
        super().__init__(loop.py_func)
        self._loop = loop
        self.folder = Path(self.cache_path)
        self.is_writable = not isinstance(self._impl.locator, _ReadOnlyLocator)
        folders = _folders_of(inspect.getfile(loop.py_func))
        # Numba writes to the first that it can, so those before it may be another user's.
        self._other_folders = list(takewhile(lambda folder: folder != self.folder, folders))
        if not self.is_writable:
            self._other_folders = folders[1:]
        name = f"{loop.py_func.__module__}.{loop.py_func.__qualname__}".replace("<", "").replace(">", "")
        self._name = name
        # With all loops that one function makes, of any version: without the hash of `name_by_content`.
        common_name = re.sub("_[0-9a-f]{16}$", "", name)
        self._file_name = re.compile(rf"{re.escape(common_name)}(_[0-9a-f]{{16}})?\.[0-9a-f]{{32}}\.nbc(\.[0-9a-f]+)?")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the loop for some types; None if there is no file, or a damaged one."""
        target_context.refresh()
        file = self._file(sig, target_context.codegen())
        if file is None:
            return None
        files = [file, *(folder / file.name for folder in self._other_folders)]
        loops = (self._load(file, target_context) for file in files)
        return next((loop for loop in loops if loop is not None), None)

    def _load(self, file: Path, target_context: Any) -> Any:
        """Return the loop in a file; None if there is no file, or a damaged one."""
        try:
            content = file.read_bytes()
            mark = content[: len(_MARK)]
            digest = content[len(_MARK) :][:_DIGEST_BYTES]
            loop = content[len(_MARK) + _DIGEST_BYTES :]
            if mark != _MARK or hashlib.sha256(loop).digest() != digest:
                raise InputError("it was cut or changed")
            loaded = self._impl.rebuild(target_context, pickle.loads(loop))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except Exception as error:  # unpickling and LLVM promise no class of error
            say_once(f"A compiled loop in {file.parent} cannot be loaded ({error}): it is compiled anew.")
            return None
        # The time of a file tells which loops are in use. Another user may own the file.
        with suppress(OSError):
            os.utime(file)
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a loop that was compiled; if the disk cannot be written, a line says so."""
        file = self._file(sig, data.codegen)
        if file is None or not self._impl.check_cachable(data):
            return
        loop = dumps(self._impl.reduce(data))
        new = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with new.open("xb") as opened:
                opened.write(_MARK + hashlib.sha256(loop).digest() + loop)
            new.replace(file)
            self._remove_oldest()
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            if not (isinstance(error, PermissionError) and file.exists()):  # on Windows another process reads it
                say_once(
                    f"Compiled loops cannot be kept in {self.folder} ({error.strerror or error}): later runs compile them "
                    "anew. Make room, or name another folder in NUMBA_CACHE_DIR."
                )

    def has_files(self) -> bool:
        """Return whether a folder has loops, those of this function or of others that are defined beside it."""
        return any(any(folder.glob("*.nbc")) for folder in [self.folder, *self._other_folders])

    def flush(self) -> None:
        """Remove all files of this function."""
        for file, _ in self._files_by_use():
            file.unlink(missing_ok=True)

    def _file(self, sig: Any, codegen: Any) -> Path | None:
        """Return the file of a loop; None if it is not known what the loop depends on, so that it must not be stored."""
        try:
            code = "\n".join(describe_loop(self._loop))
        except _UnknownDependencyError:
            return None
        arguments, result = sigutils.normalize_signature(sig)
        types_of_loop = [_describe_type(kind) for kind in (*arguments, result)]
        compiler = (sys.version_info, numba.__version__, np.__version__, codegen.magic_tuple())
        key = hashlib.sha256(f"{compiler}\n{types_of_loop}\n{code}".encode()).hexdigest()[:32]
        return self.folder / f"{self._name}.{key}.nbc"

    def _files_by_use(self) -> list[tuple[Path, float]]:
        """Return the files of this function and the times of their last use, the latest first; no files of others."""
        files = []
        for file in self.folder.glob("*.nbc*"):
            if self._file_name.fullmatch(file.name):
                with suppress(OSError), file.open("rb") as opened:
                    if opened.read(len(_MARK)) in (_MARK, b""):
                        files.append((file, os.fstat(opened.fileno()).st_mtime))
        return sorted(files, key=lambda file_and_time: -file_and_time[1])

    def _remove_oldest(self) -> None:
        """Remove the files beyond the largest number, and old files that killed processes have left incomplete."""
        files = self._files_by_use()
        complete = [file for file, _ in files if file.suffix == ".nbc"]
        oldest = time.time() - _UNFINISHED_SECONDS
        incomplete = [file for file, last_use in files if file.suffix != ".nbc" and last_use < oldest]
        for file in [*complete[_MOST_FILES:], *incomplete]:
            file.unlink(missing_ok=True)


def describe_loop(loop: Any) -> Iterator[str]:
    """Yield a description of what a loop is compiled from: its code and its constants, and those of all that it calls.

    Two loops of one description compute the same. Line numbers and comments are not part of it. Sums that the compiler may
    reorder can differ in their last digits: LLVM may fuse a product and a sum or not, as other loops were compiled before.

    Raises:
        _UnknownDependencyError: If the code refers to a value that is no number, word, module or function.
    """
    # identity of a function -> its number: a function that calls itself is described once
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
            yield f"options {_describe_options(callee.targetoptions)}"
        yield from _describe_code(function.__code__)
        yield f"defaults {_describe_constant(function.__defaults__)}"
        for name, value in _references(function):
            if isinstance(value, Dispatcher | types.FunctionType):
                yield f"{name} is a function"
                waiting.append(value)
            else:
                yield f"{name} = {_describe_value(value)}"


def _describe_code(code: types.CodeType) -> Iterator[str]:
    """Yield a description of the bytecode of a function, without its place in a file."""
    yield f"{code.co_name} {code.co_argcount} {code.co_kwonlyargcount} {code.co_flags} {code.co_code.hex()}"
    yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    yield getattr(code, "co_exceptiontable", b"").hex()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _describe_code(constant)
        else:
            yield _describe_constant(constant)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in the code of a function and of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of everything that a function refers to outside of itself.

    One name may be that of a global and that of an attribute. Then too much is described, which does no harm.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents
    names = list(dict.fromkeys(_names_in(function.__code__)))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if not _is_module_of_package(value, function):
            continue
        # A module of the package changes without a version: so the values that the function takes from it are described.
        attributes = {attribute: vars(value)[attribute] for attribute in names if attribute in vars(value)}
        if any(_is_module_of_package(attribute, function) for attribute in attributes.values()):
            raise _UnknownDependencyError(f"a module in {name}")
        for attribute, attribute_value in attributes.items():
            yield f"{name}.{attribute}", attribute_value


def _is_module_of_package(value: Any, function: types.FunctionType) -> bool:
    """Return whether a value is a module of the package of a function."""
    if not isinstance(value, types.ModuleType):
        return False
    return value.__name__.partition(".")[0] == function.__module__.partition(".")[0]


def _describe_value(value: Any) -> str:
    """Return a description of a value that a loop refers to.

    Raises:
        _UnknownDependencyError: If nothing says whether two such values are the same.
    """
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__} {getattr(value, '__version__', '')}"
    if isinstance(value, types.BuiltinFunctionType | type | np.ufunc):
        # The fields of a named tuple: numba compiles their positions, and not their names.
        return f"{getattr(value, '__module__', '')}.{value.__name__} {getattr(value, '_fields', ())}"
    return _describe_constant(value)


def _describe_constant(value: Any) -> str:
    """Return a description of a number, a word or an array, or of a tuple or a set of these."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe_constant, value))})"
    if isinstance(value, frozenset):
        return f"set of {sorted(map(_describe_constant, value))}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array {value.dtype.str} {value.shape} {np.ascontiguousarray(value).tobytes().hex()}"
    if not isinstance(value, _CONSTANTS):
        raise _UnknownDependencyError(type(value).__name__)
    return f"{type(value).__name__} {value!r}"


def _describe_options(options: dict[str, Any]) -> str:
    """Return a description of how a function is compiled. A set is sorted, since it has no order of its own."""
    return repr([(name, sorted(value) if isinstance(value, set) else value) for name, value in sorted(options.items())])


def _describe_type(kind: Any) -> str:
    """Return a description of a type of numba. The name of a named tuple does not tell its fields, so they are added."""
    members = list(getattr(kind, "types", ()))
    dtype = getattr(kind, "dtype", None)
    if dtype is not None:
        members.append(dtype)
    return f"{kind} {getattr(kind, 'fields', ())} [{', '.join(map(_describe_type, members))}]"
