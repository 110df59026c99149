"""The command `fewshot`: it trains networks and evaluates stored embeddings."""

from fewshot_callbacks.cli.main import main

__all__ = ["main"]
