# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without it the checkout's root is on the path and `import dispatch` gives a second copy of every class.
export PYTHONSAFEPATH := 1

.PHONY: demo test test-slow test-real contract lint bench clean

$(VENV)/.requirements: requirements-cpu.txt requirements-vllm.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-vllm.txt
	touch $@

# The editable install is strict (links, not hooks): a new or moved file needs it again.
$(VENV)/.installed: $(VENV)/.requirements pyproject.toml $(shell git ls-files -co --exclude-standard '*.py' | xargs -n1 dirname 2>/dev/null | sort -u) 
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/aclgraph-dispatch demo

test: $(VENV)/.installed
	$(BIN)/pytest

test-slow: $(VENV)/.installed
	$(BIN)/pytest -m slow

test-real: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-real.txt
	$(BIN)/pytest -m real

# Wheels of one platform, whatever this machine is: their source is read in place, nothing is installed.
WHEEL := --quiet --no-deps --only-binary :all: --python-version 3.11 \
	--platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64

.cache/contract/.downloaded: requirements-contract.txt | $(VENV)/.installed
	rm -rf $(@D)
	sed '/^#/d' $< | xargs -n 1 $(BIN)/python -m pip download $(WHEEL) --dest $(@D)
	touch $@

contract: $(VENV)/.installed .cache/contract/.downloaded
	$(BIN)/pytest tests/contract -m contract

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/pytest tests/micro --benchmark-only -m ''

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
