# Everything a person does here. `make up` serves a model, `make test` proves the tree.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

.PHONY: setup up test lint types contracts drift check proto dashboards crds kubernetes-tools prometheus chromium bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

up: setup
	$(BIN)/fleetctl up $(ARGS)

# Two processes, each file's tests in one: much of what live tests do is waiting. JOBS=0 is one process.
JOBS ?= 2
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy
	MYPYPATH=deploy/monitoring $(BIN)/mypy deploy/monitoring/build.py

contracts: setup
	$(BIN)/lint-imports

proto: setup
	$(BIN)/python -m grpc_tools.protoc -Iproto/pdfleet/v1 --python_out=fleet/wire/v1 --mypy_out=fleet/wire/v1 \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy proto/pdfleet/v1/*.proto

dashboards: setup
	$(BIN)/python deploy/monitoring/build.py

crds: setup
	$(BIN)/python -m deploy.controller files

drift: proto dashboards crds
	git diff --exit-code -- fleet/wire/v1 deploy/monitoring/dashboards deploy/crds deploy/chart

# Real kubectl and helm, for the tests of what runs on Kubernetes; without them these are skipped.
kubernetes-tools: setup
	@$(BIN)/python tests/deploy/kubernetes_tools.py || echo "kubectl or helm is missing: their tests are skipped"

# Prometheus and promtool, for the tests of rules and dashboards; where they cannot be had these are skipped.
prometheus:
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || { \
	  sudo=$$(test "$$(id -u)" = 0 || command -v sudo); \
	  { $$sudo apt-get install -y -q --no-install-recommends prometheus || { $$sudo apt-get update -q && \
	    $$sudo apt-get install -y -q --no-install-recommends prometheus; }; } >/dev/null \
	  || echo "prometheus is not installed: its tests are skipped"; }

# A browser, for the tests of the dashboard page; where it cannot be had these are skipped.
chromium:
	@command -v chromium >/dev/null || { \
	  sudo=$$(test "$$(id -u)" = 0 || command -v sudo); \
	  { $$sudo apt-get install -y -q --no-install-recommends chromium || { $$sudo apt-get update -q && \
	    $$sudo apt-get install -y -q --no-install-recommends chromium; }; } >/dev/null \
	  || echo "chromium is not installed: its tests are skipped"; }

check: lint types contracts drift

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist
