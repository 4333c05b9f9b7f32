#!/usr/bin/env bash
# Our binary against the WireGuard of a stock Debian kernel, in a virtual machine.
#
#   scripts/interop-kernel.sh                  both roles, with and without a preshared key; $SEIKAN_BIN or a release build
#   scripts/interop-kernel.sh --kernel-only    the kernel at both ends: proves the harness, needs no binary
#
# Installs QEMU and a kernel from Debian's packages and virtme-ng into target/; the machine sees this one's files
# copy-on-write. It is emulated in software: minutes, good for behaviour, useless for speed.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

ends="seikan kernel
kernel seikan"
if [ "${1:-}" = --kernel-only ]; then
    ends="kernel kernel"
elif [ -z "${SEIKAN_BIN:-}" ]; then
    cargo build --locked --release -p seikan
fi
binary=${SEIKAN_BIN:-$target/release/seikan}

packages=()
command -v qemu-system-x86_64 >/dev/null || packages+=(qemu-system-x86)
command -v busybox >/dev/null || packages+=(busybox-static)
command -v wg >/dev/null || packages+=(wireguard-tools)
compgen -G '/boot/vmlinuz-*-amd64' >/dev/null || packages+=(linux-image-amd64)
if [ ${#packages[@]} -gt 0 ]; then
    apt-get update -q >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null
fi
if [ ! -x "$target/vng/bin/vng" ]; then
    python3 -m venv "$target/vng"
    "$target/vng/bin/pip" install -q --disable-pip-version-check virtme-ng
fi
kernel=$(find /boot -name 'vmlinuz-*-amd64' ! -name '*-rt-*' ! -name '*-cloud-*' | sort -V | tail -n 1)

# The machine's exit code does not reach us: the last line of its log does.
log=$target/interop-kernel.log
: >"$log"
echo "kernel: $kernel"
PATH=$target/vng/bin:$PATH timeout 900 vng --disable-kvm -r "$kernel" --cpus 2 --memory 2G --user root --overlay-rwdir /run --overlay-rwdir /var \
    -- "SEIKAN='$binary' ENDS='${ends//$'\n'/,}' '$PWD/scripts/interop-kernel-guest.sh'" </dev/null 2>&1 | tee "$log"
grep -qx 'interop-kernel: passed' "$log"
