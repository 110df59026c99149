"""Runs the command that the first word names, without importing other commands, and reports errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from traceback import walk_tb
from typing import Any, TextIO

from fewshot_callbacks import __version__
from fewshot_callbacks.cli.fit_help import help_of_training
from fewshot_callbacks.cli.mistakes import MistypedError, did_you_mean, reason
from fewshot_callbacks.cli.options import OPTIONS, in_shell
from fewshot_callbacks.cli.signals import BROKEN_PIPE, INTERRUPTED, TERMINATED, Terminated
from fewshot_callbacks.system.extras import required_extra
from fewshot_callbacks.system.terminal import printable

COMMANDS = {
    "demo": "train three networks on the built-in glyphs, and compare them",
    "compare": "compare two runs of fit, or saved reports query by query",
    "evaluate": "compute retrieval metrics of embeddings in .npz, .npy, .parquet, .arrow, .feather or .safetensors files",
    "nearest": "find the exact nearest neighbours of embeddings in files, and write them to a .parquet file",
    "report": "write metrics, failures, suspected wrong labels, near duplicates and images to one HTML file",
    "trials": "evaluate verification on a list of pairs, such as the lists of LFW and VoxCeleb",
    "search-quality": "compare an approximate index (faiss, usearch, a vector database) with exact search",
    "plan": "predict the memory and time of an evaluation before you start it",
    "warm": "compile and cache the kernels, for a container image, a cluster or CI",
    "fit": "train a prototypical network, or any other, from a configuration file",
    "validate": "evaluate a checkpoint of fit on the validation classes",
    "test": "evaluate a checkpoint of fit on the test classes",
}
# Commands that write their result to files, so that they can run with a closed standard output.
WRITE_FILES = {"demo", "nearest", "report", "fit"}
# Commands that need every optional package; the others need the extra `cli`.
NEED_ALL_EXTRAS = {"demo", "report", "fit", "validate", "test"}
REPORTED_PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "numpy", "numba", "jsonargparse")
# The environment variable that restores tracebacks.
DEBUG = "FEWSHOT_DEBUG"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the first word. Each command parses its own words."""
    first_word = argparse.ArgumentParser(
        prog="fewshot",
        description="Train embeddings, and evaluate them exactly.",
        epilog=f"Run 'fewshot COMMAND --help' for the options of a command. Set {DEBUG}=1 to see tracebacks of errors.",
    )
    help_ = "show the versions that a bug report should include, and exit"
    first_word.add_argument("--version", action="store_true", help=help_)
    commands = first_word.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        # The command's own parser reads a `--help` after it.
        commands.add_parser(name, help=text, add_help=False)
    return first_word


def _versions() -> str:
    """Return the versions of this package and of the packages that it uses."""
    import platform  # noqa: PLC0415 - not needed otherwise
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    packages = []
    for package in REPORTED_PACKAGES:
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            packages.append(f"{package} not installed")
    system = f"Python {platform.python_version()}, {platform.platform()}"
    return "\n".join((f"fewshot_callbacks {__version__}", system, ", ".join(packages)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `fewshot`; by default the words of the process.

    Returns:
        The exit status: 0 for success, 1 for bad input (with a one-line message), 3 if an evaluation fails a requirement,
        130 after an interrupt, 141 if the reader of the output has exited, 143 if SIGTERM ended a fit. An invalid command
        line exits with 2, as in argparse.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        # This process ends with the command, so nothing is restored.
        warnings.formatwarning = _format_warning
    words = list(arguments)
    program = "fewshot"
    if words and words[0] in COMMANDS:
        program = f"fewshot {words[0]}"
    if sys.stderr is None:  # closed: `print` would write to the standard output
        sys.stderr = _null_stream()
    if sys.stdout is None:
        if not words or words[0] not in WRITE_FILES:
            fix = "Leave it open, or add > /dev/null."
            print(f"{program}: the standard output is closed, so the result would be lost. {fix}", file=sys.stderr)
            return 1
        sys.stdout = _null_stream()
    try:
        status = _run(words)
        return _flush(program) or status
    except BrokenPipeError:  # such as `fewshot evaluate a.npz | head -1`
        _discard_output()
        return BROKEN_PIPE


def _flush(program: str) -> int:
    """Flush standard output; return 1 if it cannot be written, else 0."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # such as a full disk
        _discard_output()
        print(f"{program}: the standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


def _null_stream() -> TextIO:
    """Return a stream that discards what is written, until the process ends."""
    return open(os.devnull, "w", encoding="utf-8")


def _discard_output() -> None:
    """Discard the rest of the standard output, which Python would write on exit."""
    # A standard output that is not a file raises an error.
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    """Run a command line, and return the exit status."""
    if not words:
        parser().print_help()
        return 2
    command = words[0]
    if command == "--version":
        print(_versions())
        return 0
    if not command.startswith("-") and command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS) or f" The commands are {', '.join(COMMANDS)}."
        print(f"fewshot: unknown command {command}.{hint}", file=sys.stderr)
        return 2
    parser().parse_args(words[:1])
    return _run_command(command, words)


def _run_command(command: str, words: list[str]) -> int:
    """Run a command, report its errors in one line, and return the exit status."""
    if command not in OPTIONS and {"-h", "--help"} & set(words):
        print(help_of_training(command), end="")
        return 0
    try:
        with required_extra("all" if command in NEED_ALL_EXTRAS else "cli", f"fewshot {command}"):
            run, options = _load(command, words)
        with _modules_of_working_folder():
            return run(options) or 0
    except MistypedError as mistake:
        print(f"fewshot {command}: {printable(mistake)} 'fewshot {command} --help' lists the options.", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # an OSError, which would be reported as bad input below
        raise
    except Terminated as stop:
        print(f"\nTerminated. {printable(stop)}".rstrip(), file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt as stop:
        print(f"\nInterrupted. {printable(stop)}".rstrip(), file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get(DEBUG):
            raise
        text = in_shell(one_line(error), command)
        print(f"fewshot {command}: {printable(text)}", file=sys.stderr)
        return 1


@contextmanager
def _modules_of_working_folder() -> Iterator[None]:
    """Make modules of the working folder importable, as `python -m` does. Installed modules take precedence."""
    sys.path.append(os.curdir)
    try:
        yield
    finally:
        sys.path.remove(os.curdir)


def _load(command: str, words: list[str]) -> tuple[Callable[[Any], int | None], Any]:
    """Return a command's function and its argument: options, or words for Lightning's CLI."""
    if command not in OPTIONS:
        return import_module("fewshot_callbacks.cli.fit").run, words
    from fewshot_callbacks.cli.parsing import parse  # noqa: PLC0415 - `fewshot --help` needs no jsonargparse

    options = parse(command, words[1:])
    return import_module(f"fewshot_callbacks.cli.{command.replace('-', '_')}").run, options


# Python's own format, for warnings to developers.
PYTHON_FORMAT = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning without its file and line, unless it is meant for developers."""
    if category is UserWarning:
        return f"Warning: {message}\n"
    return PYTHON_FORMAT(message, category, filename, lineno, line)


def one_line(error: Exception) -> str:
    """Return an error in one line. If another package raised it, the line explains how to get the traceback."""
    text = str(error)
    if "Original Traceback" in text:  # a DataLoader worker failed; its error is in the last line
        text = text.strip().splitlines()[-1].partition(": ")[2]
    elif _raised_in("jsonargparse", error):  # a class refused its arguments
        text = reason(error)
    elif not _raised_in("fewshot_callbacks", error):
        text = f"{text.rstrip('.')} ({type(error).__name__}; {DEBUG}=1 shows where)."
    return " ".join(text.split())


def _raised_in(package: str, error: Exception) -> bool:
    """Return whether a package raised an error of any class."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(package)
