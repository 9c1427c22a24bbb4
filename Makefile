# make train: install, then train the demonstration on 16 CPU ranks.   make test: the test suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Three processes on two cores: tests that start ranks wait for processes much of the time (groups in tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup
# Tests start hundreds of Pythons: each would compile our files anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-all test-wheel lint parity loops matrix docs clean

train: $(STAMP)
	$(BIN)/python -m recipes.train parallel=tp8_cp2 device=cpu

test: $(STAMP)
	$(PYTEST)

test-all: $(STAMP)  ## the slow matrices too
	$(PYTEST) -m ""

test-wheel: $(STAMP)  ## the wheel in environments outside of the checkout, one of which pip fills from a package index
	$(BIN)/python -m pytest -m "" tests/wheel

parity: $(STAMP)  ## every preset and plan that fits in 16 ranks against one rank
	$(BIN)/python -m pytest tests/recipes/test_parity.py -m ""

loops: $(STAMP)  ## loops that are not ours against the recipe's losses
	$(BIN)/python -m pytest -m "" tests/docs/test_foreign_loops.py

matrix: $(STAMP)  ## every shipped Llama on every preset that fits, proven; written into the docs
	$(BIN)/python -m benchmarks.proofs --write docs/proving.md

docs: $(STAMP)  ## the pages as a site, site/index.html, that needs no server
	$(BIN)/python docs/site.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,hf,slurm,lightning,tensorboard,wandb]"
	touch $@

clean:
	rm -rf $(VENV) outputs multirun site .pytest_cache .mypy_cache .ruff_cache .hypothesis
