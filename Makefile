# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Lines of accel, refmpc, vfl, protocols and bench that the tests' own processes ran; kernels compiled by numba, and what
# runs in processes that tests start, do not count.
define COVERAGE
import json
found = json.load(open("build/coverage.json"))["summary"]
lines = found["covered_lines"] + found["missing_lines"]
print(f"coverage: {100 * found['covered_lines'] / lines:.1f} % of {lines} lines (without compiled kernels and child processes)")
endef
export COVERAGE

# Names the tests that failed, for `test-again`; many failures are no accident and are not tried again.
define FAILED
import json, sys
failed = sorted(json.load(open(".pytest_cache/v/cache/lastfailed")))
if len(failed) > 3:
    sys.exit(f"{len(failed)} tests failed: they are not run again")
print("failed, and run once more, alone:", *failed, sep="\n  ")
endef
export FAILED

.PHONY: run test test-again test-all lint format docs clean

run: $(VENV)/.installed-run
	$(BIN)/python -m protocols.g_bmf --twin

test: $(VENV)/.installed-test
	mkdir -p build
	$(BIN)/python -m slipcover --json --out build/coverage.json -m pytest -n 2
	@$(BIN)/python -c "$$COVERAGE"

test-again:
	@$(BIN)/python -c "$$FAILED"
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 -m "heavy or not heavy" --timeout 3600

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-run: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[plots]"
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@ $(VENV)/.installed-run

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	touch $@
