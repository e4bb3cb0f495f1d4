# Everything sets itself up in its own virtual environment; a second run is quick.
#   make demo    the main job on the embedded simulated server
#   make test    all tests but those of a real engine
#   make test-vllm  the whole path on real vLLM for the CPU: installs it (2.5 GB) where that is possible
#   make lint    ruff, format check, mypy
#   make bench   benchmarks (pytest-benchmark)
#   make reports rewrite reports/

VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo
SHARED ?= ../shared

# The first Python that is new enough; a shim that cannot start its version is passed over.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

.PHONY: demo test test-vllm lint bench reports clean

demo: $(VENV)/.calib-run
	$(BIN)/calib demo --folder $(DEMO)

test: $(VENV)/.calib-dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup --ignore tests/benchmarks --ignore tests/vllm $(ARGS)

test-vllm: $(VENV)/.calib-dev
	@if PYTHON=$(BIN)/python tests/vllm/install.sh; then $(BIN)/python -m pytest tests/vllm $(ARGS); \
	else echo "vLLM for the CPU could not be installed (see above): its tests are skipped"; fi

lint: $(VENV)/.calib-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.calib-dev
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only --benchmark-columns=min,median,max,rounds $(ARGS)

reports: $(VENV)/.calib-dev
	$(BIN)/python -m calib.published --out reports/published.md
	$(BIN)/python -m tests.reports.reference
	@if test -d "$(SHARED)"; then $(BIN)/python -m tests.reports.optimum --shared "$(SHARED)" --out reports/optimum.md; \
	$(BIN)/python -m tests.reports.staged --shared "$(SHARED)" --out reports/staged.md; \
	$(BIN)/python -m tests.reports.calibration --shared "$(SHARED)" --out reports/calibration.md; \
	else echo "reports/optimum.md, staged.md and calibration.md need recorded data: make reports SHARED=/path/to/it"; fi

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "calib needs Python 3.11 or newer; none was found. Name one: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.calib-run: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.calib-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.calib-run

clean:
	rm -rf $(VENV) $(DEMO) build dist
