# Everything a newcomer needs: `make demo`, `make test`. All targets work from a fresh clone with Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Test files are spread over the cores, with one thread each: more does not help models this small. Tests start runs with
# several processes of their own, so idle OpenMP threads sleep instead of spinning. CI sets PYTEST_FLAGS.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

.PHONY: install install-dev litellm unsloth demo test test-rest test-all equality check docs format bench gpu-test clean

install: .venv/.installed
install-dev: .venv/.installed-dev

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PantheraML needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv/.installed-dev: .venv/.installed requirements-dev.lock
	$(PIP) -r requirements-dev.lock
	touch $@

# It wants another major version of `openai` than the tests of the service do, so it has an environment of its own.
litellm: .venv/litellm/.installed

.venv/litellm/.installed: Makefile | .venv/.installed-dev
	$(PYTHON) -m venv .venv/litellm
	.venv/litellm/bin/python -m pip install --quiet --disable-pip-version-check litellm==1.106.2
	touch $@

# Unsloth wants older versions of transformers and TRL, so it gets a folder that only its tests read.
unsloth: .venv/unsloth/.installed

.venv/unsloth/.installed: requirements-unsloth.lock | .venv/.installed-dev
	rm -rf .venv/unsloth
	$(PIP) --no-deps --target .venv/unsloth -r requirements-unsloth.lock
	touch $@

demo: install
	$(BIN)/pantheraml demo

# Unit tests, a part of the distributed ones, a few end-to-end runs; `make test-all` adds the rest (marker `extended`).
test: install-dev
	$(PYTEST) -m "not extended" --durations 40 --durations-min 5

# Triton decides at import whether kernels are interpreted, so the interpreter gets a process of its own.
test-rest: install-dev litellm unsloth
	$(PYTEST) -m extended --durations 40 --durations-min 5
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter

test-all: test test-rest

# Every mode x method x shares x accumulation x packing x clipping x family against one process; 16 minutes on two cores.
equality: install-dev
	$(BIN)/python -m pytest tests/distributed/test_equality_matrix.py tests/distributed/test_guard.py --equality full

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/zensical build --strict --config-file mkdocs.yml

docs: install-dev
	$(BIN)/zensical build --strict --clean --config-file mkdocs.yml

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install-dev
	$(BIN)/python benchmarks/run.py --all
	$(BIN)/python benchmarks/run.py --table

# One GPU serves many test processes; each computes little on the CPU.
gpu-test:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/gpu

clean:
	rm -rf .venv runs build dist src/*.egg-info
