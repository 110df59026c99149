"""Configurations of `fewshot fit`: those of the package by their names, and what is in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

OPTIONS = ("-c", "--config")
_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # of an installed package, and of a clone


def with_paths(arguments: Sequence[str]) -> list[str]:
    """Replace names of the package's configurations, such as `--config protonet_dr_folder`, by their paths.

    Args:
        arguments: The words of a command.

    Returns:
        The words with paths; a word that is a file, or looks like one, is left as it is.

    Raises:
        ValueError: There is neither such a file nor such a configuration; names the nearest.
    """
    words = list(arguments)
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in OPTIONS:
            continue
        if equals:
            words[position] = f"{option}={_path_of(value)}"
        elif position + 1 < len(words):
            words[position + 1] = _path_of(words[position + 1])
    return words


def files_of(arguments: Sequence[str]) -> list[Path]:
    """List the configurations that the words of a command name."""
    files = []
    for position, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option in OPTIONS and (equals or position + 1 < len(arguments)):
            files.append(Path(value if equals else arguments[position + 1]))
    return files


def _path_of(word: str) -> str:
    if not word or Path(word).suffix in (".yaml", ".yml", ".json") or Path(word).is_file():
        return word  # of what is missing the parser informs
    known = {file.stem: file for place in _PLACES for file in sorted(place.rglob("*.yaml"))}
    if word in known:
        return str(known[word])
    near = get_close_matches(word, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Give a file, or one of {', '.join(sorted(known))}."
    raise ValueError(f"there is no file {word}, and no configuration of this name. {hint}")


def read_configuration(file: Path) -> dict[str, Any]:
    """Read what LightningCLI has written beside a run.

    Raises:
        ValueError: It is empty, damaged, or something else.
    """
    import yaml  # noqa: PLC0415 - LightningCLI wrote the file with it

    fix = "Give the folder of a run of 'fewshot fit', or copy its config.yaml there again."
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{file} is damaged: it is no YAML ({what}). {fix}") from error
    if not content:
        raise ValueError(f"{file} is empty, as a disk that was full leaves it. {fix}")
    parts = ("model", "data", "trainer")
    if not isinstance(content, Mapping) or not all(isinstance(content.get(name) or {}, Mapping) for name in parts):
        raise ValueError(f"{file} is no configuration: it should hold settings of {', '.join(parts)} by name. {fix}")
    return dict(content)
