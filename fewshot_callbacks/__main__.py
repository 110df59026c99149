"""`python -m fewshot_callbacks`, and `torchrun -m fewshot_callbacks` on several processes, is the command `fewshot`."""

from fewshot_callbacks.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
