#!/usr/bin/env bash
# Runs make targets in a fresh minimal Debian with only a Rust toolchain and `make`, the requirements of the README.
#
#   scripts/bare-root.sh [TARGET...]     make targets [default: demo test] (root; an hour from cold)
#
# Its processes and mounts end with it. BARE_ROOT=DIR keeps the root in DIR for the next run, with everything installed and
# built by then.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
[ "$(id -u)" = 0 ] || { echo "a root of its own needs root" >&2; exit 1; }
install_missing debootstrap:debootstrap unshare:util-linux
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(demo test)

root=${BARE_ROOT:-$(mktemp -d)}
[ -n "${BARE_ROOT:-}" ] || trap 'rm -rf --one-file-system "$root"' EXIT
if [ ! -e "$root/etc/debian_version" ]; then
    mkdir -p "$root"
    debootstrap --variant=minbase bookworm "$root" http://deb.debian.org/debian >"$root.log" || { tail -n 5 "$root.log" >&2; exit 1; }
    rm -f "$root.log"
fi
# Network settings of this machine.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/certificates-of-the-host.crt"
cp -n /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/"
toolchain=$(rustc --print sysroot)
mkdir -p "$root/seikan" "$root/toolchain"
git ls-files -z | tar --null -T - -c | tar -x -C "$root/seikan"

exec 3<<'END'
set -euo pipefail
mount --make-rprivate /
# A root is a mount point, as `unshare --mount` expects in it.
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount --bind -o ro "$toolchain" "$root/toolchain"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -p "$root/outside"
cd "$root"
# Instead of chroot, in which the kernel refuses new user namespaces.
pivot_root . outside
umount -l /outside
exec env -i HOME=/root TERM=dumb LANG=C.UTF-8 SSL_CERT_FILE=/etc/certificates-of-the-host.crt \
    PIP_CERT=/etc/certificates-of-the-host.crt CARGO_HTTP_CAINFO=/etc/certificates-of-the-host.crt PATH=/toolchain/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    sh -ec 'command -v make >/dev/null || { apt-get update -q >/dev/null; apt-get install -y -q --no-install-recommends make >/dev/null; }
        cd /seikan; for target; do echo "== make $target, in a bare root"; make "$target" </dev/null; done' sh "$@"
END
root=$root toolchain=$toolchain unshare --mount --pid --fork --kill-child bash /dev/fd/3 "${targets[@]}"
