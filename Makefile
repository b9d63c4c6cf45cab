# One command for everything; `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV := .venv
SKY_VENV := .venv-sky
PEERS_VENV := .venv-peers
BIN := $(VENV)/bin
# Newest first: the first interpreter that is new enough makes the environment.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# Compiled once here, not by every process that imports torch (8 seconds of CPU against 3).
UV := $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --constraint constraints.txt
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust_core -name '*.rs' -o -name '*.toml' -o -name '*.proto')

# Tests that load them find them built: none of them waits for a compiler within its own time limit.
DOUBLES := cargo build --quiet --package sky-monarch-double-hip --package sky-monarch-double-ccl

.PHONY: help
help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.train ## Train four replica groups here, kill one, watch it rejoin.
	$(BIN)/sky-monarch up task_templates/quickstart.yaml --inject kill:replica=1,rank=0,step=300
	@$(BIN)/sky-monarch logs quickstart | grep --only-matching 'held-out loss.*'

.PHONY: test
test: $(VENV)/.train $(VENV)/.dev ## Run every fast test: Rust, unit, integration.
	cargo test --workspace --quiet
	cargo build --quiet --package sky-monarch-py --features mutants
	$(DOUBLES)
	$(BIN)/python -m pytest tests/integration tests/unit --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 15 -m 'not mutant and not slow and not sky'

.PHONY: test-mutants
test-mutants: test-mutants-core test-mutants-runs ## Leave out one step of recovery at a time: its tests have to fail (slow).

.PHONY: test-mutants-core
test-mutants-core: ## Those of the Rust core's scenarios.
	cargo test --package sky-monarch-core --features mutants --quiet --test agent -- --skip holds
	cargo test --package sky-monarch-core --features mutants --quiet --test tunnel each_defect

.PHONY: test-mutants-runs
test-mutants-runs: $(VENV)/.train $(VENV)/.dev ## Those of Python and of whole runs.
	$(DOUBLES)
	$(BIN)/python -m pytest tests/mutants tests/integration -m mutant

.PHONY: test-slow
test-slow: $(VENV)/.train $(VENV)/.dev ## Run what takes minutes: many runs, restarts and saves in a row.
	$(DOUBLES)
	$(BIN)/python -m pytest tests/slow
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile tests/integration tests/unit -m slow

.PHONY: test-net
test-net: $(VENV)/.train $(VENV)/.dev ## Cut links between hosts in network namespaces (needs root and iproute2).
	$(BIN)/python -m pytest tests/net

.PHONY: test-sky
test-sky: $(SKY_VENV)/.made ## Let the real SkyPilot read the tasks of our plans.
	$(SKY_VENV)/bin/python -m pytest tests/unit/test_skypilot_tasks.py tests/unit/test_skypilot_requests.py

.PHONY: test-abi
test-abi: $(VENV)/.train $(VENV)/.dev ## Hold what we declare of vendors' libraries to the vendors' own words (70 MB, once).
	bash tests/abi/fetch.sh build/abi $(BIN)/python
	cargo run --quiet --package sky-monarch-core --example abi > build/abi/declared.json
	$(BIN)/python -m pytest tests/abi

.PHONY: test-rdma
test-rdma: ## Move memory over real RoCE v2, in virtual machines (needs QEMU, or root and Debian to get it; 70 MB, once).
	$(PYTHON) -m tests.rdma

# However it ends, nothing goes on: a run's head is made to outlive who started it, but not this namespace.
ALONE := unshare --mount --pid --fork --kill-child=KILL --mount-proc bash -c '"$$@"; exit "$$?"' alone

.PHONY: e2e-slurm
e2e-slurm: $(SKY_VENV)/.made ## Launch, lose a rank and lose a node on a real Slurm through SkyPilot (needs root).
	$(ALONE) $(SKY_VENV)/bin/python -m pytest tests/e2e -m 'not slow' --durations 0

.PHONY: e2e-slurm-all
e2e-slurm-all: $(SKY_VENV)/.made ## The same, with scaling, pre-emption, a killed controller, and the cluster by itself.
	$(ALONE) $(SKY_VENV)/bin/python -m pytest tests/e2e --durations 0

.PHONY: lint
lint: $(VENV)/.train $(VENV)/.dev ## Check style, types and lints.
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml sky_monarch._core

.PHONY: bench
bench: $(VENV)/.train $(VENV)/.dev $(PEERS_VENV)/.made ## Measure; prints JSON lines.
	$(BIN)/python -m benches

.PHONY: bench-instructions
bench-instructions: $(VENV)/.dev ## Count the instructions of one message between actors (needs valgrind).
	$(BIN)/python -m benches instructions

.PHONY: test-peers
test-peers: $(VENV)/.train $(VENV)/.dev $(PEERS_VENV)/.made ## Let one program run with Monarch and with ours, and see the same.
	$(BIN)/python -m pytest tests/peers

.PHONY: peers
peers: $(PEERS_VENV)/.made ## Install Monarch and Ray, beside which `python -m benches actors` measures.

.PHONY: docs
docs: $(VENV)/.docs $(VENV)/.train ## Build the documentation into site/.
	$(BIN)/mkdocs build --strict --quiet

.PHONY: wheel
wheel: $(VENV)/.dev ## Build the wheel into dist/.
	$(BIN)/uv build --wheel --python $(BIN)/python --out-dir dist

.PHONY: clean
clean: ## Remove what the build made (the environment too).
	rm -rf $(VENV) $(SKY_VENV) $(PEERS_VENV) build dist site target *.egg-info sky_monarch/*.so

# --- environment ---------------------------------------------------------------------------------

$(VENV)/.base: constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found. Fix: install python3.11 and its venv module, or run 'make PYTHON=/path/to/python'." >&2; exit 1; }
	@command -v cargo >/dev/null || { echo "error: no Rust toolchain found. Fix: install one from https://rustup.rs (1.88 or newer)." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "error: '$(PYTHON) -m venv' failed. Fix: install its venv module (Debian: apt-get install python3-venv)." >&2; exit 1; }
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

$(VENV)/.train: $(VENV)/.base pyproject.toml $(RUST_SOURCES)
	@$(BIN)/python -c 'import torch' 2>/dev/null || echo "Installing torch: about 3 GB to download, once."
	SETUPTOOLS_RUST_CARGO_PROFILE=release $(UV) --quiet --editable '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(UV) --quiet --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.base pyproject.toml
	$(UV) --quiet --group docs
	@touch $@

# SkyPilot pins what others do not, so it has an environment of its own, in which this tree is found as it is.
# It makes a wheel of itself for each host: for that it needs pip, setuptools and wheel at run time. What it does not
# have itself it finds in the other environment: a head serves its groups' rendezvous with torch.
$(SKY_VENV)/.made: $(VENV)/.train $(VENV)/.base pyproject.toml constraints.txt
	@test -x $(SKY_VENV)/bin/python || $(BIN)/python -m venv $(SKY_VENV)
	$(BIN)/uv pip install --quiet --python $(SKY_VENV)/bin/python --constraint constraints.txt \
		--requirements pyproject.toml --extra sky 'skypilot[kubernetes,slurm]' pip setuptools wheel pytest pytest-timeout
	@where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		{ echo '$(CURDIR)'; $(BIN)/python -c "$$where"; } > "$$($(SKY_VENV)/bin/python -c "$$where")/this-tree.pth"
	@touch $@

# Nothing of these ever enters ours: Monarch's wheel brings top-level packages named tests, benches and examples.
$(PEERS_VENV)/.made: $(VENV)/.base constraints.txt
	@test -x $(PEERS_VENV)/bin/python || $(BIN)/python -m venv --without-pip $(PEERS_VENV)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(PEERS_VENV)/bin/python --constraint constraints.txt \
		torchmonarch ray numpy
	@touch $@
