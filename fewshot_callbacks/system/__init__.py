"""What the package asks of the machine and of Python: optional packages, the terminal, compiled loops."""
