#!/usr/bin/env bash
# Removal stops the tunnel, and leaves the configuration and which units are enabled; purge disables them and removes the state. A
# machine without systemd works as well.
. ./machines.sh
. ./tunnel.sh
set -euo pipefail
boot office branch
tunnel office branch
# And a tunnel that no unit started.
on office 'sed s/51820/51821/ /etc/seikan/tunnel.toml >/etc/seikan/other.toml
    sed -i s/10.9.0.1/10.9.1.1/ /etc/seikan/other.toml
    sed -i s/10.9.0.2/10.9.1.2/ /etc/seikan/other.toml
    seikan up -d other'
on office '
    ip link show tunnel
    ip link show other
    dpkg --remove seikan
    if ip link show tunnel || ip link show other || pgrep -x seikan; then exit 1; fi
    [ ! -e /usr/bin/seikan ]
    [ ! -e /usr/lib/systemd/system/seikan@.service ]
    [ -L /etc/systemd/system/multi-user.target.wants/seikan@tunnel.service ]
    [ -s /etc/seikan/tunnel.toml ]
    [ -s /etc/seikan/tunnel.key ]
    systemctl is-system-running
    [ -z "$(ip rule | grep -v "^\(0\|32766\|32767\):")" ]
    # Installed again, it is enabled and runs with what was there.
    dpkg -i /root/seikan_*.deb
    systemctl is-enabled seikan@tunnel
    systemctl start seikan@tunnel'
eventually 30 on office 'ping -c 1 -W 1 10.9.0.2'
on office '
    systemctl enable seikan-coordinator seikan-relay
    mkdir -p /var/lib/seikan-coordinator
    [ -e /var/lib/seikan ]
    dpkg --purge seikan
    [ -z "$(find /etc/systemd/system -name "seikan*")" ]
    [ ! -e /var/lib/seikan ]
    [ ! -e /var/lib/seikan-coordinator ]
    [ -s /etc/seikan/tunnel.key ]'
halt

# Without systemd: nothing to start, and no error.
cp -a "$base" "$work/plain"
cp "$dist"/*_amd64.deb "$work/plain/root/"
chroot "$work/plain" sh -ec 'export PATH=/usr/sbin:/usr/bin:/sbin:/bin
    dpkg -i /root/seikan_*.deb /root/seikan-lab_*.deb
    seikan --version
    seikan-lab --version
    dpkg --purge seikan-lab seikan
    [ ! -e /etc/seikan ]'
rm -rf --one-file-system "$work/plain"
