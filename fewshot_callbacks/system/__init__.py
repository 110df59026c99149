"""What the package needs of the machine and of Python: optional packages, the terminal, compiled loops."""
