# SPDX-License-Identifier: Apache-2.0
# Every target that needs the environment makes it first; on a fresh machine that takes some minutes, later none.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BENCH ?= wan2.1 --height 128 --width 128 --frames 5 --ranks 2 --tile-size 64x64 --tile-stride 48x48 --warmup 1 --repeats 5

BIN := $(VENV)/bin
RUN := $(BIN)/python tools/no_leftovers.py
PYTEST := $(RUN) $(BIN)/python -m pytest
# Tests that start processes of their own have the machine to themselves; the others share it.
PROCESSES := distributed or vllm or e2e
# pytest ends with 5 where ARGS chose none of a run's tests.
NONE_IS_FINE := || [ $$? -eq 5 ]

.DEFAULT_GOAL := help
.PHONY: help env demo bench test test-unit check docs format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

env: ## make or update the environment in .venv
	@$(PYTHON) tools/setup_env.py --venv $(VENV)

demo: env ## generate a clip on two ranks with a tiny model, and compare it with one rank
	@$(RUN) $(BIN)/python tools/demo.py $(ARGS)

bench: env ## time every way to share a VAE against one rank; ARGS="--repeats 3" adds flags, BENCH="..." says what instead
	@$(RUN) $(BIN)/vllm-omni-vae bench $(BENCH) $(ARGS)

test: env ## run every test that this machine can run; ARGS="-k name" chooses some
	@$(PYTEST) -n 2 --dist loadfile -m "not ($(PROCESSES))" $(ARGS) $(NONE_IS_FINE)
	@$(PYTEST) -m "$(PROCESSES)" $(ARGS) $(NONE_IS_FINE)

test-unit: env ## run the tests that start no server and no process group
	@$(PYTEST) -n 2 --dist loadfile -m "not ($(PROCESSES) or slow)" $(ARGS)

check: env ## lint, formatting, types, layers and generated pages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/generate_docs.py --check

docs: env ## write docs/generated anew from the code, and build all pages as a site in site/
	@$(BIN)/python tools/generate_docs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: env ## apply what `check` would ask for, where that can be done by a program
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the environment, caches and results
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist site demo-output out
	find vllm_omni_vae tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
