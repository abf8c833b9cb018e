# make demo    plan, prove and train a small GPT on four local processes
# make test    the tests on two workers, a real case of every promise; make test-all   with the long ones (marked slow)
# make fuzz    random plans of every model on four ranks against one process: all 456
# make check   ruff, mypy and the import contracts
# make validate RUNS=FILE.csv   published runs priced as plans, with the table of errors by source
# make setup   the environment in .venv (every target makes it when needed)

PYTHON := $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
TWO := -n 2 --dist loadfile --no-loadscope-reorder
SHAPED := $(shell grep -lE 'shaping|mark\.root' tests/*/test_*.py)

RUNS ?= published_runs.csv

.PHONY: setup demo fuzz test test-all validate check size clean

setup: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(PYTEST) -m 'root and not slow' $(SHAPED)
	$(PYTEST) $(TWO) -m 'not root and not slow'

fuzz: setup
	$(PYTEST) $(TWO) --timeout=1500 tests/whole/test_fuzz.py

test-all: setup
	$(PYTEST) --timeout=1500 -m root $(SHAPED)
	$(PYTEST) $(TWO) --timeout=1500 -m 'not root'

validate: setup
	OMP_NUM_THREADS=1 $(BIN)/autoddl validate $(RUNS) --workers 2

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

size: setup
	$(BIN)/python .ci/size.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
