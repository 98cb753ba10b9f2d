# Every target does its own set-up, in .venv, from pyproject.toml and constraints.txt. The first run on a machine
# takes the time of the download; later ones cost nothing. PYTHON picks the interpreter (3.11 or newer); PIP_ARGS
# goes to pip as it is, for example to name an index that holds CPU builds of torch.
# Slow tests run WORKERS at a time: most of them wait for processes that start, or for deadlines.

PYTHON   ?= python3
PIP_ARGS ?=
WORKERS  ?= 2
BIN      := .venv/bin
READY    := .venv/.ready

.PHONY: help setup demo test check bench soak cases clean

help:
	@echo "make demo    a real training run: killed inside a save and once more right after the copy, resumed exactly"
	@echo "make test    everything: make check, then the slow, multi-process and GPU tests"
	@echo "make check   format, lint, types, architecture, fast tests (under 90 s)"
	@echo "make bench   the benchmarks, against torch.save, DCP and others (QUICK=1: small sizes, minutes)"
	@echo "make soak    thousands of deaths at random, then the example stopped, killed, damaged and moved (an hour and more)"
	@echo "make cases   which of the numbered cases have a test, and which have not"
	@echo "make clean   remove .venv and caches"

setup: $(READY)

$(READY): pyproject.toml constraints.txt tests/servers/azurite/package-lock.json
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "keepstep needs Python 3.11 or newer; set PYTHON=/path/to/python3.11 (found: $$($(PYTHON) --version))"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[dev]'
	@npm ci --silent --ignore-scripts --no-audit --no-fund --prefix tests/servers/azurite \
		|| echo "npm has not brought Azurite: the tests that need a store of Azure's kind are skipped"
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

check: $(READY)
	WORKERS=$(WORKERS) scripts/check

test: check
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "(slow or ranks or gpu) and not (soak or alone)" --durations=60
	$(BIN)/python -m pytest -m "alone and not soak"

bench: $(READY)
	$(BIN)/python benchmarks/run.py $(if $(QUICK),--quick)

soak: $(READY)
	scripts/soak

cases: $(READY)
	$(BIN)/python scripts/cases

clean:
	rm -rf .venv .venv-* build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples benchmarks scripts -name __pycache__ -type d -exec rm -rf {} +
