# Sourced by scripts that need a stock Debian kernel: a virtual machine that sees this machine's files copy-on-write.
#
#   machine NAME COMMAND    runs a shell command as root in it; fails unless it prints a line "NAME: passed"
#
# $machine_memory, $machine_seconds (its longest time) and $machine_options (of virtme-ng) may be set before; so may
# $machine_emulated, which leaves KVM out.
#
# Installs QEMU and a kernel from Debian's packages and virtme-ng into $target. Uses KVM if it works, else emulation, which
# takes minutes and says nothing about speed.

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
machine_memory=2G machine_seconds=900 machine_emulated= machine_options=()

# boot SECONDS OPTIONS... COMMAND: prints the machine's output, for SECONDS at most
boot() {
    PATH=$target/vng/bin:$PATH TMPDIR=$scratch timeout "$1" vng "${@:2:$#-2}" "${machine_options[@]}" -r "$kernel" --cpus 2 \
        --memory "$machine_memory" --user root --overlay-rwdir /run --overlay-rwdir /var -- "${@: -1}" </dev/null 2>&1
}

install_machine() {
    local packages=()
    command -v qemu-system-x86_64 >/dev/null || packages+=(qemu-system-x86)
    command -v busybox >/dev/null || packages+=(busybox-static)
    command -v wg >/dev/null || packages+=(wireguard-tools)
    compgen -G '/boot/vmlinuz-*-amd64' >/dev/null || packages+=(linux-image-amd64)
    if [ ${#packages[@]} -gt 0 ]; then
        apt-get update -q >/dev/null
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "${packages[@]}" >/dev/null
    fi
    if [ ! -x "$target/vng/bin/vng" ]; then
        python3 -m venv "$target/vng"
        "$target/vng/bin/pip" install -q --disable-pip-version-check virtme-ng
    fi
    kernel=$(find /boot -name 'vmlinuz-*-amd64' ! -name '*-rt-*' ! -name '*-cloud-*' | sort -V | tail -n 1)
}

machine() {
    local log=$target/$1.log accelerator=()
    install_machine
    # An interrupted virtme-ng leaves files in it.
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    # /dev/kvm may open and still fail to run a machine, for example a nested one.
    if [ -n "$machine_emulated" ] || ! { [ -w /dev/kvm ] && boot 30 'echo it boots' | grep -q 'it boots'; }; then
        accelerator=(--disable-kvm)
    fi
    echo "kernel: $kernel, ${accelerator[*]:-with KVM}"
    # The machine's exit code is lost; the last line of its log is not.
    boot "$machine_seconds" "${accelerator[@]}" "$2" | tee "$log"
    grep -qx "$1: passed" "$log"
}
