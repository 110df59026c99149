# Each target does everything on a fresh machine: it makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
SAMPLE ?= 300
SEED ?= 0

.PHONY: demo test test-all docs format notebook bench figures mutants clean

demo: $(READY)
	$(BIN)/fewshot demo

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/typos
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not exhaustive"

# also every case of the long sweeps, and property tests on new random examples each time
test-all: $(READY)
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --hypothesis-profile random

# the documentation site in build/site; a warning or a broken link is an error
docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebook: $(READY)
	$(BIN)/python examples/run_notebook.py

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/episodes.py
	$(BIN)/python benchmarks/retrieval.py --rows floor ours argsort

# every figure of the documentation, from docs/figures/data; --measure repeats the trainings behind them
figures: $(READY)
	$(BIN)/python tools/figures.py

# mistakes put into the code, SAMPLE of them drawn by SEED, and whether a test fails: tools/mutants/README.md; it takes hours
mutants: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[dev,mutants]"
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants/run.py --sample $(SAMPLE) --seed $(SEED)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .mutants
	find . -name '*.nbi' -delete -o -name '*.nbc' -delete
