# Two commands: `make demo` and `make test`. Both make .venv if need be.
PYTHON ?= python3.11
ifeq ($(shell command -v $(PYTHON) 2>/dev/null),)
PYTHON := python3
endif
BIN := .venv/bin
# Neighbours stay in one process and share what they captured.
PYTEST := $(BIN)/pytest -n auto --dist worksteal
# TensorFlow, where it is installed, in a process of its own: beside torch it would start in every worker.
TENSORFLOW_TESTS := $(BIN)/python tests/run_tensorflow.py
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow lint kernels setup setup-ci browser bench docs schemas clean

# What is installed grows with what is asked for: base, then the tools of the developers, then every extra.
.venv/base: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing loadmaster"
	@$(PIP) -e .
	@touch $@

.venv/dev: .venv/base
	@echo "installing the developers' tools and torch, a witness of some tests"
	@$(PIP) -e '.[torch,dev]'
	@touch $@

.venv/all: .venv/dev
	@echo "installing every extra (torch and friends: a few minutes)"
	@$(PIP) -e '.[all,dev,tensorflow]'
	@touch $@

.venv/ci: .venv/all
	@echo "installing what else tests train with or compare with"
	@$(PIP) -e '.[ci]'
	@touch $@

.venv/demo: .venv/base
	@echo "installing torch and transformers: the demo trains"
	@$(PIP) -e '.[hf]'
	@touch $@

demo: .venv/demo
	@$(BIN)/loadmaster demo

setup: .venv/all
	@$(BIN)/python -m loadmaster.cli.warm

setup-ci: .venv/ci

# What the pages are tested in; installed where it is missing and apt-get is there.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { echo "installing chromium"; apt-get install --yes --no-install-recommends chromium chromium-driver; }

# Kernels are compiled once, beside the linters, and not by each process of pytest for itself.
test: .venv/dev
	@$(MAKE) --no-print-directory -j2 lint kernels
	$(PYTEST)
	$(TENSORFLOW_TESTS)

test-slow: .venv/dev kernels
	$(PYTEST) -m slow
	$(TENSORFLOW_TESTS) -m slow

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

kernels: .venv/dev
	$(BIN)/python -m loadmaster.cli.warm

bench: .venv/dev
	$(BIN)/python -m benchmarks.run

docs: .venv/dev
	@$(PIP) -e '.[docs]'
	@$(BIN)/python -m loadmaster.cli.docs
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo "written: out/site/index.html"

schemas: .venv/base
	$(BIN)/python -m loadmaster.cli.schemas docs/schemas

clean:
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis
