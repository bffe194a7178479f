# SPDX-License-Identifier: Apache-2.0
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The interpreter that makes the virtual environment; found by .ci/find-python unless it is given.
PYTHON ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' \
	    | while IFS=$$'\t' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

# A second run finds the stamp newer than both files and starts at once.
$(INSTALLED): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
	    python="$(PYTHON)"; \
	    if [ -z "$$python" ]; then python="$$(.ci/find-python)"; fi; \
	    echo "Making $(VENV) with $$python"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@echo "Installing the tested set of packages into $(VENV) (PyTorch is large: minutes the first time)"
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[test,plots,docs]'
	@touch $@

.PHONY: install
install: $(INSTALLED) ## Make .venv and install the package with its extras for tests, plots and docs

.PHONY: demo
demo: $(INSTALLED) ## Train a small model, convert it to block diffusion with CSBP on two ranks, check it, and let it write
	$(BIN)/python examples/demo/run.py

.PHONY: bench
bench: $(INSTALLED) ## Measure CP, BP and CSBP side by side and regenerate benchmarks/RESULTS.md (root: slow links, wire counters)
	$(BIN)/python -m benchmarks.run

# Test files at a time; a run of a file may have several ranks, of one thread each. The long files of whole runs come first.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: test
test: lint $(INSTALLED) ## Run the checks: lint, types, unit tests, functional tests (WORKERS=2 files at a time)
	$(PYTEST) -m "not slow" tests/functional tests/unit_tests

.PHONY: test-all
test-all: lint $(INSTALLED) ## The same with the tests marked slow: further cases of the same kinds
	$(PYTEST) tests/functional tests/unit_tests

.PHONY: unit
unit: $(INSTALLED) ## Run the unit tests
	$(PYTEST) tests/unit_tests

.PHONY: functional
functional: $(INSTALLED) ## Run the functional tests: whole runs of the real entries
	$(PYTEST) tests/functional

SOAKED ?= 3000
.PHONY: soak
soak: $(INSTALLED) ## Train SOAKED iterations on two ranks with evaluations and checkpoints: nothing may grow (a quarter of an hour)
	$(BIN)/python -m tests.support.soak --iterations $(SOAKED)

.PHONY: fuzz
fuzz: $(INSTALLED) ## Try many command lines, damaged checkpoints and texts: accepted, or refused in one line (hours)
	$(BIN)/python -m pytest --hypothesis-profile fuzz tests/functional/test_fuzz.py

MUTANTS ?= 100
MUTATED ?= megatron_csbp/transformer megatron_csbp/loss
.PHONY: mutate
mutate: $(INSTALLED) ## Change the code in MUTANTS places, one at a time, and see which the unit tests notice (hours)
	$(BIN)/python -m tests.support.mutate --sample $(MUTANTS) $(MUTATED)

# -n, -W: a reference that leads nowhere, and any warning, is an error.
.PHONY: docs
docs: $(INSTALLED) ## Build the documentation site into build/docs and check its links
	$(BIN)/python -m sphinx -b html -n -W --keep-going -q -d build/doctrees -c docs . build/docs
	$(BIN)/python docs/check_links.py build/docs

.PHONY: docs-links
docs-links: $(INSTALLED) ## Check the links of the pages to other sites (needs the network)
	$(BIN)/python -m sphinx -b linkcheck -n -q -d build/doctrees -c docs . build/docs-links

.PHONY: lint
lint: $(INSTALLED) ## Check style, formatting, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(INSTALLED) ## Format the code and fix what can be fixed by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lock
lock: $(INSTALLED) ## Write what .venv holds into constraints.txt
	{ grep '^#' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable; } > constraints.tmp
	mv constraints.tmp constraints.txt
	@touch $(INSTALLED)

.PHONY: clean
clean: ## Remove caches and build outputs
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## Remove the virtual environment too
	rm -rf $(VENV)
