# Every target prepares what it needs on a fresh machine (Python >= 3.11 with venv, make, a C++20 compiler) and
# does nothing twice. Settings, each as `make NAME=value target`:
#   VENV    the virtual environment to make and use        PYTHON     the python that makes it
#   TORCH   what pip installs as torch, where none is there yet; by default the release in constraints.txt
#   JOBS    compilers and test workers at a time           VENV_ARGS  e.g. --system-site-packages
#   EXTRAS  what of pyproject.toml's extras to install; bench adds `deepspeed`, to be measured beside it
#   PART    the tests on several ranks that `make test-part` runs, as pytest names them
#   RANKS, DEMO_ARGS, BENCH_ARGS, PYTEST_ARGS              passed on to what runs
#   ROOM    the room whose tests `make test` and `make check` run, without lint, types and C++ tests: passes, say,
#           or passes/tiling
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
TORCH ?= torch
# nproc answers with OMP_NUM_THREADS where that is set, which is about something else.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
RANKS ?= 2
EXTRAS ?= dev
ROOM ?=
# What another torch may change: steps of every kind and their numbers, Inductor, optimizers, checkpoints, collectives.
PART ?= $(addprefix tests/dist/,training/test_one_rank.py::test_bits_of_small_models \
  training/test_one_rank.py::test_inductor_is_close optim/test_optimizer.py::test_on_two_ranks \
  params/test_sharded_state.py ranks/test_call_handshake.py ranks/test_transport.py ranks/test_shared.py)

override VENV := $(abspath $(VENV))
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.zero
LOG := $(VENV)/setup.log
ENGINE := $(wildcard $(addprefix csrc/,*.cc src/*.cc src/*.h src/aio/*.cc src/aio/*.h src/ranges/*.cc include/zero/*.h include/zero/aio/*.h))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MAX_JOBS := $(JOBS)
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo bench gpu test test-all test-part check lint types cpp-test pytest clean distclean
help:
	@echo "make demo       train a small model on $(RANKS) ranks"
	@echo "make check      lint, types and quick tests"
	@echo "make test       lint, types, C++ tests, Python tests; make test ROOM=passes: the tests of one room"
	@echo "make test-all   the same, with the exhaustive combinations that the others sample"
	@echo "make test-part  quick tests, and a part of those on several ranks: for another torch (make TORCH=...)"
	@echo "make bench      step times beside DDP, FSDP2, SimpleFSDP and DeepSpeed, in $(VENV)-bench"
	@echo "make gpu        on a machine with a GPU: tests/gpu, then what to measure there, in stages; make gpu FROM=b goes on"
	@echo "make cpp-test   the engine's own tests, under ASan and TSan"
	@echo "make setup      only the set-up that the others share"
	@echo "make clean      remove build outputs and caches (make distclean: and $(VENV))"

# --- set-up -----------------------------------------------------------------------------------------------------
# $(call quietly,COMMAND): runs it with its output in the log; where it fails, shows what the log says, and its path.
quietly = $(1) > $(LOG) 2>&1 || { code=$$?; tail -n 20 $(LOG); echo; grep -E ' (fatal )?error: ' $(LOG) | head -n 20 || true; \
  echo "set-up failed; the whole log: $(LOG)" >&2; exit $$code; }

setup: $(STAMPS)/package

$(STAMPS)/venv:
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }; \
	  echo "[1/3] making $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv $(VENV_ARGS) $(VENV); \
	fi
	@mkdir -p $(STAMPS) && touch $@

# What torch the last set-up found, and what torch is there now.
TORCH_BEFORE := $(shell sed -n 's/^torch==//p' $(STAMPS)/constraints.txt 2>/dev/null)
TORCH_NOW := $(if $(TORCH_BEFORE),$(shell $(PY) -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null))

# torch comes first, alone and by the constraints file; later pip steps are held to whatever torch is there.
$(STAMPS)/tools: constraints.txt | $(STAMPS)/venv
	@$(if $(filter-out $(TORCH_BEFORE),$(TORCH_NOW)),echo "torch is $(TORCH_NOW) now; what was compiled for $(TORCH_BEFORE) is compiled again for it")
	@if ! $(PY) -c 'import torch' >/dev/null 2>&1 || [ "$(TORCH)" != torch ]; then \
	  echo "[2/3] installing $(TORCH) (can be a large download; progress: tail -f $(LOG))"; \
	  if [ "$(TORCH)" = torch ]; then held="-c constraints.txt"; else held=""; fi; \
	  $(call quietly,$(PY) -m pip install $$held $(TORCH)); \
	fi
	@{ grep -v '^torch==' constraints.txt; $(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))'; } \
	  > $(STAMPS)/constraints.txt
	@echo "[2/3] installing build tools"
	@$(call quietly,$(PY) -m pip install -c $(STAMPS)/constraints.txt setuptools pybind11 ninja numpy)
	@touch $@

# File I/O uses io_uring where liburing is there. Only root can have it installed; without it threads do the same work.
$(STAMPS)/liburing: | $(STAMPS)/venv
	@if ! $(CXX) -std=c++20 csrc/probe_liburing.cc -o /dev/null -luring 2>/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && { command -v apt-get || command -v dnf; } >/dev/null; then \
	    echo "      installing liburing (log: $(LOG))"; \
	    { if command -v apt-get; then \
	        export DEBIAN_FRONTEND=noninteractive; \
	        apt-get install -y liburing-dev || { apt-get update && apt-get install -y liburing-dev; }; \
	      else dnf install -y liburing-devel; fi; } >> $(LOG) 2>&1 || true; \
	  fi; \
	  $(CXX) -std=c++20 csrc/probe_liburing.cc -o /dev/null -luring 2>/dev/null || \
	    echo "      no liburing (package liburing-dev or liburing-devel, at least 2.2): file I/O will use threads"; \
	fi
	@touch $@

$(STAMPS)/package: pyproject.toml setup.py $(ENGINE) | $(STAMPS)/tools $(STAMPS)/liburing
	@echo "[3/3] compiling the engine and installing the package, editable, with development tools (log: $(LOG))"
	@start=$$SECONDS; \
	$(call quietly,$(PY) -m pip install -c $(STAMPS)/constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'); \
	echo "      ready after $$((SECONDS - start)) s"
	@mkdir -p build && echo $(VENV) > build/installed-by
	@touch $@

$(STAMPS)/package: $(STAMPS)/tools
.PHONY: again
again:
# The engine is built into the tree: another environment used there since means building it again.
ifneq ($(shell cat build/installed-by 2>/dev/null),$(VENV))
$(STAMPS)/package: again
endif
# So does another torch, which pip put there since: an engine fits the release that it was compiled with.
ifneq ($(TORCH_BEFORE),$(TORCH_NOW))
$(STAMPS)/tools: again
endif

# --- running ----------------------------------------------------------------------------------------------------
demo: setup
	$(PY) examples/demo.py --ranks $(RANKS) $(DEMO_ARGS)

# In an environment of its own: DeepSpeed brings dependencies that nothing else here needs.
bench:
	@$(MAKE) setup VENV=$(VENV)-bench EXTRAS=dev,deepspeed
	$(VENV)-bench/bin/python benchmarks/bench.py $(BENCH_ARGS)

# With the torch of PYTHON and nothing installed: such a machine may have its own torch, and reach no registry. The
# engine is built into the tree.
FROM ?= a
GPU_FILES ?= build/gpu
GPU_RESULTS ?= build/gpu/results
gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())' || { \
	  echo "make gpu: the torch of $(PYTHON) finds no accelerator here. Name another Python: make gpu PYTHON=..." >&2; exit 1; }
	MAX_JOBS=$(JOBS) $(PYTHON) setup.py -q build_ext --inplace
	@$(if $(filter a,$(FROM)),timeout 300 $(PYTHON) -m pytest -q tests/gpu || echo "tests/gpu: failed, or used up its five minutes; the stages follow" >&2,true)
	@mkdir -p $(GPU_FILES)
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py $(GPU_FILES) --results $(GPU_RESULTS) --from $(FROM)

# --- checking ---------------------------------------------------------------------------------------------------
# Tests lie by room below tests/null (one process) and tests/dist (several ranks).
ONE_PROCESS := $(wildcard tests/null$(ROOM:%=/%))
RANKED := $(strip $(wildcard tests/dist$(ROOM:%=/%)) $(if $(ROOM),,$(wildcard tests/gpu)))
ifeq ($(ONE_PROCESS)$(RANKED),)
$(error there are no tests of a room $(ROOM); there are: $(sort $(notdir $(filter-out %.py %__,$(wildcard tests/null/* tests/dist/*)))))
endif

check: $(if $(ROOM),setup,lint types)
	$(PY) -m pytest -q -n $(JOBS) -m "not slow" $(ONE_PROCESS) $(PYTEST_ARGS)

test: $(if $(ROOM),,lint types cpp-test) pytest

test-all: override PYTEST_ARGS += --thorough
test-all: test

test-part: setup
	$(PY) -m pytest -q -n $(JOBS) -m "not slow" tests/null $(PYTEST_ARGS)
	$(PY) -m pytest -q -n $(JOBS) -m "not alone" --durations 10 $(PART) $(PYTEST_ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) tests/run_mypy.py

cpp-test: setup
	$(MAKE) -C csrc test PYTHON=$(PY) JOBS=$(JOBS)

# Tests run side by side, but for those that hold ranks to a deadline. A failure of the first does not hide those of
# the others. pytest's status 5 says that it found no test, which is no failure where one room was asked for.
pytest: setup
	@status=0; tests() { $(PY) -m pytest "$$@" $(PYTEST_ARGS) || [[ $$? = 5 && -n "$(ROOM)" ]] || status=1; }; set -x; \
	$(if $(ONE_PROCESS),tests -n $(JOBS) --durations 20 $(ONE_PROCESS);) \
	$(if $(RANKED),tests -n $(JOBS) -m "not alone" --durations 30 $(RANKED);) \
	$(if $(RANKED),tests -m alone --durations 10 $(RANKED);) \
	exit $$status

clean:
	rm -rf build dist *.egg-info runtime/*.so zero_compiler/*.so zero_compiler/storage/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis $(STAMPS)
	find zero_compiler passes runtime tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	@if [ -f csrc/Makefile ]; then $(MAKE) -C csrc clean; fi

distclean: clean
	rm -rf $(VENV)
