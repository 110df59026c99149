"""The help of `fewshot fit`, `validate` and `test`, and the bundled configurations. It needs no jsonargparse."""

from __future__ import annotations

import argparse
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CONFIGURATIONS = (PACKAGE / "configs", PACKAGE.parent / "configs")  # in an installed package, and in a clone


def help_of_training(command: str) -> str:
    """Return the help of `fewshot fit`, `validate` or `test`, which Lightning's CLI parses."""
    parser = argparse.ArgumentParser(
        f"fewshot {command}",
        description="Train or evaluate a network from configuration files and options. Later options override earlier "
        "ones. Every argument of the Trainer, the model and the data is an option.",
    )
    names = ", ".join(sorted(configurations()))
    parser.add_argument("-c", "--config", metavar="FILE", help=f"a YAML file, or one of {names}")
    parser.add_argument(
        "--model.NAME", metavar="VALUE", help="a ProtoNet setting, such as --model.head dr; or --model CLASS"
    )
    parser.add_argument(
        "--data.NAME", metavar="VALUE", help="a data setting, such as --data.train.ways 5; or --data CLASS"
    )
    parser.add_argument("--trainer.NAME", metavar="VALUE", help="a Trainer setting, such as --trainer.max_epochs 20")
    parser.add_argument("--trainer.callbacks+", metavar="CLASS", help="add a callback; its settings come after it")
    listed = (
        "list the settings of a data module, and exit; for a data set: --data FewShotDataModule --data.dataset.help"
    )
    parser.add_argument("--data.help", metavar="CLASS", help=listed)
    checkpoint = "checkpoint to resume from or to evaluate, such as runs/version_0/checkpoints/best.ckpt"
    parser.add_argument("--ckpt_path", metavar="FILE", help=checkpoint)
    parser.add_argument("--print_config", action="store_true", help="show all settings as YAML, and exit")
    parser.add_argument("--help=full", action="store_true", help="list all options, including Lightning's, and exit")
    return parser.format_help()


def configurations() -> dict[str, Path]:
    """Return name -> file, for the bundled configurations."""
    return {file.stem: file for folder in CONFIGURATIONS for file in sorted(folder.rglob("*.yaml"))}
