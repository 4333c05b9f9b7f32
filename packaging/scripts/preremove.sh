#!/bin/sh
# Before a removal, not before an upgrade. dpkg gives "remove"; rpm gives 0.
set -e
case "$1" in
    remove | 0) ;;
    *) exit 0 ;;
esac

if [ -d /run/systemd/system ]; then
    # Tunnels, whose instances need a list, then the others.
    systemctl list-units --plain --no-legend --full 'seikan@*.service' | while read -r unit _; do
        systemctl disable --now "$unit" || :
    done
    systemctl disable --now seikan-coordinator.service seikan-relay.service || :
fi
