PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
WORKERS = $$(($$(getconf _NPROCESSORS_ONLN) + 1))
# Written last: without it the environment is half made and is made anew.
READY := .venv/.ready
PINS := .ci/constraints.txt

# An environment that is there but does not start (its Python was removed) is not ready either.
ifneq ($(shell $(BIN)/python -m pip --version >/dev/null 2>&1 && echo starts),starts)
.PHONY: $(READY)
endif

.PHONY: help .venv demo elastic gpt test test-deep docs check check-format check-lint check-types check-layers bench bench-peers gpus zoo soak soak-mesh format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

.venv: $(READY)  ## the environment, with the versions of .ci/constraints.txt (PYTHON=python3.12 to choose the Python)

# The pins are given by variables because a build environment does not see pip's -c option.
$(READY): pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "fdp needs Python 3.11 or newer; '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1)." \
	    "Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: its venv module is missing (on Debian: python3-venv)." >&2; exit 1; }
	@if test -e $@ && $(BIN)/python -m pip --version >/dev/null 2>&1; then rm $@; else $(PYTHON) -m venv --clear .venv; fi
	PIP_CONSTRAINT=$(PINS) PIP_BUILD_CONSTRAINT=$(PINS) $(BIN)/python -m pip install --quiet --editable '.[dev,demo,docs]'
	@touch $@

demo: $(READY)  ## run examples/digits.py (ARGS="…" for its options)
	$(BIN)/python examples/digits.py $(ARGS)

elastic: $(READY)  ## run examples/digits_elastic.py (ARGS="…" for its options)
	$(BIN)/python examples/digits_elastic.py $(ARGS)

gpt: $(READY)  ## run examples/gpt.py (ARGS="…" for its options)
	$(BIN)/python examples/gpt.py $(ARGS)

# One process more than cores, because tests of processes wait for each other; neighbours share what they prepare.
# Twice, because an accelerator that is installed stays for the life of a process; the second runs also if the first fails.
# With bytecode, also where that is switched off: each process would compile all tests anew.
# In the second the slots of the property tests are on a virtual accelerator: see property_tests/places.py.
test: $(READY)  ## tests, property tests with few examples, doctests and the code of the docs
	export PYTHONDONTWRITEBYTECODE=; \
	  $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS); first=$$?; \
	  ACCELERATOR=virtual HYPOTHESIS_PROFILE=few $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal tests/accelerator property_tests && exit $$first

test-deep: $(READY)  ## property tests with many examples, and tests marked `deep`
	$(BIN)/python -m pytest -m deep tests $(ARGS); marked=$$?; \
	  ACCELERATOR=virtual $(BIN)/python -m pytest -m deep tests/accelerator $(ARGS); there=$$?; \
	  HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -o faulthandler_timeout=7200 property_tests $(ARGS); first=$$?; \
	  ACCELERATOR=virtual HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -o faulthandler_timeout=7200 property_tests $(ARGS) && exit $$((marked | there | first))

# Every page anew: Sphinx warns only of those that it reads, and a second run would pass.
docs: $(READY)  ## the site, into build/docs; warnings are errors
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -b html -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

check: check-format check-lint check-types check-layers  ## format, lint, types and layers

check-format: $(READY)
	$(BIN)/python -m ruff format --check

check-lint: $(READY)
	$(BIN)/python -m ruff check

# Without the first variable pyright asks the network for its newest version; --verifytypes looks for torch by the second.
check-types: $(READY)
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/python -m pyright
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pyright --verifytypes fdp --ignoreexternal

check-layers: $(READY)
	$(BIN)/lint-imports --no-logo

bench: $(READY)  ## run the short scripts in benchmarks/
	@set -e; for script in $(filter-out benchmarks/_% benchmarks/soak%,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

bench-peers: $(READY)  ## fdp beside plain torch, DDP and JAX, into docs/explanation/peers/ (ARGS="--quick", …)
	$(BIN)/python -m benchmarks.peers --out docs/explanation/peers $(ARGS)

gpus: $(READY)  ## the first hour with GPUs: laws, hangs, processes, times, into build/first_hour; else a rehearsal (ARGS="--tiny", …)
	$(BIN)/python -m benchmarks.first_hour $(ARGS)

# It has packages of its own, which the first call installs into the environment.
zoo: $(READY)  ## models of transformers, timm, torchvision and PyTorch Geometric through fdp (ARGS="--quick", "--write", …)
	PIP_CONSTRAINT=$(PINS) PIP_BUILD_CONSTRAINT=$(PINS) $(BIN)/python -m pip install --quiet --editable '.[zoo]'
	$(BIN)/python -m benchmarks.zoo $(ARGS)

# Each thread that has been has left memory to an arena of its own, which looks like growth.
soak: $(READY)  ## thousands of calls from eight threads, with faults (ARGS="--calls 1000")
	MALLOC_ARENA_MAX=2 $(BIN)/python benchmarks/soak.py $(ARGS)

soak-mesh: $(READY)  ## pairs of processes that are interrupted, killed or stopped (ARGS="--rounds 50")
	$(BIN)/python benchmarks/soak_mesh.py $(ARGS)

format: $(READY)  ## format the code and mend what ruff can
	$(BIN)/python -m ruff check --fix-only
	$(BIN)/python -m ruff format

clean:  ## remove everything that was made
	rm -rf .venv .hypothesis .import_linter_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
