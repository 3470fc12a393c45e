# make demo   fits the bundled data and shows the result        make test   lint, types and tests
# make test-federation  the deployments that take minutes
# make test-engines  fits on Ray and Spark, in an environment of their own (Spark needs Java)
# make test-browser  the report and the site in Chromium (needs chromium and chromedriver)
# make bench  the speed benchmarks                              make clean  removes the environments
# make docs   the documentation site, in site/
# make bench-report  runs them beside other programs and writes docs/benchmarks (needs Rscript with lme4 and glmmTMB for these)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit test-federation test-engines test-browser bench bench-report docs clean

demo: $(VENV)/.installed
	$(BIN)/covey demo

test: lint types unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not federation and not browser and not engines" -n auto --dist loadfile

test-federation: $(VENV)/.installed-dev
	COVEY_FUZZ_SECONDS=600 $(BIN)/python -m pytest -m federation tests/federation

test-engines: $(VENV)-engines/.installed
	$(VENV)-engines/bin/python -m pytest -m engines tests/engines

test-browser: $(VENV)/.installed-dev docs
	$(BIN)/python -m pytest -m browser tests/browser

bench: $(VENV)/.installed-dev
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

bench-report: $(VENV)/.installed-dev $(VENV)-peers/.installed
	COVEY_PEERS_PYTHON=$(CURDIR)/$(VENV)-peers/bin/python $(BIN)/python benchmarks/report.py

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf site $(VENV) $(VENV)-peers $(VENV)-engines covey-demo covey-results

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "covey needs Python 3.11 or newer; run 'make PYTHON=/path/to/python3.11'"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[dev]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[docs]"
	@touch $@ $(VENV)/.installed

$(VENV)-peers/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

$(VENV)-engines/.installed: pyproject.toml tests/engines/requirements.txt
	$(PYTHON) -m venv $(VENV)-engines
	$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[ray,duckdb]" -r tests/engines/requirements.txt
	@touch $@
