# Every target does its own set-up: a virtual environment in .venv, made once and again when
# pyproject.toml or constraints.txt change. Needs GNU make and Python 3.10+ with venv.
#   make demo DEMO_ARGS=--help    make test TEST_ARGS='-k shards'    make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint format clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/installed  ## train on Fashion-MNIST with and without echo, and draw demo.png
	$(VENV)/bin/python -m train demo $(DEMO_ARGS)

test: $(VENV)/installed  ## run the tests
	$(VENV)/bin/python -m pytest $(TEST_ARGS)

lint: $(VENV)/installed  ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/installed  ## fix style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo "error: no $(PYTHON) on the PATH: install Python 3.10 or newer, or name it: make PYTHON=/path/to/python3"; exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $$($(PYTHON) --version) is too old: name Python 3.10 or newer: make PYTHON=python3.12"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt-get install python3-venv)"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[train,test,dev]'
	@touch $@
