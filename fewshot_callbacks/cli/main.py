"""Hands each word of the command line to the part that knows it, and imports no other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "demo": "train both heads on the glyphs and compare them; two minutes on a laptop",
    "compare": "two runs of fit: their test sets, and how their steps moved the embeddings",
    "evaluate": "retrieval metrics of embeddings stored in an .npz file",
    "plan": "what an evaluation will cost, before it is started",
    "fit": "train a prototypical network from a configuration file",
    "validate": "validate one",
    "test": "test one",
}


def parser() -> argparse.ArgumentParser:
    """The parser of the first word; each command has one of its own for the others."""
    from fewshot_callbacks import __version__  # noqa: PLC0415 - asks the installed package

    first = argparse.ArgumentParser(
        prog="fewshot",
        description="Train few-shot embeddings and tell the truth about them.",
        epilog="'fewshot COMMAND --help' says more of each.",
    )
    first.add_argument("--version", action="version", version=f"fewshot_callbacks {__version__}")
    commands = first.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return first


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words behind `fewshot`; by default those of the process.

    Returns:
        The exit status: 0 if all went well, 1 for bad input, 130 if it was interrupted. A command line that cannot be
        understood exits with 2, as argparse does.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser().print_help()
        return 2
    command = parser().parse_args(words[:1]).command
    module = "fit" if command in ("fit", "validate", "test") else command
    try:
        run = import_module(f"fewshot_callbacks.cli.{module}").run
        return int(run(words if module == "fit" else words[1:]) or 0)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if module == "fit":  # a training keeps its traceback
            raise
        print(f"fewshot {command}: {error}", file=sys.stderr)
        return 1
