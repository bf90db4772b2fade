# SPDX-License-Identifier: MIT
#
# The developer's one entry; GNU make 3.81 is enough.

PYTHON     ?= python3
JOBS       ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
BUILD_TYPE ?= Release
CMAKE_ARGS ?=

# variables of the command line reach programs: how long to fuzz, and to load a server under ThreadSanitizer
export FUZZ_SECONDS SOAK_MINUTES

# the configurations of KVSplit's published tables
PUBLISHED = FP16,K8V8,K8V4,K4V8,K4V4

VENV = .venv
# The environment's programs first: it has cmake and ninja where the system has none.
RUN  = env PATH="$$PWD/$(VENV)/bin:$$PATH"
# `env` looks programs up itself: make 3.81 would look along its own PATH.

.DEFAULT_GOAL := help
.PHONY: help venv source build build-upstream package test test-patches test-cpp test-metal test.metal test-python test-model test-slow test.slow test-asan test-tsan test-valgrind test-fuzz test-hours bench-cpu bench.cpu bench-metal bench.metal bench reproduce sweep demo lint format clean

help: ## say what can be made
	@echo "make TARGET [PYTHON=python3] [JOBS=N] [BUILD_TYPE=Release] [CMAKE_ARGS=...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

venv: ## make or update .venv: requirements, build tools, llama-cpp-python without a compile
	@$(PYTHON) scripts/setup_venv.py --venv $(VENV) --dev

source: ## fetch the pinned source and apply the patches
	@$(PYTHON) scripts/patchq apply

build: venv ## build the libraries, tools and C++ tests in build/
	@$(RUN) sh -c 'g=; [ -f build/CMakeCache.txt ] || ! command -v ninja >/dev/null || g="-G Ninja"; \
	    cmake -S . -B build $$g -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DKVSPLIT_BUILD_TESTS=ON \
	        -DPython3_EXECUTABLE="$$PWD/$(VENV)/bin/python" $(CMAKE_ARGS)'
	@$(RUN) cmake --build build --parallel $(JOBS)

build-upstream: venv ## build the pinned release without patches in build-upstream/, to compare with
	@$(RUN) sh -c 'g=; [ -f build-upstream/CMakeCache.txt ] || ! command -v ninja >/dev/null || g="-G Ninja"; \
	    cmake -S . -B build-upstream $$g -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DKVSPLIT_UPSTREAM=ON \
	        -DPython3_EXECUTABLE="$$PWD/$(VENV)/bin/python" $(CMAKE_ARGS)'
	@$(RUN) cmake --build build-upstream --parallel $(JOBS) --target llama-completion

package: build ## install the Python package into .venv, from the same build
	@$(RUN) SKBUILD_CMAKE_BUILD_TYPE=$(BUILD_TYPE) python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .

test: package ## run every test this machine can run, and count the skips
	@$(RUN) python scripts/run_tests.py patches cpp metal python model bindings

test-patches: venv ## lock, fetch step and patch series
	@$(RUN) python scripts/run_tests.py patches

test-cpp: package ## C++ tests, ours and upstream's
	@$(RUN) python scripts/run_tests.py cpp

test-metal: package ## the Metal backend: a Mac's device, or the emulated one
	@$(RUN) python scripts/run_tests.py metal

test.metal: test-metal
test.slow: test-slow

test-python: package ## the Python package
	@$(RUN) python scripts/run_tests.py python

test-model: package ## tools and package on a real model
	@$(RUN) python scripts/run_tests.py model bindings

test-asan: venv ## C++ tests, operations and text under AddressSanitizer and UBSan, in build-asan/; needs clang 19
	@$(RUN) env JOBS=$(JOBS) CMAKE_ARGS="$(CMAKE_ARGS)" python tests/sanitizers/run.py asan

test-tsan: venv ## attention and llama-server under ThreadSanitizer, in build-tsan/: make test-tsan [SOAK_MINUTES=0.5]
	@$(RUN) env JOBS=$(JOBS) CMAKE_ARGS="$(CMAKE_ARGS)" python tests/sanitizers/run.py tsan

test-valgrind: build ## the codec under valgrind
	@$(RUN) python tests/sanitizers/run.py valgrind

test-fuzz: venv ## fuzz what reads policies, metadata and saved states, in build-asan/: make test-fuzz [FUZZ_SECONDS=20]
	@$(RUN) env JOBS=$(JOBS) CMAKE_ARGS="$(CMAKE_ARGS)" python tests/sanitizers/run.py fuzz
	@$(RUN) python tests/fuzz/run.py

test-slow: package build-upstream ## what takes minutes: output against an unpatched build
	@$(RUN) python scripts/run_tests.py slow

sweep: package ## quality of every pair of widths on SmolLM2, an hour or two, continued where it stopped: make sweep TEXT=FILE
	@test -n "$(TEXT)" || { echo "make sweep TEXT=FILE: which text? (wikitext-2's wiki.test.raw is usual)" >&2; exit 2; }
	@$(RUN) kvsplit models pull smollm2
	@$(RUN) python scripts/sweep_pairs.py --model smollm2 --text "$(TEXT)" --chunks 4 --set pairs --out kvsplit-results/pairs.jsonl
	@$(RUN) python scripts/sweep_pairs.py --model smollm2 --text "$(TEXT)" --chunks 16 --set formats --out kvsplit-results/formats.jsonl

bench: package ## memory, speed, quality and retrieval at several lengths, then figures and a report, continued where it stopped: make bench [MODEL=FILE] [TEXT=FILE] [BENCH="--config K8V4,K6V5"]
	@test -n "$(MODEL)" || $(RUN) kvsplit models pull smollm2
	@mkdir -p kvsplit-results
	@$(RUN) kvsplit bench "$(or $(MODEL),smollm2)" $(if $(TEXT),--text "$(TEXT)") --out kvsplit-results/bench.jsonl --resume $(BENCH)
	@$(RUN) kvsplit plot kvsplit-results/bench.jsonl --out kvsplit-results/figures --force
	@$(RUN) kvsplit report kvsplit-results/bench.jsonl --out kvsplit-results/report.html --force

reproduce: package ## KVSplit's published memory table and how keys and values differ in quality, half an hour: make reproduce TEXT=FILE
	@test -n "$(TEXT)" || { echo "make reproduce TEXT=FILE: which text? (wikitext-2's wiki.test.raw is usual)" >&2; exit 2; }
	@$(RUN) kvsplit models pull smollm2
	@$(RUN) kvsplit models pull gemma3-270m
	@mkdir -p kvsplit-results
	@$(RUN) python tests/python/synth.py kvsplit-results/tinyllama-cache.gguf --n-layer 22 --n-head-kv 4
	@$(RUN) kvsplit bench kvsplit-results/tinyllama-cache.gguf --metric memory --seq-len 8192 --config "$(PUBLISHED)" --out kvsplit-results/published-memory.jsonl --resume
	@$(RUN) kvsplit bench smollm2 --metric memory,perplexity --seq-len 2048 --config "$(PUBLISHED)" --text "$(TEXT)" --out kvsplit-results/ordering-smollm2.jsonl --resume
	@$(RUN) kvsplit bench gemma3-270m --metric memory,perplexity --seq-len 2048 --config "$(PUBLISHED)" --text "$(TEXT)" --out kvsplit-results/ordering-gemma.jsonl --resume

test-hours: package ## what takes an hour or more
	@$(RUN) python scripts/run_tests.py hours

bench-cpu: package build-upstream ## decode and prefill over depth beside the unpatched release, about an hour on an idle machine, continued where it stopped: make bench-cpu [BENCH="--model tinyllama"]
	@$(RUN) kvsplit models pull smollm2
	@$(RUN) kvsplit models pull gemma3-270m
	@mkdir -p kvsplit-results
	@$(RUN) python scripts/bench_cpu.py --out kvsplit-results/cpu-attention.jsonl --resume $(BENCH)

bench.cpu: bench-cpu

bench-metal: package ## memory, speed and quality on this machine's device, rows to kvsplit-results: make bench-metal [MODEL=FILE] [CTX=8192]
	@$(RUN) kvsplit doctor
	@test -n "$(MODEL)" || $(RUN) kvsplit models pull smollm2
	@$(RUN) kvsplit compare --model "$(or $(MODEL),smollm2)" --ctx "$(or $(CTX),8192)" --config "F16;K8V8;K8V4;K6V4;K4V4" --repeat 5

bench.metal: bench-metal

demo: package ## text under K8V4, then a table and a chart
	@$(RUN) kvsplit models pull smollm2
	@$(RUN) kvsplit run --model smollm2 --kvq 8 -p "The key-value cache of a language model" -n 64
	@$(RUN) kvsplit compare --model smollm2 --quick

lint: venv ## ruff, mypy, shell syntax
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@bash -n scripts/*.sh .ci/run

format: venv ## ruff's own fixes and layout
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

clean: ## remove what the builds made: build/, build-upstream/, build-asan/ and build-tsan/
	@for d in build build-upstream build-asan build-tsan; do \
	    if [ ! -e $$d ]; then :; \
	    elif [ -f $$d/CMakeCache.txt ]; then rm -r -- $$d; \
	    else echo "$$d is not a build folder: left alone"; fi; done
