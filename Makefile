# `make quickstart` and `make test` set up everything they need in .venv; a second call finds it there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Wheels for torch with its CUDA parts are a few GB: uv installs them in half a minute, pip needs eight.
INSTALLED := $(VENV)/.installed
export UV_SYSTEM_CERTS ?= 1
export UV_LINK_MODE ?= copy
# Modules are compiled once and kept in .venv; where that is switched off, every import of torch takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
# As `lap` does by itself: threads that spin starve each other on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: quickstart test check lint format bench long docs clean

quickstart: $(INSTALLED)
	$(BIN)/lap train recipes/quickstart.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

# Lint, and the tests that neither start a process nor train a run nor compute for seconds: what to run while working on something.
check: lint
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder --quick -m 'not long and not slow'

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	@for file in $(filter-out benchmarks/measure.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# What takes too long for every change: faults at every write, hostile programs, disks that fill up, whole recipes.
long: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder -m long

# The generated pages, then the site, which opens from site/index.html.
docs: $(INSTALLED)
	$(BIN)/python docs/generate.py
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lap needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
