# Everything below sets up its own environment in .venv, from nothing but make and a Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_OPTIONS := --disable-pip-version-check --quiet
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PYTHON_STAMP := $(VENV)/python-$(VERSION)
INSTALLED := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format docs bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Another Python than python3: PYTHON=python3.12 make test"

install: $(INSTALLED)  ## set up .venv (every other target does so too)

quickstart: $(INSTALLED)  ## train on a year of flights out of New York
	$(BIN)/python examples/flights/quickstart.py

test: $(INSTALLED)  ## run the tests; ARGS="tests/unit -k name" picks some
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)  ## check style, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(INSTALLED)  ## put the code into the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(INSTALLED)  ## build the site into site/
	$(BIN)/zensical build --clean --strict

bench: $(INSTALLED)  ## measure, as ratios to plain PyTorch and DDP
	$(BIN)/python -m benchmarks

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) site build dist .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Another Python means another environment.
$(PYTHON_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Farandole needs Python 3.11 or later; try: PYTHON=python3.12 make")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	touch $@

$(INSTALLED): $(PYTHON_STAMP) pyproject.toml constraints.txt
	@echo "setting up $(VENV): about 3 minutes"
	$(BIN)/pip install $(PIP_OPTIONS) --constraint constraints.txt pip
	$(BIN)/pip install $(PIP_OPTIONS) --constraint constraints.txt --build-constraint constraints.txt \
		--group dev --editable '.[torch,mlflow,report]'
	$(BIN)/pip check
	touch $@
