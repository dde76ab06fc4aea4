# `make train` and `make test` set up .venv by themselves; they need nothing but Python >= 3.11.
#
#   make train ARGS="--strategy optim --steps 200"    arguments of examples/train_gpt.py
#   make train RANKS=4                                another number of processes
#   make test PYTEST_ARGS="-k layout"                 arguments of pytest
#   make test WORKERS=4                               another number of files that are tested at once
#   make setup PIP_ARGS="--index-url ..."             arguments of pip
#   make ... PYTHON=python3.12                        the interpreter to build .venv from
#   make test TORCH=2.11.0                            another torch, in .venv-2.11.0; no lint

RANKS ?= 2
ARGS ?=
PYTEST_ARGS ?=
# Files of tests that run at once. Tests of several ranks wait for messages between them, so three files
# keep two cores busy; each takes up to 3 GB.
WORKERS ?= 3
PIP_ARGS ?=
TORCH ?=

# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

VENV := .venv$(addprefix -,$(TORCH))
RUN := $(VENV)/bin/python -m
# A file's tests stay in one process: they share fixtures.
PYTEST = $(RUN) pytest --numprocesses $(WORKERS) --dist loadfile
STAMP := $(VENV)/.installed
# The pinned versions. A torch that TORCH names replaces the pinned one, and triton is not pinned then.
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# Transformer Engine's Python files without its libraries, which te_on_cpu.py loads in
# tests/extensions/transformer_engine/. They are not among the packages, where others (peft) would take
# them for the library.
TE_PYTHON := $(VENV)/transformer_engine_python
# Packages with which tests/programs train: the extra `programs`. torchtitan, triton, torchao and
# libraries of optimizers are in a folder of their own: torch, transformers and PEFT would use a triton,
# a torchao or a bitsandbytes that is among the packages.
PROGRAMS := $(VENV)/.programs
TORCHTITAN := $(VENV)/torchtitan
# MkDocs and its plugins, in an environment of their own. They read the package without importing it.
DOCS := $(VENV)/docs
DOCS_STAMP := $(DOCS)/.installed
SITE ?= build/site

# One thread for each rank: ranks share the cores. Set it to use more.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: help setup train megatron pipeline test test-all lint format bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make train    train a small GPT on real text (ARGS=\"...\", RANKS=2)"
	@echo "make megatron train by Megatron-Core's names, tensor x data parallel on 2 x 2 ranks"
	@echo "make pipeline train the GPT in pipeline stages, pipeline x data parallel on 2 x 2 ranks"
	@echo "make test     lint, types, and all tests that do not take long (CHANGED=main: only those"
	@echo "              that the changes since main need)"
	@echo "make test-all the same with all tests, also of programs that it installs (TRL, torchtitan, ...)"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff rewrite the files"
	@echo "make bench    every benchmark, one after the other"
	@echo "make docs     the documentation as a site, in build/site/index.html"
	@echo "make setup    build $(VENV) and nothing else"
	@echo "make clean    remove .venv, caches and the output of runs"

setup: $(STAMP)
	@:

# The stamp names the folder in which it was made. Set up again if this is another folder (the tree was
# moved or copied, and the package would be imported from the old place), or if Python is missing.
ifneq ($(shell $(VENV)/bin/python -c pass 2>/dev/null && cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "fsdp_engine needs Python >= 3.11; found none. Set PYTHON=..." >&2; exit 1; }
	@if $(VENV)/bin/python -c pass 2>/dev/null; then \
		echo "Bringing $(VENV) up to date"; \
	else \
		echo "Building $(VENV) with $$($(PYTHON) --version) (once; a minute or two)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/; /^triton==/d' constraints.txt > $(CONSTRAINTS))
	@$(RUN) pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint $(CONSTRAINTS) --editable ".[test,examples]"
	@$(RUN) pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint $(CONSTRAINTS) --no-deps --ignore-requires-python megatron-core
	@$(RUN) pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint $(CONSTRAINTS) --no-deps --upgrade --target $(TE_PYTHON) transformer_engine
	@$(VENV)/bin/python -c "import torch; print('Ready: torch', torch.__version__)"
	@echo "$(CURDIR)" > $@

$(PROGRAMS): $(STAMP)
	@echo "Installing the packages with which tests/programs train"
	@$(RUN) pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint $(CONSTRAINTS) --editable ".[programs]"
	@$(RUN) pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint $(CONSTRAINTS) --no-deps --upgrade --target $(TORCHTITAN) \
		torchtitan triton torchao bitsandbytes pytorch_optimizer schedulefree liger-kernel axolotl
	@touch $@

train: $(STAMP)
	@$(RUN) torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		examples/train_gpt.py $(ARGS)

megatron: $(STAMP)
	@$(RUN) torch.distributed.run --standalone --nproc-per-node 4 \
		examples/megatron_style_loop.py --tensor-parallel 2 $(ARGS)

pipeline: $(STAMP)
	@$(RUN) torch.distributed.run --standalone --nproc-per-node 4 \
		examples/train_pipeline.py --pipeline 2 $(ARGS)

# PYTEST_ARGS can select any tests, also those that take long; CHANGED=main runs the tests that the
# changes since that branch need. Types are checked with the pinned torch only. Tests start many
# processes. The package is compiled first, so that they import bytecode even if
# PYTHONDONTWRITEBYTECODE is set.
test: $(if $(TORCH),$(STAMP),lint)
	@$(RUN) compileall -q fsdp_engine tests
	@$(PYTEST) $(or $(PYTEST_ARGS),-m "not thorough and not programs" \
		$(if $(CHANGED),$$($(RUN) tools.changed_tests $(CHANGED))))

test-all: $(if $(TORCH),$(STAMP),lint) $(PROGRAMS)
	@$(RUN) compileall -q fsdp_engine tests
	@$(PYTEST)

lint: $(STAMP)
	@echo "ruff check"
	@$(RUN) ruff check .
	@echo "ruff format"
	@$(RUN) ruff format --check .
	@echo "mypy"
	@$(RUN) mypy

format: $(STAMP)
	@$(RUN) ruff check --fix-only --quiet .
	@$(RUN) ruff format .

bench: $(STAMP)
	@for script in $(filter-out benchmarks/harness.py,$(wildcard benchmarks/[a-z]*.py)); do \
		echo "== $$script"; $(VENV)/bin/python $$script || exit 1; \
	done

$(DOCS_STAMP): constraints.txt
	@test -n "$(PYTHON)" || { echo "The site needs Python >= 3.11; found none. Set PYTHON=..." >&2; exit 1; }
	@echo "Installing MkDocs in $(DOCS)"
	@$(DOCS)/bin/python -c pass 2>/dev/null || $(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint constraints.txt mkdocs mkdocs-material "mkdocstrings[python]" ruff
	@touch $@

docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --strict --site-dir "$(abspath $(SITE))"
	@echo "$(SITE)/index.html"

clean:
	rm -rf .venv .venv-* runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
