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

# The editable install is strict (links, not hooks): a new or moved file needs it again, an edited one does not. So
# the stamp's name is the list of files.
SOURCES := $(shell find dispatch integrations bench -name '*.py' | LC_ALL=C sort | cksum | cut -d ' ' -f 1)
INSTALLED := $(VENV)/.installed-$(SOURCES)

$(INSTALLED): $(VENV)/.requirements pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	rm -f $(VENV)/.installed*
	touch $@

demo: $(INSTALLED)
	$(BIN)/aclgraph-dispatch demo

test: $(INSTALLED)
	$(BIN)/pytest

test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow

test-real: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-real.txt
	$(BIN)/pytest -m real

# Wheels of one platform, whatever this machine is: their source is read in place, nothing is installed.
WHEEL := --quiet --no-deps --only-binary :all: --python-version 3.11 \
	--platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64

.cache/contract/.downloaded: requirements-contract.txt | $(INSTALLED)
	rm -rf $(@D)
	sed '/^#/d' $< | xargs -n 1 $(BIN)/python -m pip download $(WHEEL) --dest $(@D)
	touch $@

contract: $(INSTALLED) .cache/contract/.downloaded
	$(BIN)/pytest tests/contract -m contract

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/pytest bench/micro --benchmark-disable-gc --benchmark-columns=median,iqr,rounds
	$(BIN)/python -m aclgraph_dispatch.bench.replay --model gqa
	$(BIN)/python -m aclgraph_dispatch.bench.replay --model mla

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
