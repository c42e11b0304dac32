# `make` alone says what there is. The first target that needs it makes .venv; nothing else has to be installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

.PHONY: help demo test test-full lint lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a tiny model and see its reward rise"
	@echo "make test       style, types and the fast tests"
	@echo "make test-full  every test, the long ones too"
	@echo "make lint       style and types alone"
	@echo "make lock       write the requirement locks anew (make lock UPGRADE=1: with the newest versions)"
	@echo "make clean      remove .venv and caches (outputs/ stays: it holds your runs)"

demo: $(RUNTIME)
	$(BIN)/headrace rl examples/reverse-text/rl.toml $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

test-full: $(DEV)
	$(BIN)/python -m pytest -m "full or not full" --session-timeout=14400 $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: $(DEV)
	$(BIN)/python scripts/lock.py $(if $(UPGRADE),--upgrade)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist

# The stamps lie inside .venv: whoever deletes it installs anew.
$(RUNTIME): requirements.lock pyproject.toml scripts/install.py
	@echo "setting up $(VENV)"
	@$(PYTHON) scripts/install.py runtime
	@touch $@

$(DEV): $(RUNTIME) requirements-dev.lock
	@$(PYTHON) scripts/install.py dev
	@touch $@
