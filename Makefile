# make venv    .venv with all that is needed, and bagua_ext in it, editable
# make demo    two processes learn to read digits
# make test    everything that CI runs
# make lint, cpp-test, sanitize, python-test, bench, clean: parts of it
#
# Needs Python 3.11 or newer with venv and headers, g++ and make; the rest comes from PyPI. The C++
# tests need GoogleTest too (Debian: libgtest-dev) and are left out without it.

PYTHON ?= python3
JOBS ?= $(shell nproc)
RANKS ?= 2
BENCH ?= allreduce
BENCH_FLAGS ?= -np $(RANKS)

# The last line of a test run is pytest's.
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)
export TF_CPP_MIN_LOG_LEVEL := 2
export PATH := $(BIN):$(PATH)
unexport PYTHONPATH

# What the installed package is built from. Python sources are not: the install is editable.
SOURCES := CMakeLists.txt setup.py pyproject.toml bagua_ext/__init__.py \
  $(shell find cmake common torch tensorflow -type f 2>/dev/null)

.PHONY: venv demo test lint cpp-test sanitize python-test bench clean

venv: $(VENV)/installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || \
	  { echo "$(PYTHON) is missing or older than 3.11. Set PYTHON=... (Debian: apt-get install python3)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/requirements: requirements-torch.txt requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -r requirements-torch.txt
	$(BIN)/python -m pip install -r requirements.txt -c requirements-torch.txt
	touch $@

$(VENV)/installed: $(VENV)/requirements $(SOURCES)
	@test -e "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
	  { echo "Python.h is missing (Debian: apt-get install python3-dev)"; exit 1; }
	@command -v "$${CXX:-c++}" > /dev/null || \
	  { echo "a C++ compiler is missing (Debian: apt-get install g++)"; exit 1; }
	BAGUA_WITH_TORCH=1 BAGUA_WITH_TENSORFLOW=1 $(BIN)/python -m pip install --no-build-isolation -e .
	touch $@

demo: venv
	bagua-run -np $(RANKS) python examples/torch_digits.py

# The Python tests come last: their closing line is the summary of the run.
test: venv
	$(MAKE) lint
	$(MAKE) cpp-test
	$(MAKE) sanitize
	$(MAKE) python-test

lint: $(VENV)/requirements
	ruff check .
	python tests/lint/check_layers.py .

cpp-test: $(VENV)/requirements
	cmake --workflow --preset release

sanitize: $(VENV)/requirements
	cmake --workflow --preset asan
	cmake --workflow --preset tsan

python-test: venv
	python -m pytest $(PYTEST_FLAGS)

bench: venv
	bagua-bench $(BENCH) $(BENCH_FLAGS)

clean:
	rm -rf build dist *.egg-info $(VENV)/installed
	find bagua_ext -name '*.so' -delete
