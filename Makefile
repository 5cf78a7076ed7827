# Everything a newcomer needs: `make demo`, `make test`. All targets work from a fresh clone with Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Files of tests are spread over the cores, one thread each: a second one is of no use to models this small. Runs that
# tests start may have as many as there are cores; those wait asleep, since cores that others need are not for spinning.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: install install-dev demo test equality check format bench gpu-test clean

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

demo: install
	$(BIN)/pantheraml demo

# Triton decides when it is imported whether kernels are interpreted, so the interpreter gets a process of its own.
test: install-dev
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter

# Every mode x method x shares x accumulation x packing x clipping x family against one process; 16 minutes on two cores.
equality: install-dev
	$(BIN)/python -m pytest tests/distributed/test_equality_matrix.py tests/distributed/test_guard.py --equality full

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install-dev
	$(BIN)/python benchmarks/run.py --all
	$(BIN)/python benchmarks/run.py --table

gpu-test:
	$(PYTHON) -m pytest tests/gpu

clean:
	rm -rf .venv runs build dist src/*.egg-info
