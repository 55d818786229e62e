# Two commands matter: `make demo` shows what lmlive is for, `make test` checks everything.
# Each makes .venv and installs what it needs; the second time it starts at once.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
CODE := lmlive tests examples $(wildcard benchmarks)

.PHONY: demo test check lint types floors bench soak fuzz docs format clean

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: check
	$(BIN)/python -m pytest

check: lint types floors

lint: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(STAMP)
	$(BIN)/mypy lmlive tests examples

floors: $(STAMP)
	$(BIN)/python -m pytest tests/test_floors.py

bench: $(STAMP)
	for benchmark in benchmarks/[!_]*.py; do echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

soak: $(STAMP)
	$(BIN)/python -m tests.model.soak --schedules $(or $(SCHEDULES),100000) --minutes $(or $(MINUTES),120) $(if $(SEED),--seed $(SEED))

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --frames $(or $(FRAMES),1000000) $(if $(SEED),--seed $(SEED))

docs: $(STAMP)
	$(BIN)/python -m tests.pages

format: $(STAMP)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find lmlive tests examples -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "lmlive needs Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
