#!/usr/bin/env bash
# The RPM packages pass rpmlint, but for what packaging/rpmlint.toml accepts. The one of x86-64 in a root without systemd, by rpm:
# installed, upgraded, verified and removed, with its scripts.
. ./machines.sh
set -euo pipefail
# rpmlint unpacks by cpio, and the names of the files are absolute: without this, it would unpack them into the root of this host.
mkdir "$work/rpmlint"
printf '#!/bin/sh\nexec %s --no-absolute-filenames "$@"\n' "$(command -v cpio)" >"$work/rpmlint/cpio"
chmod 755 "$work/rpmlint/cpio"
unpacked() { stat -c '%n %z' /usr/share/licenses/seikan/* 2>&1 || :; }
before=$(unpacked)
PATH=$work/rpmlint:$PATH rpmlint --strict --config ../rpmlint.toml "$dist"/*.rpm
[ "$(unpacked)" = "$before" ] || fail "rpmlint has unpacked a package into the root of this host"
cp -a "$base" "$work/rpm"
root=$work/rpm
cp "$dist"/seikan-[0-9]*.x86_64.rpm "$root/root/seikan.rpm"
manage() { rpm --root "$root" --dbpath /var/lib/rpm --nosignature "$@"; }
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -ec "$*"; }
manage --initdb
# The shell that its scripts need is not of an RPM package here.
manage -i --nodeps "$root/root/seikan.rpm"
inside 'seikan --version
    id seikan
    id seikan-coordinator
    [ "$(stat -c %a /etc/seikan)" = 700 ]
    [ -s /usr/lib/systemd/system/seikan@.service ]
    umask 077
    seikan genkey >/etc/seikan/tunnel.key'
manage -V --nodeps seikan
# An upgrade to the same version runs the same scripts.
manage -U --nodeps --replacepkgs --oldpackage "$root/root/seikan.rpm"
inside '[ -s /etc/seikan/tunnel.key ]
    seikan --version'
manage -e seikan
inside '[ ! -e /usr/bin/seikan ]
    [ ! -e /usr/lib/systemd/system/seikan@.service ]
    [ -s /etc/seikan/tunnel.key ]'
rm -rf --one-file-system "$root"
echo "= rpmlint finds nothing new; installed, upgraded, verified and removed by rpm $(rpm --version | grep -o '[0-9.]*$')"
