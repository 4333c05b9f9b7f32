# `make help` lists the targets. Everything CI checks is in `make test`.

# Tools and other people's tunnels are built once per machine and version, not once per clone.
TOOLS ?= $(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/seikan-tools
PEERS ?= $(TOOLS)/peers
export TOOLS PEERS
export PATH := $(TOOLS)/bin:$(PATH)

# Tests that need root or a kernel ability skip loudly; as root nothing may be skipped.
SEIKAN_REQUIRE_ALL ?= $(if $(filter 0,$(shell id -u)),1,0)
export SEIKAN_REQUIRE_ALL

# For `make fuzz`: seconds for each target, and a single TARGET to run instead of all.
SECONDS ?= 600
TARGET ?=
# For `make reproduce`: queue, offload, batch, profile, mtu-cipher or all, and options of `seikan lab reproduce`.
SOURCE ?= all

.PHONY: help test deps deps-build bare-root peers fmt-check house hooks diagram docs-check book deny clippy doc tests unit interop golden demo-recording recordings fuzz-ci fuzz fuzz-asan \
	build release demo bench gateway reproduce reproduce-kernel hostile soak soak-mesh interop-kernel doctor-kernel clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' Makefile | column -t -s '|'

test: ## everything CI checks, with the time each step took
	@scripts/test.sh deps fmt-check house docs-check deny clippy doc peers tests fuzz-ci

deps: ## install what the checks need and what is missing
	@scripts/install-deps.sh

deps-build:
	@scripts/install-deps.sh build

bare-root: ## `make demo` and `make test` in a fresh minimal Debian that has a Rust toolchain and make (root; an hour)
	@scripts/bare-root.sh $(TARGET)

peers: deps-build ## install the other WireGuard implementations the interop tests talk to
	@scripts/install-peers.sh "$(PEERS)" wireguard-go boringtun

fmt-check: ## formatting
	@cargo fmt --all --check

house: ## rules that no compiler checks: dependencies between crates, unsafe code, code that the docs name
	@scripts/check_house.py --self-test
	@scripts/check_house.py
	@scripts/check_named_code.py --self-test
	@scripts/check_named_code.py
	@scripts/commit_msg.py --self-test

diagram: ## docs/pictures/crates.svg: the dependencies between the crates
	@scripts/crate_diagram.py docs/pictures/crates.svg

hooks: ## install the hook that checks commit messages in this clone
	@scripts/commit_msg.py --install

docs-check: ## links, size and line length of README and docs
	@scripts/check_docs.py --self-test
	@scripts/check_docs.py

book: ## the documentation as a book: target/book/index.html (installs mdBook)
	@scripts/install-deps.sh book
	@"$(TOOLS)/bin/mdbook" build

deny: ## licences, bans and sources of dependencies; advisories where their database can be reached
	@cargo deny --all-features check --hide-inclusion-graph licenses bans sources
	@scripts/advisories.sh

clippy: ## lints, warnings denied
	@cargo clippy --workspace --all-targets --locked -- -D warnings

doc: ## documentation, warnings denied
	@RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" cargo doc --workspace --no-deps --document-private-items --locked

tests: peers ## every test of the workspace, side by side (.config/nextest.toml); ARGS="-p CRATE NAME" for some of them
	@SEIKAN_PEERS="$(PEERS)" scripts/tests.sh $(or $(ARGS),--workspace)

unit: ## every test of the workspace but interop
	@scripts/tests.sh --workspace --exclude seikan-interop

interop: peers build ## our binary against other people's WireGuard in namespaces (root)
	@SEIKAN_PEERS="$(PEERS)" scripts/tests.sh -p seikan-interop

golden: ## write the golden texts and the pages made from the program anew: read what changed
	@rm -f crates/cli/tests/golden/json/* crates/lab/tests/golden/json/*
	@UPDATE_GOLDEN=1 scripts/tests.sh --workspace -E 'package(seikan) & test(/^(golden|cli|gateway_status|doctor|doctor_ends|mesh::ping)::/) | package(seikan-lab) & test(/^program::/) | test(findings_are_those_expected)'
	@UPDATE_GOLDEN=1 scripts/tests.sh --workspace -E '(package(seikan) & test(/^docs::/)) | test(the_page_of_metrics)'

demo-recording: release ## docs/pictures/demo.svg: a run of the demo as a moving picture (root, or user namespaces)
	@scripts/record-demo.py "$${CARGO_TARGET_DIR:-target}/release/seikan" docs/pictures/demo.svg

recordings: ## record the doctor's cases anew, which `make tests` judges again (root; two hours on a machine that does nothing else)
	@cargo build --locked --workspace --bins --examples
	@sudo=$$(id -u | grep -qx 0 || echo sudo); folder=$$(mktemp -d) && \
		$$sudo target/debug/seikan lab score --cases 5 --out $$folder/cases.jsonl --recordings $$folder/cases && \
		target/debug/examples/pack-recordings crates/diagnose/tests/recordings/cases.jsonl.gz $$folder/cases.jsonl $$folder/cases

fuzz-ci: ## one minute of fuzzing over all targets
	@scripts/fuzz.sh --total 60

fuzz-asan: ## SECONDS=600 of fuzzing for each target, or for TARGET=name only, with AddressSanitizer
	@scripts/fuzz.sh --asan --each $(SECONDS) $(TARGET)

fuzz: ## SECONDS=600 of fuzzing for each target, or for TARGET=name only
	@scripts/fuzz.sh --each $(SECONDS) $(TARGET)

build: deps-build ## the programs seikan and seikan-lab, for debugging
	@cargo build --locked -p seikan -p seikan-lab

release: deps-build ## the programs seikan and seikan-lab, optimised: in target/release
	@cargo build --locked --release -p seikan -p seikan-lab

demo: release ## two hosts in namespaces, a tunnel, load, a picture: under a minute
	@"$${CARGO_TARGET_DIR:-target}/release/seikan" demo

bench: release ## side by side with the tunnels found in $(PEERS) and on PATH
	@scripts/install-peers.sh "$(PEERS)"
	@PATH="$(PEERS):$$PATH" "$${CARGO_TARGET_DIR:-target}/release/seikan" lab bench

gateway: release ## from a device through a gateway: ours, other people's, the kernel's forwarding, a naive one (root)
	@scripts/install-peers.sh "$(PEERS)" wireguard-go wireguard-go-tailscale
	@PATH="$(PEERS):$$PATH" "$${CARGO_TARGET_DIR:-target}/release/seikan" lab gateway

reproduce: release ## SOURCE=all: what others have published about slow tunnels, done again (root; installs ab and nginx)
	@scripts/reproduce.sh $(SOURCE)

reproduce-kernel: ## calls of kernel functions against throughput, as published, on a stock kernel in a virtual machine (installs QEMU)
	@scripts/reproduce-kernel.sh

hostile: release ## what a flow keeps of its throughput while strangers flood the tunnel's port (root)
	@"$${CARGO_TARGET_DIR:-target}/release/seikan" lab hostile

soak: release ## ten minutes in both protocols: no leak, no stall, every byte checksummed (root)
	@SEIKAN_SOAK=$(SECONDS) cargo test --locked --release -p seikan-interop --test it soak:: -- --ignored --nocapture --test-threads 1

soak-mesh: ## a thousand members in a virtual network, ten minutes of changes, ten seeds
	@cargo test --locked --release -p seikan-proto --test it mesh:: -- --ignored --nocapture

interop-kernel: ## our binary against the kernel's WireGuard, in a virtual machine (installs QEMU)
	@scripts/interop-kernel.sh

doctor-kernel: ## the doctor on a stock kernel: calls of its functions, its tunnels, in a virtual machine (installs QEMU)
	@scripts/doctor-kernel.sh

clean: ## what cargo built; tools and peers stay in $(TOOLS)
	@cargo clean
