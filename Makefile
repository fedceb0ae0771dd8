# make demo and make test each set up everything they need; make help lists the rest.
PYTHON ?= python3
VENV ?= .venv
# An extra package index that has the CPU build of torch, for machines whose default index does not.
TORCH_INDEX ?=
JOBS ?= 2
SUITE_SECONDS ?= 1440
PYTEST_ARGS ?=
CHROMIUM ?= /usr/bin/chromium
PAGE_ARGS ?=
# make gpu takes the Python that has the cuda extra, and writes these synthetic artifacts unless they are there.
GPU_PYTHON ?= $(PYTHON)
GPU_IDENTITIES ?= qwen3.6-27b/groupwise-int qwen3.6-27b/nvfp4 qwen3.8-27b/groupwise-int qwen3.6-27b/w8 qwen3.6-35b-a3b/groupwise-int
GPU_FOLDER ?= build/synthetic
# Whole programs are left out of the sanitizer's runs: their kernels are those of the other files.
SANITIZED ?= $(filter-out %/test_program.py %/test_recipes.py %/test_prefix.py %/test_speculation.py,$(wildcard tests/gpu/test_*.py))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PYTEST := timeout --kill-after=20 $(SUITE_SECONDS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
GPU_RUN := $(GPU_PYTHON) -c 'from ninfer_runtime.cli import main; main()'
RUN_STAMP := $(VENV)/.ninfer-run-stamp
TEST_STAMP := $(VENV)/.ninfer-test-stamp

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo test test-slow unit lint page bench gpu sanitize watch clean distclean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo "variables: PYTHON=$(PYTHON) VENV=$(VENV) JOBS=$(JOBS) TORCH_INDEX=$(TORCH_INDEX) PYTEST_ARGS=$(PYTEST_ARGS)"

setup: $(RUN_STAMP)  ## install the three commands with the CPU backend and the server into an environment

setup-test: $(TEST_STAMP)  ## the same with the test tools

demo: $(RUN_STAMP)  ## plan, build, verify, index and generate on the tiny checkpoints
	@$(BIN)/python scripts/demo.py

test: lint unit  ## lint, types and the test suite

unit: $(TEST_STAMP)  ## the test suite alone; PYTEST_ARGS adds options
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(TEST_STAMP)  ## the tests of minutes and gigabytes
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(TEST_STAMP)  ## ruff and mypy --strict over the tree
	$(BIN)/ruff check .
	$(BIN)/mypy

page: $(TEST_STAMP) build/page/.stamp build/page/dense.ninfer  ## the server's page in a headless Chromium (CHROMIUM=...); needs node
	node --test tests/serve/page/modules.test.mjs
	CHROMIUM=$(CHROMIUM) NINFER_PYTHON=$(BIN)/python node tests/serve/page/check.mjs build/page/dense.ninfer $(PAGE_ARGS)

build/page/.stamp: tests/serve/page/package.json
	@mkdir -p build/page
	cp tests/serve/page/package.json build/page/package.json
	npm install --prefix build/page --no-audit --no-fund --loglevel error
	@touch $@

build/page/dense.ninfer: $(TEST_STAMP)
	@mkdir -p build/page
	$(BIN)/ninfer-convert build examples/tiny/dense $@ --recipe bf16 --force

bench: $(TEST_STAMP)  ## every benchmark of scripts/bench_*.py, one after the other
	@for script in scripts/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

gpu:  ## on a machine with a card: the gpu tests, then every benchmark; writes bench/records/<date>-<gpu>.json
	$(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)
	@mkdir -p $(GPU_FOLDER)
	for identity in $(GPU_IDENTITIES); do \
	  file=$(GPU_FOLDER)/$$(echo $$identity | tr / _).ninfer; \
	  test -f $$file || $(GPU_RUN) bench synth $$identity $$file || exit 1; \
	done
	$(GPU_RUN) bench all $(foreach identity,$(GPU_IDENTITIES),$(GPU_FOLDER)/$(subst /,_,$(identity)).ninfer) \
	  --record bench/records --plot build/roofline.png

sanitize:  ## on a machine with a card: compute-sanitizer's memcheck and racecheck over every kernel's gpu tests
	for tool in memcheck racecheck; do \
	  compute-sanitizer --tool $$tool --target-processes all --error-exitcode 9 \
	    $(GPU_PYTHON) -m pytest -m gpu $(SANITIZED) $(PYTEST_ARGS) || exit 1; \
	done

watch:  ## the kernels on the emulator with every access watched: races, unfinished copies, early reads
	NINFER_WATCH=1 $(BIN)/python -m pytest tests/runtime/cuda $(PYTEST_ARGS)

clean:  ## remove build output and caches, keep the environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove the environment too
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11; choose another with make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# pip reads dependency groups since 25.1.
$(RUN_STAMP): pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(PIP) install 'pip>=25.1'
	$(PIP) install -c constraints/cpu.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) install -c constraints/cpu.txt -e '.[convert,cpu,serve]'
	@touch $@

$(TEST_STAMP): $(RUN_STAMP)
	$(PIP) install -c constraints/cpu.txt --group test
	@touch $@
