# Main targets: `make run` runs a demonstration, `make test` runs every check that CI runs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup dev run test bench soak clean

setup: .venv/.ready

# Also installs the development tools, which `make run` does not need.
dev: .venv/.ready-dev

# Runs again only when pyproject.toml has changed.
.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "culm needs Python 3.11 or later; hint: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing culm into .venv"
	@$(PIP) --editable .
	@touch $@

.venv/.ready-dev: .venv/.ready
	@echo "installing the development tools into .venv"
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) --group dev
	@touch $@

run: setup
	@$(BIN)/python examples/first_run.py

test: dev
	@./check

# Takes minutes; `make bench ARGS=--quick` is shorter.
bench: dev
	@$(BIN)/python -m bench.fanout $(ARGS)
	@$(BIN)/python -m bench.http $(ARGS)
	@$(BIN)/python -m bench.runs $(ARGS)
	@$(BIN)/python -m bench.models $(ARGS)
	@$(BIN)/python -m bench.tools $(ARGS)
	@$(BIN)/python -m bench.fleet $(ARGS)
	@$(BIN)/python -m bench.tree $(ARGS)
	@$(BIN)/python -m bench.mirror $(ARGS)
	@$(BIN)/python -m bench.cli $(ARGS)
	@$(BIN)/python -m bench.growth $(ARGS)
	@$(BIN)/python -m bench.baseline

# The broad suite, then new simulation seeds: `make soak ARGS='--minutes 60'`.
soak: dev
	@./check --broad
	@$(BIN)/python -m tests.sim.soak $(ARGS)

# Real servers killed in the middle of their answers: `make torture ARGS='--kills 50'`.
torture: dev
	@$(BIN)/python -m tests.live.text_kills $(ARGS)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis bench/out hunt
