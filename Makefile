# `make help` lists the targets. Everything CI checks is in `make test`.

# Tools and other tunnels are built once per machine and version, not once per clone.
TOOLS ?= $(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/seikan-tools
PEERS ?= $(TOOLS)/peers
export TOOLS PEERS
export PATH := $(TOOLS)/bin:$(PATH)

# Tests that lack root or a kernel feature are skipped with a message; as root none may be skipped.
SEIKAN_REQUIRE_ALL ?= $(if $(filter 0,$(shell id -u)),1,0)
export SEIKAN_REQUIRE_ALL

# For `make fuzz`: seconds for each target, and a single TARGET to run instead of all.
SECONDS ?= 600
TARGET ?=
# For `make reproduce`: queue, offload, batch, profile, mtu-cipher or all, and options of `seikan lab reproduce`.
SOURCE ?= all

.PHONY: help test deps deps-build bare-root peers fmt-check house hooks diagram docs-check book deny clippy doc tests unit interop golden demo-recording recordings fuzz-ci fuzz fuzz-asan \
	build release dist dist-smoke dist-check openwrt-check monitoring-check demo bench bench-path bench-userspace instructions gateway reproduce reproduce-kernel reproduce-guests hostile soak soak-mesh interop-kernel doctor-kernel bench-kernel clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' Makefile | column -t -s '|'

test: ## run everything that CI checks, with the time of each step
	@scripts/test.sh deps fmt-check house docs-check deny clippy doc peers tests dist-smoke fuzz-ci

deps: ## install missing tools for the checks
	@scripts/install-deps.sh

deps-build:
	@scripts/install-deps.sh build

bare-root: ## run `make demo` and `make test` in a minimal Debian with Rust and make only (root; an hour)
	@scripts/bare-root.sh $(TARGET)

peers: deps-build ## install the other WireGuard implementations for the interop tests
	@scripts/install-peers.sh "$(PEERS)" wireguard-go boringtun

fmt-check: ## check the formatting
	@cargo fmt --all --check

house: ## check rules between crates, code named in the docs, settings that packaging repeats
	@scripts/check_house.py --self-test
	@scripts/check_house.py
	@scripts/check_named_code.py --self-test
	@scripts/check_named_code.py
	@scripts/check_packaging.py --self-test
	@scripts/check_packaging.py
	@scripts/commit_msg.py --self-test

diagram: ## draw docs/pictures/crates.svg, the dependencies between the crates
	@scripts/crate_diagram.py docs/pictures/crates.svg

hooks: ## install the hook that checks commit messages in this clone
	@scripts/commit_msg.py --install

docs-check: ## check links, size and line length of README and docs
	@scripts/check_docs.py --self-test
	@scripts/check_docs.py

book: ## build the documentation as a book, target/book/index.html (installs mdBook)
	@scripts/install-deps.sh book
	@"$(TOOLS)/bin/mdbook" build

deny: ## check licences, bans, sources and advisories of dependencies
	@cargo deny --all-features check --hide-inclusion-graph licenses bans sources
	@scripts/advisories.sh

clippy: ## run clippy, warnings denied
	@cargo clippy --workspace --all-targets --locked -- -D warnings

doc: ## build the API documentation, warnings denied, and compile the library's examples
	@RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" cargo doc --workspace --no-deps --document-private-items --locked
	@cargo test --quiet -p seikan --doc --locked

tests: peers ## run all tests in parallel (.config/nextest.toml); ARGS="-p CRATE NAME" selects some
	@SEIKAN_PEERS="$(PEERS)" scripts/tests.sh $(or $(ARGS),--workspace)

unit: ## run all tests except interop
	@scripts/tests.sh --workspace --exclude seikan-interop

interop: peers build ## test against other WireGuard implementations in namespaces (root)
	@SEIKAN_PEERS="$(PEERS)" scripts/tests.sh -p seikan-interop

golden: ## rewrite the golden texts and the generated pages; review the changes
	@rm -f crates/cli/tests/golden/json/* crates/lab/tests/golden/json/*
	@UPDATE_GOLDEN=1 scripts/tests.sh --workspace -E 'test(schemas_are_those_of_the_types)'
	@UPDATE_GOLDEN=1 scripts/tests.sh --workspace -E 'package(seikan-cli) & test(/^(golden|cli|gateway_status|doctor|doctor_ends|mesh::ping)::/) | package(seikan-lab) & test(/^program::/) | test(findings_are_those_expected)'
	@UPDATE_GOLDEN=1 scripts/tests.sh --workspace -E '(package(seikan-cli) & test(/^docs::/)) | test(the_page_of_metrics)'

demo-recording: release ## record the demo as docs/pictures/demo.svg (root, or user namespaces)
	@scripts/record-demo.py "$${CARGO_TARGET_DIR:-target}/release/seikan" docs/pictures/demo.svg

recordings: ## record the doctor's test cases (root; two hours on an idle machine)
	@cargo build --locked --workspace --bins --examples
	@sudo=$$(id -u | grep -qx 0 || echo sudo); folder=$$(mktemp -d) && \
		$$sudo target/debug/seikan lab score --cases 5 --out $$folder/cases.jsonl --recordings $$folder/cases && \
		target/debug/examples/pack-recordings crates/diagnose/tests/recordings/cases.jsonl.gz $$folder/cases.jsonl $$folder/cases

fuzz-ci: ## fuzz all targets, one minute in all
	@scripts/fuzz.sh --total 60

fuzz-asan: ## fuzz each target, or TARGET=name, for SECONDS=600 with AddressSanitizer
	@scripts/fuzz.sh --asan --each $(SECONDS) $(TARGET)

fuzz: ## fuzz each target, or TARGET=name, for SECONDS=600
	@scripts/fuzz.sh --each $(SECONDS) $(TARGET)

build: deps-build ## build debug binaries of seikan and seikan-lab
	@cargo build --locked -p seikan-cli -p seikan-lab

release: deps-build ## build target/release/seikan and seikan-lab
	@cargo build --locked --release -p seikan-cli -p seikan-lab

dist: deps-build ## build static binaries, packages and an image in target/dist (installs musl, Zig, nfpm, buildah)
	@scripts/dist.sh

dist-smoke:
	@scripts/dist.sh smoke

dist-check: ## install what `make dist` built in clean Debian machines, and test it (root); ARGS=TEST selects one
	@scripts/dist-check.sh $(ARGS)

openwrt-check: deps-build ## run the package for OpenWrt with opkg, uci and procd, built from OpenWrt's sources (root)
	@scripts/openwrt-check.sh

monitoring-check: deps-build ## run the alerts and the dashboard's queries in a Prometheus that scrapes tunnels in namespaces (root)
	@scripts/monitoring-check.sh

demo: deps-build ## run the demo: two hosts in namespaces, a tunnel, load, a diagnosis
	@cargo build --locked --profile demo -p seikan-cli -p seikan-lab
	@"$${CARGO_TARGET_DIR:-target}/demo/seikan" demo

bench: release ## benchmark against the tunnels found in $(PEERS) and on PATH
	@scripts/install-peers.sh "$(PEERS)"
	@PATH="$(PEERS):$$PATH" "$${CARGO_TARGET_DIR:-target}/release/seikan" lab bench

bench-path: release ## benchmark over emulated paths: delay, rate, short queues, loss (root)
	@scripts/install-peers.sh "$(PEERS)" wireguard-go
	@PATH="$(PEERS):$$PATH" "$${CARGO_TARGET_DIR:-target}/release/seikan" lab bench --path

bench-userspace: release ## benchmark forwarded ports of tunnels without an interface, beside wireproxy (root)
	@scripts/install-peers.sh "$(PEERS)" wireproxy
	@PATH="$(PEERS):$$PATH" "$${CARGO_TARGET_DIR:-target}/release/seikan" lab bench \
		--only raw,native-userspace,wireguard-userspace,wireproxy --loads tcp1,rev

instructions: deps-build ## count instructions per packet with callgrind (installs valgrind)
	@scripts/instructions.sh

gateway: release ## benchmark a gateway against other tunnels, kernel forwarding and a naive gateway (root)
	@scripts/install-peers.sh "$(PEERS)" wireguard-go wireguard-go-tailscale
	@PATH="$(PEERS):$$PATH" "$${CARGO_TARGET_DIR:-target}/release/seikan" lab gateway

reproduce: release ## reproduce published measurements of slow tunnels, SOURCE=all (root; installs ab and nginx)
	@scripts/reproduce.sh $(SOURCE)

reproduce-kernel: ## reproduce the measurement of kernel functions on a stock kernel in QEMU (installs it)
	@scripts/reproduce-kernel.sh

reproduce-guests: ## reproduce that measurement with virtual machines in an emulated one (root; half an hour)
	@scripts/reproduce-guests.sh

hostile: release ## measure throughput while unknown sources flood the tunnel's port (root)
	@"$${CARGO_TARGET_DIR:-target}/release/seikan" lab hostile

soak: release ## run both protocols for ten minutes, checking bytes, leaks and stalls (root)
	@SEIKAN_SOAK=$(SECONDS) cargo test --locked --release -p seikan-interop --test it soak:: -- --ignored --nocapture --test-threads 1

soak-mesh: ## simulate a thousand members and ten minutes of changes, with ten seeds
	@cargo test --locked --release -p seikan-proto --test it mesh:: -- --ignored --nocapture

interop-kernel: ## test against the kernel's WireGuard in a virtual machine (installs QEMU)
	@scripts/interop-kernel.sh

doctor-kernel: ## test the doctor on a stock kernel in a virtual machine (installs QEMU)
	@scripts/doctor-kernel.sh

bench-kernel: ## run seikan bench from a stock kernel in a virtual machine to this host (installs QEMU)
	@scripts/bench-kernel.sh

clean: ## remove cargo's output; tools and peers stay in $(TOOLS)
	@cargo clean
