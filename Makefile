# make tune    set up, then search kernels for this machine's CPU and call the operator with the plan found
# make test    set up, then lint, types, verify and unit: all but the rest of the tests, of whose grids it draws
# make test-shard SHARD=2/4  the second of four shards of the rest, in which nothing is twice; the others are left out
# make test-all  make test, and all the rest: nothing is left out but GPU tests
# make wheel   a wheel that holds kernels, in dist/
# make help    the rest
#
# Needs: make, a C++ compiler, Python 3.10 or later with venv, and a package index that pip can reach.
# Other choices: make PYTHON=/path/to/python3.12, make TORCH='torch==2.14.0', make VENV=/somewhere/else.

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Without a GPU, torch 2.13.0, the version the tests are run with: an open range would fetch the newest torch with
# several GB of CUDA libraries wherever the index has no CPU build. With PIP_EXTRA_INDEX_URL set to
# https://download.pytorch.org/whl/cpu pip takes its CPU build there too. With a GPU, the build pip picks for it.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
TORCH ?= $(if $(filter-out 0,$(HAS_GPU)),torch>=2.6,torch==2.13.0)

# The tests compile for sm_90a without a GPU; where there is no CUDA toolkit, nvcc comes as a wheel (130 MB).
HAS_NVCC := $(shell command -v nvcc || ls "$$CUDA_HOME/bin/nvcc" /usr/local/cuda/bin/nvcc 2>/dev/null)
comma := ,
EXTRAS ?= dev$(if $(HAS_NVCC),,$(comma)cuda-compiler)

# Progress bars for people, silence for logs. Bytecode of what is imported comes by itself; that of all takes 50 s.
PIP := $(BIN)/python -m pip --disable-pip-version-check $(if $(MAKE_TERMOUT),,--quiet)
INSTALL := $(PIP) install --no-compile
# A process a core; the tests of a file share what they compile. Files in the order of tests/conftest.py.
PYTEST_FLAGS ?= -n logical --dist loadfile --no-loadscope-reorder
# Of the rest of the tests, see tests/support/parts.py
SHARD ?= 1/4

# What a wheel holds: of each architecture the kernels for some GPUs. All that are known to compile:
# make wheel WHEEL_GPUS='sm_90a:hopper sm_80:a100 sm_89:l40s sm_100a:b200'
WHEEL_GPUS ?= sm_90a:hopper
WHEEL_KERNELS ?= --packaged
WHEEL_TAG ?= manylinux_2_17_$(shell uname -m)

.PHONY: help setup tune test test-all test-shard lint types verify verify-cpu verify-hopper unit mutants wheel format clean

help:
	@echo 'make tune    set up, then tune the CPU target'
	@echo 'make test    set up, then lint, types, verify and unit; leaves the rest, of whose grids it draws, to test-all'
	@echo 'make test-shard SHARD=2/4  one of four shards of the rest; leaves the others, and what make test runs'
	@echo 'make test-all  make test and all the rest; leaves GPU tests to a machine with a GPU'
	@echo 'make setup   only the set-up, in $(VENV)'
	@echo 'make lint    ruff: rules and format'
	@echo 'make types   mypy on an installed copy'
	@echo 'make verify  shipped plans: those of the CPU target against the reference, one of each GPU of Hopper compiled'
	@echo 'make unit    pytest without GPU tests; PYTEST_FLAGS="-k gate" to choose'
	@echo 'make mutants break the code in some 270 places, one at a time, and list what no test notices: half an hour'
	@echo 'make wheel   a wheel in dist/ with the kernels of packaged plans and usual calls; goes on where it was stopped'
	@echo 'make format  let ruff format and fix'
	@echo 'make clean   remove what these commands made'

tune: setup
	@$(BIN)/kda-tl tune --gpu cpu || [ $$? -eq 5 ]  # 5: nothing beats the default, which is a result too

# Types and plans are checked side by side: each alone leaves a core idle for a part of its time.
test: setup
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j types verify
	@$(MAKE) --no-print-directory unit

# In parts: processes that lower the kernels of all the rest grow to 3 GB
test-all:
	@$(MAKE) --no-print-directory test
	@for n in 1 2 3 4; do $(MAKE) --no-print-directory test-shard SHARD=$$n/4 || exit; done

# Tests of a file are not kept together: a grid of one file would leave a core idle
test-shard: setup
	@$(BIN)/python -m pytest -m 'not gpu' -n logical --dist worksteal --part=$(SHARD)

setup: $(READY)

$(READY): pyproject.toml
	@command -v "$${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null || { \
	  echo 'No C++ compiler found: TileLang builds CPU kernels with one. Install g++ (Debian, Ubuntu: apt install g++).' >&2; \
	  exit 1; }
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python3.14); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    echo "Setting up $(VENV) with $$("$$python" --version): some minutes the first time."; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo 'No Python 3.10 or later with venv found. Install one (Debian, Ubuntu: apt install python3-venv), or name it:' \
	  'make PYTHON=/path/to/python3 ...' >&2; \
	exit 1
	@echo 'Installing $(TORCH)'
	@$(INSTALL) '$(TORCH)'
	@echo 'Installing kda-tl and its dependencies ($(EXTRAS))'
	@$(INSTALL) -e '.[$(EXTRAS)]'
	@$(BIN)/python -c 'import torch, tilelang'  # processes that begin side by side would each make their bytecode
	@touch $@

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo 'Not formatted (see above, or ruff format --diff): make format' >&2; exit 1; }

types: setup
	@rm -rf build/typed build/lib build/bdist.*
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation --target build/typed .
	@$(BIN)/mypy build/typed/kda_tl

verify: verify-cpu verify-hopper

verify-cpu: setup
	@$(BIN)/kda-tl verify --gpu cpu

# Whether records are current, of all plans; compiled, which takes minutes, those of one workload: the rest in test-shard
verify-hopper: setup
	@$(BIN)/kda-tl verify --gpu hopper --static --workload safe-T8192-H32

unit: setup
	@$(BIN)/python -m pytest -m 'not gpu' --part=test $(PYTEST_FLAGS)

mutants: setup
	@$(BIN)/python tests/mutants.py

# From a copy: binaries never lie in the source tree, and no build of before reaches the wheel
wheel: setup
	@for pair in $(WHEEL_GPUS); do \
	  $(BIN)/kda-tl compile $(WHEEL_KERNELS) --gpu "$${pair#*:}" --out "build/kernels/$${pair%%:*}" --prune --no-source \
	    || exit $$?; \
	done
	@rm -rf build/wheel && mkdir -p build/wheel/kda_tl/kernels dist
	@cp -r pyproject.toml README.md LICENSE kda_tl templates tuning_db cli build/wheel
	@for pair in $(WHEEL_GPUS); do cp -r "build/kernels/$${pair%%:*}" build/wheel/kda_tl/kernels; done
	@cd build/wheel && $(abspath $(BIN))/python -m pip --disable-pip-version-check --quiet wheel --no-deps \
	  --no-build-isolation --config-settings='--build-option=--plat-name=$(WHEEL_TAG)' --wheel-dir=../../dist .
	@ls -l dist/*$(WHEEL_TAG).whl

format: setup
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis $(VENV)
	find . -name __pycache__ -prune -exec rm -rf {} +
