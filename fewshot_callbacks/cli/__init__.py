"""The command `fewshot`: train, validate and test a prototypical network; evaluate stored embeddings; plan; demo."""

from fewshot_callbacks.cli.main import main

__all__ = ["main"]
