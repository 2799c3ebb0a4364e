# Two commands matter: `make run` shows culm at work, `make test` runs every check that CI runs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run test bench soak clean

setup: .venv/.ready

# Repeats only when what it installs has changed.
.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "culm needs Python 3.11 or later; hint: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@echo "installing culm and its development tools into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
	@touch $@

run: setup
	@$(BIN)/python examples/first_run.py

test: setup
	@./check

# Minutes, not seconds: `make bench ARGS=--quick` for a first look.
bench: setup
	@$(BIN)/python -m bench.fanout $(ARGS)
	@$(BIN)/python -m bench.http $(ARGS)
	@$(BIN)/python -m bench.runs $(ARGS)
	@$(BIN)/python -m bench.models $(ARGS)
	@$(BIN)/python -m bench.tools $(ARGS)
	@$(BIN)/python -m bench.fleet $(ARGS)
	@$(BIN)/python -m bench.tree $(ARGS)
	@$(BIN)/python -m bench.mirror $(ARGS)
	@$(BIN)/python -m bench.cli $(ARGS)

# More seeds of the simulation than the suite has: `make soak ARGS='--minutes 60'`.
soak: setup
	@$(BIN)/python -m tests.sim.soak $(ARGS)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis bench/out
