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
    systemctl daemon-reload
    # Only services that run. Peers begin a new session within seconds.
    if [ -n "${upgrade:-}" ]; then
        systemctl try-restart 'seikan@*.service' seikan-coordinator.service seikan-relay.service || :
    fi
fi
