"""The command `fewshot`."""
