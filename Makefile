# make train: install, then train the demonstration on 16 CPU ranks.   make test: the test suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed: the package alone, and with all that the tests, the pages and every extra need.
ALONE := $(VENV)/.installed
WHOLE := $(VENV)/.installed-whole
# Without a GPU torch for CPUs is enough, which is 4.5 GB smaller. If its index cannot be reached, pip takes torch from its own.
CPU_TORCH := $(if $(shell command -v nvidia-smi),,--retries 2 --extra-index-url https://download.pytorch.org/whl/cpu)
# Three processes on two cores: tests that start ranks wait for processes much of the time (groups in tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup
# Tests start hundreds of Pythons: each would compile our files anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-all test-wheel lint parity loops matrix docs clean

train: $(ALONE)
	$(BIN)/python -m recipes.train parallel=tp8_cp2 device=cpu

test: $(WHOLE)
	$(PYTEST)

test-all: $(WHOLE)  ## the slow tests too
	$(PYTEST) -m "" --hypothesis-profile drawn

test-wheel: $(WHOLE)  ## the wheel in environments outside of the checkout, one of which pip fills from a package index
	$(BIN)/python -m pytest -m "" tests/wheel

parity: $(WHOLE)  ## every preset and plan that fits in 16 ranks against one rank
	$(BIN)/python -m pytest tests/recipes/test_parity.py -m ""

loops: $(WHOLE)  ## loops that are not ours against the recipe's losses
	$(BIN)/python -m pytest -m "" tests/docs/test_foreign_loops.py

matrix: $(WHOLE)  ## every shipped Llama on every preset that fits, proven; written into the docs
	$(BIN)/python -m benchmarks.proofs --write docs/proving.md

docs: $(WHOLE)  ## the pages as a site, site/index.html, that needs no server
	$(BIN)/python docs/site.py

lint: $(WHOLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(ALONE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt $(CPU_TORCH) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(WHOLE): $(ALONE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,float8,hf,slurm,lightning,tensorboard,wandb]"
	touch $@

clean:
	rm -rf $(VENV) outputs multirun site .pytest_cache .mypy_cache .ruff_cache .hypothesis
