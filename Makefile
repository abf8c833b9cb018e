# make demo    plan, prove and train a small GPT on four local processes
# make test    the tests         make test-all   with the long ones
# make fuzz    random plans of every model on four ranks against one process: all 240
# make check   ruff, mypy and the import contracts
# make setup   the environment in .venv (every target makes it when needed)

PYTHON := $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo fuzz test test-all check size clean

setup: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -q -m 'not slow'

fuzz: setup
	$(BIN)/python -m pytest -q --timeout=1500 tests/whole/test_fuzz.py

test-all: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

size: setup
	$(BIN)/python .ci/size.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
