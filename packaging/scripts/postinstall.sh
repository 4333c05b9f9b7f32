#!/bin/sh
# After an installation or an upgrade. dpkg gives "configure" and the old version, if there was one; rpm gives 1 or 2.
set -e
case "$1" in
    configure) [ -z "${2:-}" ] || upgrade=1 ;;
    1) ;;
    2) upgrade=1 ;;
    *) exit 0 ;;
esac

if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers seikan.conf
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    # Only services that run.
    if [ -n "${upgrade:-}" ]; then
        systemctl try-restart 'seikan@*.service' seikan-coordinator.service seikan-relay.service ||
            echo "not every service of Seikan has started again: systemctl list-units 'seikan*'" >&2
    fi
fi
# Tunnels that no unit started, as by `seikan join`.
[ -n "${upgrade:-}" ] || exit 0
for socket in /run/seikan/*.sock; do
    [ -S "$socket" ] || continue
    name=$(basename "$socket" .sock)
    [ -d /run/systemd/system ] && systemctl is-active --quiet "seikan@$name.service" ||
        echo "tunnel $name still runs the former version: seikan down $name, then seikan up -d $name" >&2
done
