# Each target does everything on a fresh machine: it makes .venv, and installs there what it needs and no more, in the
# versions of constraints.txt. `make test CONSTRAINTS=.github/oldest.txt` takes the oldest that are supported, and
# `make test CONSTRAINTS=` the newest that there are; either replaces the .venv of other versions.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
MADE := $(VENV)/.made-with-$(or $(notdir $(CONSTRAINTS)),newest)
INSTALL := $(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
SAMPLE ?= 300
SEED ?= 0

.PHONY: demo quick test test-rest test-all check format docs notebook bench gpu figures figures-of-speed mutants lock clean
.NOTPARALLEL: # two installations into one environment

demo: $(VENV)/.for-demo
	$(BIN)/fewshot demo

# bytecode is kept where an image of a container switches that off: the tests start many processes of this package
unexport PYTHONDONTWRITEBYTECODE
FEWSHOT_CHECK_SHAPES ?= 0
FEWSHOT_EXAMPLES ?= 1
export FEWSHOT_CHECK_SHAPES FEWSHOT_EXAMPLES
# one process more than there are cores, since some tests wait for processes of their own; at most 4, of 2 GB each
CORES := len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0))
PARALLEL := --numprocesses $(shell $(PYTHON) -c 'import os; print(min(4, 1 + $(CORES)))') --dist loadfile --no-loadscope-reorder

# 20 to 60 seconds: the tests of the files that differ from BASE, and the tests of the layers
quick: FEWSHOT_EXAMPLES := 0.1
quick: $(VENV)/.for-test
	$(BIN)/python tools/quick.py $(BASE)

# what protects behaviour; CONTRIBUTING.md says how long it takes
test: FEWSHOT_EXAMPLES := 0.2
test: $(VENV)/.for-test
	$(BIN)/pytest $(PARALLEL) -m "not slow and not exhaustive"

# what `make test` leaves out, and its property tests with all examples; shapes in signatures are checked
test-rest test-all: FEWSHOT_CHECK_SHAPES := 1
test-rest: $(VENV)/.for-test-integrations
	$(BIN)/pytest $(PARALLEL) -m "(slow or sampled) and not exhaustive"

# every test with every case of the long sweeps, shapes checked, and property tests on new random examples each time
test-all: $(VENV)/.for-test-integrations
	$(BIN)/pytest $(PARALLEL) --hypothesis-profile random

# format, lint, spelling and types
check: $(VENV)/.for-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/typos
	$(BIN)/mypy

format: $(VENV)/.for-check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# the documentation site in build/site; a warning or a broken link is an error
docs: $(VENV)/.for-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

notebook: $(VENV)/.for-test-integrations
	$(BIN)/python examples/run_notebook.py

bench: $(VENV)/.for-bench
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/episodes.py
	$(BIN)/python benchmarks/retrieval.py --rows floor ours argsort

# on a machine with CUDA, in under ten minutes: the device gives the bits of the CPU, and its times; writes build/gpu_check.json
gpu: $(VENV)/.for-test
	$(BIN)/python tools/gpu_check.py

# every figure of the documentation, from docs/figures/data; --measure repeats the training runs
figures: $(VENV)/.for-test-integrations
	$(BIN)/python tools/figures.py

# the tables of docs/research/measurements.md, measured anew on a machine that does nothing else: about an hour
figures-of-speed: $(VENV)/.for-test-integrations $(VENV)/.for-bench
	$(BIN)/python tools/figures_of_speed.py --measure

# puts SAMPLE mistakes, drawn by SEED, into the code, and checks that a test fails: tools/mutants/README.md; it takes hours
mutants: $(VENV)/.for-test-integrations $(VENV)/.for-mutants
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants/run.py --sample $(SAMPLE) --seed $(SEED)

# constraints.txt with the newest versions that pyproject.toml and tools/lock.in allow, for all Pythons and systems
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade uv
	build/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras --annotation-style line \
		--custom-compile-command "make lock" --output-file constraints.txt pyproject.toml tools/lock.in

# .unfinished exists while something is installed. pip takes a package with half of its files written for an installed
# one, so that an environment in which an installation was interrupted is made anew; one that failed, as without a
# network, has changed nothing.
$(MADE): $(wildcard $(VENV)/.unfinished)
	rm -rf $(VENV)
	mkdir $(VENV)
	touch $(VENV)/.unfinished
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	mv $(VENV)/.unfinished $@

# the package with an extra: the demo takes what the commands, the figures and the images need
$(VENV)/.for-%: $(MADE) pyproject.toml $(CONSTRAINTS)
	touch $(VENV)/.unfinished
	trap 'exit 130' INT TERM HUP; $(INSTALL) $(if $(CONSTRAINTS),--build-constraint $(CONSTRAINTS)) \
		--editable ".[$(if $(filter demo,$*),all,$*)]" || { rm $(VENV)/.unfinished; exit 1; }
	mv $(VENV)/.unfinished $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .mutants
	find . -name '*.nbi' -delete -o -name '*.nbc' -delete
