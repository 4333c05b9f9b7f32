#!/usr/bin/env bash
# Installs what `make dist` built as a user would, in minimal Debian machines without a compiler, and tests it: the archive,
# the packages with real units under systemd, upgrade and removal, the container image, the program for aarch64 under QEMU, and the
# workflow of a release.
#
#   scripts/dist-check.sh [TEST...]     root; five minutes, and two more for the first run
#
# TEST is a script of packaging/tests. With OLD=DIR, the upgrade is from the packages in that folder, those of an earlier version.
#
# The machines, their network and their files end with it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
[ "$(id -u)" = 0 ] || { echo "machines of their own need root" >&2; exit 1; }
install_missing python3:python3 jq:jq /usr/share/doc/python3-venv:python3-venv debootstrap:debootstrap /usr/share/keyrings/debian-archive-keyring.gpg:debian-archive-keyring unshare:util-linux systemd-nspawn:systemd-container ip:iproute2 lintian:lintian \
    rpm:rpm rpmlint:rpmlint qemu-aarch64-static:qemu-user-static podman:podman crun:crun buildah:buildah
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
dist=$target/dist
if [ -n "${OLD:-}" ]; then
    OLD=$(realpath -e "$OLD")
    export OLD
fi
[ -e "$dist/SHA256SUMS" ] || { echo "nothing in $dist: run \`make dist\` first" >&2; exit 1; }

# Kept for the next run.
base=$target/debian-with-systemd
if [ ! -e "$base.done" ]; then
    rm -rf "$base"
    debootstrap --force-check-gpg --keyring /usr/share/keyrings/debian-archive-keyring.gpg --variant=minbase --include=systemd,systemd-sysv,dbus,iproute2,iputils-ping,procps bookworm "$base" \
        http://deb.debian.org/debian >"$base.log" || { tail -n 5 "$base.log" >&2; exit 1; }
    rm -rf "$base.log" "$base"/var/cache/apt/archives/*.deb
    touch "$base.done"
fi
# Schemas of Kubernetes, podman-compose and a validator of JSON, from PyPI.
validators=$target/validators
[ -x "$validators/bin/check-jsonschema" ] || {
    python3 -m venv "$validators"
    "$validators/bin/pip" install -q --disable-pip-version-check kubernetes-validate==1.37.0 podman-compose==1.6.0 check-jsonschema==0.39.0
}
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
export base dist validators work
unshare --mount --net --pid --fork --kill-child --mount-proc packaging/tests/all.sh "$@"
