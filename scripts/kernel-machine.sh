# Sourced by the scripts that need a stock Debian kernel: a virtual machine that sees this one's files copy-on-write.
#
#   machine NAME COMMAND    runs a shell command as root in it; fails unless it prints a line "NAME: passed"
#
# Installs QEMU and a kernel from Debian's packages and virtme-ng into $target. Uses KVM where it works; software emulation
# otherwise takes minutes, good for behaviour, useless for speed.

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

# boot SECONDS OPTIONS... COMMAND: what the machine prints, for so long at most
boot() {
    PATH=$target/vng/bin:$PATH TMPDIR=$scratch timeout "$1" vng "${@:2:$#-2}" -r "$kernel" --cpus 2 --memory 2G --user root \
        --overlay-rwdir /run --overlay-rwdir /var -- "${@: -1}" </dev/null 2>&1
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
    # virtme-ng leaves files in it when it is ended from outside.
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    # A /dev/kvm that can be opened may still not carry a machine: a nested one, say.
    if ! { [ -w /dev/kvm ] && boot 30 'echo it boots' | grep -q 'it boots'; }; then
        accelerator=(--disable-kvm)
    fi
    echo "kernel: $kernel, ${accelerator[*]:-with KVM}"
    # The machine's exit code does not reach us: the last line of its log does.
    boot 900 "${accelerator[@]}" "$2" | tee "$log"
    grep -qx "$1: passed" "$log"
}
