# Needs nothing but Python >= 3.11 and make, and Docker for `containers`. Every target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
# Processes that run tests: two for each of two cores, since the slow tests mostly wait. One alone where they share a
# Redis that is there, because each test empties it.
TESTERS ?= $(if $(MINISGL_TEST_REDIS_URL),1,4)

.PHONY: venv serve bench attack test night chaos recovery soak clients containers lint types format docs clean gpu-check gpu-wheels

# The library of kernels is compiled again when C changed, which installs nothing.
venv: .venv/.installed
	@$(BIN)/python -m stages.generate.kernels.build

.venv/.installed: pyproject.toml hatch_build.py
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("MiniSGL needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run: make venv PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing MiniSGL into .venv; torch is a large download, this takes a few minutes once."
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) 'torch>=2.11,<=2.13.0'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable '.[dev]'
	@touch $@

serve: venv
	@$(BIN)/minisgl serve $(if $(MODEL),--model '$(MODEL)') $(ARGS)

bench: venv
	@$(BIN)/minisgl bench compare $(ARGS)

attack: venv
	@PYTHONPATH=tests $(BIN)/python -m chaos.attack $(ARGS)

# One thread in each process: many of them share the cores, and threads that wait by spinning would starve the others.
test: export OMP_NUM_THREADS ?= 1
test: venv
	$(BIN)/python -m pytest -n $(TESTERS) --dist loadgroup --no-loadscope-reorder --durations=15 $(ARGS)

night:
	@.ci/night

# With WHEELS=folder it needs no venv and no network, only a python3 that has torch, numpy, transformers, safetensors.
ifdef WHEELS
gpu-check:
	@$(PYTHON) -m ops.bench.gpu --wheels '$(WHEELS)' $(ARGS)
else
gpu-check: venv
	@$(BIN)/python -m ops.bench.gpu $(ARGS)
endif

gpu-wheels: venv
	@$(BIN)/python -m ops.bench.wheels '$(or $(DIR),wheels)'

chaos: venv
	@PYTHONPATH=tests $(BIN)/python -m chaos.driver $(ARGS)

recovery soak: venv
	@PYTHONPATH=tests $(BIN)/python -m chaos.$@ $(ARGS)

clients: venv
	@PYTHONPATH=tests:. $(BIN)/python tests/clients/run.py $(ARGS)

containers:
	@$(PYTHON) tests/docker/smoke.py $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv
	$(BIN)/mypy

# Writes the tables of docs/ that are made from code: fields, flags, metrics.
docs: venv
	@PYTHONPATH=tests:. $(BIN)/python tests/support/generated_docs.py

clean:
	rm -rf .venv .clients build dist .mypy_cache .ruff_cache .pytest_cache stages/generate/kernels/libminisgl.*
