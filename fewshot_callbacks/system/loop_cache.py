"""A cache of compiled loops on disk, so that a later process with the same code does not compile them again.

Numba's own cache is not used. It considers a loop unchanged if the file that defines the loop is unchanged, even if the loop
includes code from other files that have changed. It numbers its files and writes the index before the data, so that two
processes that compile at once can load each other's loops. A truncated or damaged file ends the run (numba #10656). The
machine code of a function has a number that depends on what its process compiled before, so files of two processes may not
match (#10128). Two loops that one function makes can even have the same name (#10486). This cache uses numba to find the
folders, and to convert machine code to bytes and back.

The name of a file is a hash of all that its loop was compiled from:

- the source of each module whose loops it can reach: its own module, the modules of the loops among its globals, and so
  on,
- the numbers and strings among the globals of these modules,
- the closures and default arguments of their loops,
- the types of the arguments, the options, the processor, and the versions of Python, NumPy and numba.

The files are trusted as numba trusts its own files: whoever can write to these folders can run code as the user who loads
them. A hash of the content detects damage, but not attacks.

A loop is not stored, and each process compiles it, if a source cannot be read, if a file was changed after the process had
begun to import the package, or if a number has changed since it was first described.

The price is that after a change of any line in a file with loops, even a comment, all loops of that file and of files that
use them are compiled again. `CONTRIBUTING.md` states how long this takes.
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
import warnings
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
from numba.core import config, event, sigutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.system import import_time
from fewshot_callbacks.system.compile_notice import say_once

# The first bytes of every file that is written here.
_MARK = b"fewshot_callbacks compiled loop 1\n"
# Largest number of files of a function, for several types, processors and versions of the code. When more files are written,
# the files that were unused for the longest time are removed.
_MOST_FILES = 48
# Seconds after which an incomplete file is removed, since a killed process has left it.
_UNFINISHED_SECONDS = 86400.0

_DIGEST_BYTES = 32
_CACHES: list[LoopCache] = []
# Module -> hash of its source when its last loop was defined; empty if the code that Python runs is unknown.
_SOURCES: dict[str, str] = {}
# Module -> its first description.
_DESCRIPTIONS: dict[str, str] = {}
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)


class _UnknownDependencyError(Exception):
    """Raised if the dependencies of a loop are unknown."""


def cache_on_disk(loop: Any) -> Any:
    """Return the loop with a cache: it is loaded from the disk if it is stored there, or stored once it is compiled.

    Call this function where the loop is defined, while Python imports the module.
    """
    if not isinstance(loop, Dispatcher):  # NUMBA_DISABLE_JIT, for debuggers: nothing is compiled
        return loop
    _SOURCES[loop.py_func.__module__] = _hash_of_source(loop.py_func)
    cache = LoopCache(loop)
    loop._cache = cache  # type: ignore[attr-defined]
    _CACHES.append(cache)
    if "<locals>" in loop.py_func.__qualname__:
        _name_by_content(loop)
    if not cache.is_writable and not cache.has_files():
        warnings.warn(
            "numba finds no writable folder for the compiled kernels of fewshot_callbacks, so every process compiles them "
            "again, which takes about twenty seconds. Set NUMBA_CACHE_DIR to a writable folder.",
            stacklevel=1,  # one place for all loops, so that it is shown once
        )
    return loop


def _hash_of_source(function: Any) -> str:
    """Return a hash of the source file of a function; empty if it is unreadable or Python may run an older version."""
    try:
        file = Path(inspect.getfile(function))
        state = file.stat()
        source = file.read_bytes()
    except (OSError, TypeError):
        return ""
    if max(state.st_mtime, state.st_ctime) >= import_time.STARTED:
        say_once(
            f"{file.name} is newer than this process, so its compiled kernels are not cached. If you have not changed it, "
            "the clock of the file system is ahead."
        )
        return ""
    return hashlib.sha256(source).hexdigest()


def _name_by_content(loop: Any) -> None:
    """Give a loop that is made inside a function a unique name.

    Machine code is named by the function, the types, and the number of the function in its process. Loops that one
    function makes share a name. If two processes each compile one of these loops, both may have the same number, and a
    process that loads both from the disk confuses them. So the name ends in a hash of the loop's definition.
    """
    try:
        content = _describe_definition(loop)
    except _UnknownDependencyError:  # the loop is not stored, but a name may still be in use
        content = secrets.token_hex(16)
    loop.py_func.__qualname__ += f"_{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def named_folder() -> str:
    """Return the folder that NUMBA_CACHE_DIR names; empty if it is not set."""
    return str(config.CACHE_DIR)  # type: ignore[attr-defined]


def folders_of_new_loops() -> list[Path]:
    """Return the folders in which this process stores the loops that it compiles; empty if no folder is writable."""
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
    """Return the folders that numba tries for a Python file: NUMBA_CACHE_DIR, next to the file, the user's cache."""
    name = _CacheLocator.get_suitable_cache_subpath(file)
    folders = [Path(file).parent / "__pycache__", Path(AppDirs(appname="numba", appauthor=False).user_cache_dir) / name]
    if named_folder():
        folders.insert(0, Path(named_folder()) / name)
    return folders


class _ReadOnlyLocator(_CacheLocator):
    """The first folder of a Python file, for a process that cannot write to any of its folders."""

    def __init__(self, file: str) -> None:
        self._file = file

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _ReadOnlyLocator:
        """Return the locator of a function. Numba uses it if its own locators found no folder."""
        return cls(py_file)

    def ensure_cache_path(self) -> None:
        """Accept a folder that is not writable."""

    def get_cache_path(self) -> str:
        """Return the folder for messages."""
        return str(_folders_of(self._file)[0])

    def get_source_stamp(self) -> str:
        """Return an empty text, since the names of files depend on the code."""
        return ""

    def get_disambiguator(self) -> str:
        """Return an empty text, since the names of files depend on the code."""
        return ""


class _LoopFiles(CompileResultCacheImpl):
    """Stores and loads a loop as numba does, but also loads from a read-only folder."""

    _locator_classes: list[Any] = [*CompileResultCacheImpl._locator_classes, _ReadOnlyLocator]  # noqa: RUF012 - as numba has it


class LoopCache(FunctionCache):
    """The cache that numba asks for a compiled loop: a file for each combination of types.

    New loops are stored in the first writable folder. Loops are also loaded from the folders before it, which another user
    may have filled, as in a container image.

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
        # Numba writes to the first writable folder, so earlier folders may belong to another user.
        self._other_folders = list(takewhile(lambda folder: folder != self.folder, folders))
        if not self.is_writable:
            self._other_folders = folders[1:]
        # one name for all loops that one function makes
        self._name = f"{loop.py_func.__module__}.{loop.py_func.__qualname__}".replace("<", "").replace(">", "")
        self._file_name = re.compile(rf"{re.escape(self._name)}\.[0-9a-f]{{32}}\.nbc(\.[0-9a-f]+)?")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the loop for these types; None if the file is missing or damaged."""
        target_context.refresh()
        file = self._file(sig, target_context.codegen())
        if file is None:
            return None
        files = [file, *(folder / file.name for folder in self._other_folders)]
        loops = (self._load(file, target_context) for file in files)
        return next((loop for loop in loops if loop is not None), None)

    def _load(self, file: Path, target_context: Any) -> Any:
        """Return the loop in a file; None if the file is missing or damaged."""
        try:
            content = file.read_bytes()
            mark = content[: len(_MARK)]
            digest = content[len(_MARK) :][:_DIGEST_BYTES]
            loop = content[len(_MARK) + _DIGEST_BYTES :]
            if mark != _MARK or hashlib.sha256(loop).digest() != digest:
                raise InputError("it was truncated or changed")
            loaded = self._impl.rebuild(target_context, pickle.loads(loop))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except Exception as error:  # unpickling and LLVM document no error class
            say_once(f"A cached kernel in {file.parent} cannot be loaded ({error}), so it is compiled again.")
            return None
        # The time of a file shows which loops are in use. Another user may own the file.
        with suppress(OSError):
            os.utime(file)
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a compiled loop, or print a line if the disk is not writable."""
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
                    f"Compiled kernels cannot be cached in {self.folder} ({error.strerror or error}), so later runs compile "
                    "them again. Make room there, or set NUMBA_CACHE_DIR to another folder."
                )

    def has_files(self) -> bool:
        """Return whether a folder has loops of this function, or of other functions that use the same folder."""
        return any(any(folder.glob("*.nbc")) for folder in [self.folder, *self._other_folders])

    def flush(self) -> None:
        """Remove all files of this function."""
        for file, _ in self._files_by_use():
            file.unlink(missing_ok=True)

    def _file(self, sig: Any, codegen: Any) -> Path | None:
        """Return the file of a loop; None if its dependencies are unknown, so that it must not be stored."""
        try:
            code = describe_loop(self._loop)
            arguments, result = sigutils.normalize_signature(sig)
            types_of_loop = [_describe_type(kind) for kind in (*arguments, result)]
        except _UnknownDependencyError:
            return None
        compiler = (sys.version_info, numba.__version__, np.__version__, codegen.magic_tuple())
        key = hashlib.sha256(f"{compiler}\n{types_of_loop}\n{code}".encode()).hexdigest()[:32]
        return self.folder / f"{self._name}.{key}.nbc"

    def _files_by_use(self) -> list[tuple[Path, float]]:
        """Return the files of this function and the times of their last use, the latest first."""
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


def describe_loop(loop: Any) -> str:
    """Return a description of a loop and of the modules whose loops and numbers it can reach.

    Two loops with the same description can differ in the last digits of sums that the compiler may reorder: whether LLVM
    fuses a product and a sum depends on the loops that were compiled before.

    Raises:
        _UnknownDependencyError: If it is not known what the loop depends on.
    """
    package = loop.py_func.__module__.partition(".")[0]
    modules: set[str] = set()
    waiting = [loop.py_func.__module__]
    while waiting:
        name = waiting.pop()
        if name in modules:
            continue
        modules.add(name)
        if name not in sys.modules:
            raise _UnknownDependencyError(name)
        for value in vars(sys.modules[name]).values():
            if isinstance(value, Dispatcher):
                waiting.append(value.py_func.__module__)
            elif isinstance(value, ModuleType) and value.__name__.partition(".")[0] == package:
                waiting.append(value.__name__)
    descriptions = [_describe_module(name) for name in sorted(modules)]
    return "\n".join([_describe_definition(loop), *descriptions])


def _describe_module(name: str) -> str:
    """Return a description of a module: its source, its numbers, and the closures of its loops.

    Raises:
        _UnknownDependencyError: If the source is unknown, or has changed.
    """
    values = vars(sys.modules[name])
    loops = [value for value in values.values() if isinstance(value, Dispatcher)]
    has_own_loops = any(loop.py_func.__module__ == name for loop in loops)
    source = _SOURCES.get(name, "")
    if has_own_loops and not source:
        raise _UnknownDependencyError(f"the source of {name}")
    constants = {key: value for key, value in values.items() if not key.startswith("__") and _is_constant(value)}
    description = "\n".join([name, source, repr(sorted(constants.items())), *map(_describe_definition, loops)])
    if _DESCRIPTIONS.setdefault(name, description) != description:
        raise _UnknownDependencyError(f"{name} has changed")
    return description


def _describe_definition(loop: Any) -> str:
    """Return a description that is unique to a loop in its module: its name, options, closure and default arguments.

    Raises:
        _UnknownDependencyError: If the closure has a value that may differ in the next process.
    """
    function = loop.py_func
    try:
        closure = inspect.getclosurevars(function).nonlocals
    except ValueError as error:  # a name of the closure has no value yet
        raise _UnknownDependencyError(f"the closure of {function.__qualname__}") from error
    # A set is sorted, since it has no order.
    options = [(name, sorted(value) if isinstance(value, set) else value) for name, value in loop.targetoptions.items()]
    names_and_values = [*sorted(closure.items()), *(("default", value) for value in function.__defaults__ or ())]
    for name, value in names_and_values:
        if not isinstance(value, Dispatcher) and not _is_constant(value):
            raise _UnknownDependencyError(f"{name} of {function.__qualname__}")
    values = [(name, _name_of(value) if isinstance(value, Dispatcher) else value) for name, value in names_and_values]
    return f"{_name_of(loop)} {sorted(options)} {values}"


def _name_of(loop: Any) -> str:
    return f"{loop.py_func.__module__}.{loop.py_func.__qualname__}"


def _is_constant(value: Any) -> bool:
    """Return whether a value is a number or a string, or a tuple of such values."""
    if isinstance(value, tuple):
        return all(_is_constant(member) for member in value)
    return isinstance(value, _CONSTANTS)


def _describe_type(kind: Any) -> str:
    """Return a description of a numba type. The name of a named tuple lacks its fields, so they are added."""
    members = list(getattr(kind, "types", ()))
    if (dtype := getattr(kind, "dtype", None)) is not None:
        members.append(dtype)
    return f"{kind} {getattr(kind, 'fields', ())} [{', '.join(map(_describe_type, members))}]"
