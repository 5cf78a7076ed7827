# Everything a newcomer needs: `make demo`, `make test`. All targets work from a fresh clone with Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test check format bench gpu-test clean

install: $(INSTALLED)

$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PantheraML needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(INSTALLED)

demo: install
	$(BIN)/pantheraml demo

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/run.py --all
	$(BIN)/python benchmarks/run.py --table

gpu-test:
	$(PYTHON) -m pytest tests/gpu

clean:
	rm -rf .venv runs build dist src/*.egg-info
