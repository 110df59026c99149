"""Keeps compiled loops on disk, so that a later process of the same code need not compile them.

Numba's own cache is not used. It takes a loop for unchanged if the file that defines it is, whatever the loop has compiled
in from other files. It numbers its files and writes the index before the data, so that two processes that compile at once
can load each other's loops. A file that was cut or damaged ends the run (numba #10656). The machine code of a function has a
number that depends on what its process compiled before, so that files of two processes may not belong together (#10128).
Two loops that one function makes can even have one name (#10486).

Here the name of a file is a hash of everything that its loop was compiled from:

- the source of each module that the loop can reach: its own, those of the loops that it can call, and so on,
- the numbers, words, arrays and named tuples among the globals of these modules,
- the options, default arguments and closures of their loops,
- the types of the arguments, the processor, and the versions of Python, NumPy and numba.

If any of that is not known, the loop is not kept, and each process compiles it: if the source cannot be read or is not what
Python runs, if numba could compile a value in that is none of the above, or if a number has changed in this process, since
nobody knows which loops were compiled before. What numba's `overload` and `intrinsic` register is not looked for.

The price: after a change of any line in a file of loops, even a comment, all loops of that file and of files that use them
are compiled anew. `CONTRIBUTING.md` says how long that takes.
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
from types import CodeType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core import config, event, sigutils, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError
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
# The modules of this process that define loops or are used by them, by the identity of their globals.
_MODULES: dict[int, _Module] = {}
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)
# These globals say where a module is, and no more.
_PLACES = ("__file__", "__cached__", "__path__")


class _UnknownDependencyError(Exception):
    """Raised if it is not known what a loop depends on."""


def cache_on_disk(loop: Any) -> Any:
    """Return the loop. From now on it is loaded from the disk if it is there, and stored there once it was compiled.

    Call it where the loop is defined, while Python imports the module.
    """
    if not isinstance(loop, Dispatcher):  # NUMBA_DISABLE_JIT, for debuggers: nothing is compiled
        return loop
    _module_with(loop.py_func.__globals__).note_code()
    cache = LoopCache(loop)
    loop._cache = cache  # type: ignore[attr-defined]
    _CACHES.append(cache)
    if "<locals>" in loop.py_func.__qualname__:
        _name_by_content(loop)
    with suppress(_UnknownDependencyError):
        cache.definition = _describe_definition(loop, [])
    if not cache.is_writable and not cache.has_files():
        warnings.warn(
            "numba finds no folder in which it can keep the compiled loops of fewshot_callbacks: each process compiles "
            "them anew, in about twenty seconds. Name a folder that can be written in NUMBA_CACHE_DIR.",
            stacklevel=1,  # one place for all loops, so that it is shown once
        )
    return loop


def _name_by_content(loop: Any) -> None:
    """Give a loop that is made inside a function a name that no other loop has.

    Machine code has names: that of the function, the types, and the number of the function in its process. Loops that one
    function makes share a name. If two processes compile one of them each, both may have the same number; and a process
    that loads both from the disk calls one for the other. So a hash of what tells the loop from its siblings ends its name.
    """
    try:
        content = _describe_definition(loop, [])
    except _UnknownDependencyError:  # it is not kept, but a name may still be in use
        content = secrets.token_hex(16)
    loop.py_func.__qualname__ += f"_{hashlib.sha256(content.encode()).hexdigest()[:16]}"


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

    @property
    def line(self) -> int:
        """The line of the file in which the function begins."""
        return int(self._lineno)


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
        # what tells the loop from others, as it was when the loop was defined
        self.definition = ""
        self.folder = Path(self.cache_path)
        self.is_writable = not isinstance(self._impl.locator, _ReadOnlyLocator)
        folders = _folders_of(inspect.getfile(loop.py_func))
        # Numba writes to the first that it can, so those before it may be another user's.
        self._other_folders = list(takewhile(lambda folder: folder != self.folder, folders))
        if not self.is_writable:
            self._other_folders = folders[1:]
        # one name for all loops that one function makes
        self._name = f"{loop.py_func.__module__}.{loop.py_func.__qualname__}".replace("<", "").replace(">", "")
        self._file_name = re.compile(rf"{re.escape(self._name)}\.[0-9a-f]{{32}}\.nbc(\.[0-9a-f]+)?")

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

    @property
    def line(self) -> int:
        """The line of the file in which the loop begins."""
        return int(self._impl.line)

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
            code = describe_loop(self._loop)
            arguments, result = sigutils.normalize_signature(sig)
            types_of_loop = [_describe_type(kind) for kind in (*arguments, result)]
        except _UnknownDependencyError:
            return None
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


def describe_loop(loop: Any) -> str:
    """Return what a loop is compiled from: the loops and the modules that it can reach.

    Sums that the compiler may reorder can differ in their last digits between two loops of one description: LLVM may fuse a
    product and a sum or not, as other loops were compiled before.

    Raises:
        _UnknownDependencyError: If it is not known what the loop depends on.
    """
    package = loop.py_func.__module__.partition(".")[0]
    descriptions: dict[int, str] = {}
    waiting = [loop]
    while waiting:
        reached = waiting.pop()
        if id(reached) in descriptions:
            continue
        if isinstance(reached, Dispatcher):
            description = _describe_definition(reached, waiting)
            if description != reached._cache.definition:  # type: ignore[attr-defined]
                raise _UnknownDependencyError(f"the closure of {_name_of(reached)} has changed")
            waiting.append(_module_with(reached.py_func.__globals__))
        elif isinstance(reached, _Module):
            description = reached.describe(waiting)
        elif reached.__name__.partition(".")[0] == package:
            description = f"module {reached.__name__}"
            waiting.append(_module_with(vars(reached)))
        else:  # another version of a library may have other numbers
            description = f"{reached.__name__} {getattr(reached, '__version__', '')}"
        descriptions[id(reached)] = description
    return "\n".join(descriptions.values())


class _Module:
    """A module of this process: what its loops can be compiled from.

    Args:
        names: The globals of the module.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._defines_loops = False
        # the code that Python ran when it imported the module
        self._code: CodeType | None = None
        # the globals when they were described last, their description, and the loops and modules among them
        self._described: dict[str, Any] = {}
        self._description = ""
        self._reached: list[Any] = []
        self._has_changed = False

    def note_code(self) -> None:
        """Note the code of a module that defines a loop: what Python runs as it imports the module."""
        self._defines_loops = True
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_globals is self._names and frame.f_locals is self._names:
                self._has_changed |= self._code is not None and self._code is not frame.f_code  # it is imported again
                self._code = frame.f_code
            frame = frame.f_back

    def describe(self, reached: list[Any]) -> str:
        """Return a description of the source and the globals, and append the loops and modules among the globals.

        Raises:
            _UnknownDependencyError: If the source is not known, or the globals have changed since the first description.
        """
        if not self._is_described():
            loops_and_modules: list[Any] = []
            values = {name: value for name, value in self._names.items() if name not in _PLACES}
            description = f"{self._source()}\n{_describe_values(values, loops_and_modules)}"
            self._has_changed |= self._description not in ("", description)
            self._described = dict(self._names)
            self._description = description
            self._reached = loops_and_modules
        if self._has_changed:
            raise _UnknownDependencyError(f"{self._names['__name__']} has changed")
        reached += self._reached
        return self._description

    def _is_described(self) -> bool:
        """Return whether each global is the same object as when the globals were described last."""
        return self._described.keys() == self._names.keys() and all(
            self._names[name] is value for name, value in self._described.items()
        )

    def _source(self) -> str:
        """Return a hash of the source; empty for a module that defines no loops.

        Raises:
            _UnknownDependencyError: If the source cannot be read, or Python runs something else: the file was replaced
                after Python had read it, or Python took an old .pyc for it.
        """
        if not self._defines_loops:
            return ""
        try:
            source = Path(self._names["__file__"]).read_bytes()
            loader = self._names["__spec__"].loader
            code = loader.source_to_code(source, self._names["__file__"])
        except Exception as error:  # loaders promise no class of error, and some have no such method
            raise _UnknownDependencyError(f"{self._names['__name__']} has no source") from error
        if code != self._code:
            raise _UnknownDependencyError(f"{self._names['__file__']} is not what Python runs")
        # A loader may add to the code what is not in the source.
        return f"{type(loader).__qualname__} {hashlib.sha256(source).hexdigest()}"


def _module_with(names: dict[str, Any]) -> _Module:
    """Return the module that has these globals."""
    return _MODULES.setdefault(id(names), _Module(names))


def _describe_definition(loop: Any, reached: list[Any]) -> str:
    """Return what tells a loop from all others of this code, and append the loops and modules in its closure.

    Raises:
        _UnknownDependencyError: If it is not known what the loop depends on.
    """
    # A set is sorted, since it has no order of its own.
    options = [(name, sorted(value) if isinstance(value, set) else value) for name, value in loop.targetoptions.items()]
    try:
        closure = inspect.getclosurevars(loop.py_func).nonlocals
    except ValueError as error:  # a name of the closure has no value yet
        raise _UnknownDependencyError(f"the closure of {_name_of(loop)}") from error
    values = _describe_values({**closure, "default arguments": loop.py_func.__defaults__}, reached)
    return f"{_name_of(loop)} {sorted(options)}\n{values}"


def _name_of(loop: Any) -> str:
    """Return the module, the name and the line of a loop.

    Raises:
        _UnknownDependencyError: If it was made by `exec`, or without `cache_on_disk`, so that its source is not known.
    """
    name = f"{loop.py_func.__module__}.{loop.py_func.__qualname__}"
    is_in_file = inspect.getfile(loop.py_func) == loop.py_func.__globals__.get("__file__")
    if not (isinstance(loop._cache, LoopCache) and is_in_file):
        raise _UnknownDependencyError(name)
    return f"{name}, line {loop._cache.line}"


def _describe_values(values: dict[str, Any], reached: list[Any]) -> str:
    """Return a description of values by their names, and append the loops and modules among them.

    Raises:
        _UnknownDependencyError: If numba could compile in a value that may differ in the next process.
    """
    descriptions = [(name, _describe_value(value, reached)) for name, value in sorted(values.items())]
    return "\n".join(f"{name} = {description}" for name, description in descriptions if description)


def _describe_value(value: Any, reached: list[Any]) -> str:
    """Return a description of a value, and append the loops and modules in it; empty if numba compiles it into no loop."""
    kind = type(value)
    if isinstance(value, Dispatcher | ModuleType):
        reached.append(value)
        return _name_of(value) if isinstance(value, Dispatcher) else f"module {value.__name__}"
    if isinstance(value, _CONSTANTS):
        return f"{kind.__qualname__} {value!r}"
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
        return f"{value.__module__}.{value.__qualname__} {value._fields}"
    if isinstance(value, tuple):
        members = [_describe_value(member, reached) for member in value]
        return f"{kind.__qualname__} {getattr(value, '_fields', '')} ({', '.join(members)})" if all(members) else ""
    if isinstance(value, np.ndarray) and value.size == 0:  # others can change in place
        return f"array {value.dtype.str} {value.shape}"
    try:
        numba.typeof(value)
    except (ValueError, NumbaError):
        return ""
    raise _UnknownDependencyError(f"{value!r}")


def _describe_type(kind: Any) -> str:
    """Return a description of a type of numba. The name of a named tuple does not tell its fields, so they are added.

    Raises:
        _UnknownDependencyError: If it is the type of a function or of a compiled class: nothing says what that computes.
    """
    if isinstance(kind, types.Dispatcher | types.FunctionType | types.ClassInstanceType):
        raise _UnknownDependencyError(str(kind))
    members = list(getattr(kind, "types", ()))
    if (dtype := getattr(kind, "dtype", None)) is not None:
        members.append(dtype)
    return f"{kind} {getattr(kind, 'fields', ())} [{', '.join(map(_describe_type, members))}]"
