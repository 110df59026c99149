"""Runs the command that the first word of the command line names, importing no other; reports mistakes in one line."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from traceback import walk_tb
from typing import Any, TextIO

from fewshot_callbacks import __version__
from fewshot_callbacks.cli.fit_help import help_of_training
from fewshot_callbacks.cli.mistakes import MistypedError, reason, similar
from fewshot_callbacks.cli.options import OPTIONS, in_shell
from fewshot_callbacks.system.extras import required_extra
from fewshot_callbacks.system.terminal import printable

COMMANDS = {
    "demo": "train both heads and soft AP on the glyphs, and compare them",
    "compare": "compare two runs of fit: results on the test set, and how their steps moved the embeddings",
    "evaluate": "retrieval metrics of embeddings stored in an .npz file",
    "report": "the same with failures, suspects, near duplicates and images, as one HTML file",
    "trials": "verification of pairs that someone listed, such as those of LFW and VoxCeleb",
    "plan": "compute what an evaluation will cost, before it is started",
    "fit": "train a network, prototypical or any other, from a configuration file",
    "validate": "evaluate a checkpoint of fit on the validation classes",
    "test": "evaluate a checkpoint of fit on the test classes",
}
# Commands whose result is in files, so that they can run without an output.
WRITE_FILES = {"demo", "report", "fit"}
# The packages whose versions a bug report should name.
COMPUTES_WITH = ("torch", "torchvision", "lightning", "torchmetrics", "numpy", "numba", "jsonargparse")
# The environment variable that brings back the traceback of an error.
DEBUG = "FEWSHOT_DEBUG"
# The exit statuses of a shell for a command that a signal has ended: 128 plus SIGINT, SIGPIPE and SIGTERM.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143


class Terminated(KeyboardInterrupt):
    """Lightning has ended a run, cleanly, because the process received SIGTERM."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the first word; each command parses the other words itself."""
    first = argparse.ArgumentParser(
        prog="fewshot",
        description="Train few-shot embeddings and evaluate them exactly.",
        epilog=f"'fewshot COMMAND --help' describes each command. With {DEBUG}=1 an error shows its traceback.",
    )
    help_ = "show the versions that a bug report should include, and exit"
    first.add_argument("--version", action="store_true", help=help_)
    commands = first.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        # `--help` after a command is for its own parser.
        commands.add_parser(name, help=text, add_help=False)
    return first


def _versions() -> str:
    """Return the versions of this package and of the packages that it uses."""
    import platform  # noqa: PLC0415 - not needed otherwise
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    others = []
    for package in COMPUTES_WITH:
        try:
            others.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            others.append(f"{package} not installed")
    system = f"Python {platform.python_version()}, {platform.platform()}"
    return "\n".join((f"fewshot_callbacks {__version__}", system, ", ".join(others)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `fewshot`; by default those of the process.

    Returns:
        The exit status: 0 if all went well, 1 for bad input, with a message of one line, 130 if it was interrupted, 141 if
        the reader of the output has gone, 143 if SIGTERM ended a training. A command line that cannot be understood exits
        with 2, as argparse does.
    """
    if arguments is None:
        arguments, warnings.formatwarning = sys.argv[1:], _words_alone
    words = list(arguments)
    command = f"fewshot {words[0]}" if words[:1] and words[0] in COMMANDS else "fewshot"
    if sys.stderr is None:  # it is closed, and `print` would write to the standard output
        sys.stderr = _nowhere()
    if sys.stdout is None:
        if not set(words[:1]) & WRITE_FILES:
            fix = "Leave it open, or write > /dev/null."
            print(f"{command}: the standard output is closed, and the result would be lost. {fix}", file=sys.stderr)
            return 1
        sys.stdout = _nowhere()
    try:
        status = _run(words)
    except BrokenPipeError:  # such as `fewshot evaluate a.npz | head -1`
        _give_up_output()
        return BROKEN_PIPE
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_output()
        return BROKEN_PIPE
    except OSError as error:  # such as that of a full disk
        _give_up_output()
        print(f"{command}: the standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    return status


def _nowhere() -> TextIO:
    """Return a stream that discards what is written, until the process ends."""
    return open(os.devnull, "w", encoding="utf-8")


def _give_up_output() -> None:
    """Discard the rest of the standard output, which Python would write at its end."""
    # A standard output that is no file raises an error.
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words:
        parser().print_help()
        return 2
    command = words[0]
    if command == "--version":
        print(_versions())
        return 0
    if not command.startswith("-") and command not in COMMANDS:
        hint = similar(command, COMMANDS) or f" There are {', '.join(COMMANDS)}."
        print(f"fewshot: there is no command {command}.{hint}", file=sys.stderr)
        return 2
    parser().parse_args(words[:1])
    return _run_command(command, words)


def _run_command(command: str, words: list[str]) -> int:
    if command not in OPTIONS and {"-h", "--help"} & set(words):
        print(help_of_training(command), end="")
        return 0
    try:
        with required_extra(
            "cli" if command in ("compare", "evaluate", "plan", "trials") else "all", f"fewshot {command}"
        ):
            options = _options(command, words)
            module = import_module(f"fewshot_callbacks.cli.{command if command in OPTIONS else 'fit'}")
        with _modules_of_working_folder():
            module.run(options)
        return 0
    except MistypedError as mistake:
        print(f"fewshot {command}: {printable(mistake)} 'fewshot {command} --help' lists the options.", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # an OSError, which would be reported as bad input below
        raise
    except KeyboardInterrupt as stop:
        word, status = ("Terminated", TERMINATED) if isinstance(stop, Terminated) else ("Interrupted", INTERRUPTED)
        print(f"\n{word}. {printable(stop)}".rstrip(), file=sys.stderr)
        return status
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get(DEBUG):
            raise
        text = in_shell(one_line(error), command)
        print(f"fewshot {command}: {printable(text)}", file=sys.stderr)
        return 1


@contextmanager
def _modules_of_working_folder() -> Iterator[None]:
    """Let import paths name modules of the working folder, as they do under `python -m`. Installed ones come first."""
    sys.path.append(os.curdir)
    try:
        yield
    finally:
        sys.path.remove(os.curdir)


def _options(command: str, words: list[str]) -> Any:
    """Return the options of a command by name; of a training its words, which Lightning's command line reads."""
    if command not in OPTIONS:
        return ["--help" if word == "--help=full" else word for word in words]
    from fewshot_callbacks.cli.parsing import parse  # noqa: PLC0415 - `fewshot --help` needs no jsonargparse

    return parse(command, words[1:])


USUAL = warnings.formatwarning


def _words_alone(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning without file and line, which say nothing to users of a command; warnings for developers keep them."""
    if category is UserWarning:
        return f"Warning: {message}\n"
    return USUAL(message, category, filename, lineno, line)


def one_line(error: Exception) -> str:
    """Return an error in one line; if another package raised it, with how to get its traceback."""
    text = str(error)
    if "Original Traceback" in text:  # a worker of a DataLoader failed: the last line is the type and text of its error
        text = text.strip().splitlines()[-1].partition(": ")[2]
    elif _raised_in("jsonargparse", error):  # where a class refuses its arguments
        text = reason(error)
    elif not _raised_in("fewshot_callbacks", error):
        text = f"{text.rstrip('.')} ({type(error).__name__}; {DEBUG}=1 shows where)."
    return " ".join(text.split())


def _raised_in(package: str, error: Exception) -> bool:
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(package)
