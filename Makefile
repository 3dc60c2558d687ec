# make demo   the tour: gates a small network, trains it, shrinks it, exports it
# make test   all tests
# make lint   ruff and mypy
# make clean  removes the environment, caches and builds
#
# Each target sets up what it needs in $(VENV); stamp files make the second call quick.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test lint clean

demo: $(VENV)/.stamp-demo
	$(BIN)/headgate demo

test: $(VENV)/.stamp-dev $(VENV)/.stamp-browser
	$(BIN)/python -m pytest

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch comes first and alone: the build chosen here satisfies every later requirement on it.
$(VENV)/.stamp-torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install '$(TORCH)'
	touch $@

$(VENV)/.stamp-demo: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) install -c constraints.txt -e '.[demo]'
	touch $@

# dev contains demo, so a demo after a test needs no second installation.
$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $(VENV)/.stamp-demo $@

# The report is tested in a real browser. Where none is installed and none can be, HEADGATE_BROWSER=none leaves these
# tests out; HEADGATE_BROWSER=/path/to/chromium names one.
$(VENV)/.stamp-browser: $(VENV)/.stamp-torch
	@if [ -n "$$HEADGATE_BROWSER" ] || command -v chromium chromium-browser google-chrome > /dev/null; then :; \
	elif command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium > /dev/null; \
	else echo "The tests of the report need Chromium: install it, or set HEADGATE_BROWSER=none"; exit 1; fi
	touch $@

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
