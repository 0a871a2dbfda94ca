# Perdure. `make run` and `make test` need Go and nothing else; targets that
# need more install it (apt, with sudo when not root) or say what is missing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
GO ?= go
export CGO_ENABLED ?= 0

DATA ?= ./data
# The binary carries its commit; a checkout that git refuses still builds.
VCS := $(shell git rev-parse HEAD >/dev/null 2>&1 && echo true || echo false)
FUZZTIME ?= 5s
SIM_SEEDS ?= 300
E2E_PKGS ?= ./e2e/...
BIN := bin/perdure

# need PROGRAM,DEBIAN-PACKAGES: installs the packages when the program is missing.
define need
if ! command -v $(1) >/dev/null; then \
  sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
  if ! command -v apt-get >/dev/null || { [ -n "$$sudo" ] && ! command -v sudo >/dev/null; }; then \
    echo "make $@ needs $(1): install it ($(2)), or run this as root on Debian" >&2; exit 1; fi; \
  echo "make $@: installing $(2)"; \
  $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends $(2) >/dev/null; \
fi
endef

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | sort | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: build
build: ## build bin/perdure
	$(GO) build -trimpath -buildvcs=$(VCS) -ldflags '-s -w' -o $(BIN) ./cmd/perdure

.PHONY: run
run: build ## build and serve on ./data
	@exec $(BIN) serve --data $(DATA)

.PHONY: test
test: ## all tests that need only Go
	$(GO) test -timeout 15m ./...

.PHONY: fmt
fmt: ## format all Go files
	@git ls-files -co --exclude-standard '*.go' | xargs -r gofmt -w

.PHONY: lint
lint: ## gofmt, vet, staticcheck, and the rules of internal/lint
	@bad=$$(git ls-files -co --exclude-standard '*.go' | xargs -r gofmt -l); \
	if [ -n "$$bad" ]; then echo "not formatted (make fmt):"; echo "$$bad"; exit 1; fi
	$(GO) vet ./...
	$(GO) tool staticcheck ./...
	$(GO) test -count=1 ./internal/lint

.PHONY: shell
shell: ## shellcheck of all scripts
	@$(call need,shellcheck,shellcheck)
	git ls-files '*.sh' .ci/run | xargs shellcheck -x -P SCRIPTDIR

.PHONY: race
race: ## all tests under the race detector (needs a C compiler)
	@$(call need,gcc,gcc libc6-dev)
	CGO_ENABLED=1 $(GO) test -race -timeout 20m ./...

# Every fuzz target of the repository, FUZZTIME each. Without the bound on
# minimising, Go spends minutes on making a merely new input shorter. Go's own
# fuzzer at times reports its deadline as a failure; only that is tried again.
.PHONY: fuzz
fuzz: ## run each fuzz target for FUZZTIME
	@found=0; \
	while IFS=: read -r file name; do \
	  found=$$((found + 1)); echo "fuzz $$(dirname $$file) $$name"; \
	  run() { out=$$($(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x "./$$(dirname $$file)" 2>&1); }; \
	  run || { [[ "$$out" == *"context deadline exceeded"* && "$$out" != *"Failing input"* ]] && run; } || { echo "$$out"; exit 1; }; \
	done < <(git ls-files -co --exclude-standard '*_test.go' | xargs grep -HoE '^func Fuzz[A-Za-z0-9_]+' | sed 's/func //'); \
	if [ "$$found" = 0 ]; then echo "no fuzz target found"; exit 1; fi; echo "$$found fuzz targets held"

.PHONY: sim
sim: build ## run SIM_SEEDS seeds of the simulator, and find the bugs that are planted
	$(BIN) sim --seed 1 --seeds $(SIM_SEEDS)
	for bug in ack_early skip_seal trim_seal reuse_epoch; do \
	  $(GO) test -count=1 -tags plant_$$bug -run TestRandomOwners ./internal/journal/objectlog || exit 1; done

# The end-to-end tests drive the binary with clients that are not ours: the
# npm package openai, the Go module openai-go, curl.
.PHONY: e2e
e2e: build ## end-to-end tests with foreign clients (installs node when missing)
	@$(call need,node,nodejs)
	@$(call need,npm,npm)
	@$(call need,curl,curl ca-certificates)
	@$(call need,strace,strace)
	gateway=$$(scripts/versitygw.sh); export PERDURE_VERSITYGW=$$gateway PERDURE_BIN=$(abspath $(BIN)); \
	$(GO) test -count=1 -p 1 -timeout 20m -tags e2e $(E2E_PKGS) && $(GO) test -count=1 ./internal/blob/s3/...

.PHONY: bench
bench: build ## load test with and without persistence, into bench/results
	scripts/loadtest.sh

.PHONY: bench-check
bench-check: build ## compare with the commit before: alarm at +20 % of p95 or memory
	scripts/bench-check.sh

.PHONY: proto
proto: ## generate internal/wire from proto/
	@$(call need,protoc,protobuf-compiler)
	bash proto/generate.sh

.PHONY: ci
ci: ## what the build server runs
	.ci/run

.PHONY: clean
clean: ## remove what was built (not ./data)
	rm -rf bin
