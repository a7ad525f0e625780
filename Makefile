# Every target does everything it needs from a clean clone: a virtual environment in .venv,
# PyTorch for the CPU, Tilefold with its demo and development extras.
#
#   make run                      embed README.md with a pretrained encoder, compiled; writes report.html
#   make run FILE=notes.txt       the same for the lines of another text file
#   make test                     the test suite            make lint types   ruff, mypy
#   make bench                    tilefold bench cpu        make clean        remove what make made
#   make docs                     the documentation site in build/site, links checked
#   make mutants                  break 20 places on purpose, list what the nearest tests do not notice
#
# PYTHON       an interpreter, 3.11 or later
# TORCH        the PyTorch requirement, installed first and alone
# TORCH_ARGS   options for that one installation: where your default index serves a CUDA build
#              and you want the (much smaller) CPU one, name PyTorch's CPU index here
# PIP_ARGS     options for every pip installation (an index, a proxy, a folder of wheels)
# PYTEST_ARGS  options for pytest (default: two processes, a file at a time)
# MUTANTS_ARGS options and places of bench/mutants.py, as in MUTANTS_ARGS=algebra/linear.py:close

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadfile
MUTANTS_ARGS ?=
FILE ?= README.md
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: run test lint types examples bench mutants docs venv clean
.DELETE_ON_ERROR:

run: $(VENV)/.package
	$(BIN)/python -m tilefold.demo.embed $(FILE)

test: $(VENV)/.package
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

lint: $(VENV)/.package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.package
	$(BIN)/mypy

examples: $(VENV)/.package
	@set -e; for f in examples/[0-9]*.py; do echo "== $$f"; $(BIN)/python $$f; done

bench: $(VENV)/.package
	$(BIN)/tilefold bench cpu

mutants: $(VENV)/.package
	$(BIN)/python bench/mutants.py $(MUTANTS_ARGS)

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict

venv: $(VENV)/.package

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Tilefold needs Python 3.11 or later; set PYTHON=/path/to/it (this is $$($(PYTHON) --version 2>&1))" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.created
	@echo "installing $(TORCH)"
	@$(PIP) $(TORCH_ARGS) "$(TORCH)"
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	@echo "installing tilefold[demo,dev]"
	@$(PIP) -e '.[demo,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.package
	@echo "installing tilefold[docs]"
	@$(PIP) -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) build dist tilefold.egg-info report.html .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tilefold tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +
