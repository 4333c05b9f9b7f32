#!/bin/sh
# Before a removal, not before an upgrade. dpkg gives "remove"; rpm gives 0. All services stop. rpm disables them here; on Debian
# they stay enabled until a purge, as the configuration stays, so that a later installation runs them at the next boot.
set -e
case "$1" in
    remove) ;;
    0) disable=1 ;;
    *) exit 0 ;;
esac

if [ -d /run/systemd/system ]; then
    systemctl stop 'seikan@*.service' seikan-coordinator.service seikan-relay.service || :
    if [ -n "${disable:-}" ]; then
        for link in /etc/systemd/system/*.wants/seikan@*.service; do
            [ ! -L "$link" ] || systemctl disable "${link##*/}" || :
        done
        systemctl disable seikan-coordinator.service seikan-relay.service || :
    fi
fi
# Tunnels that no unit started, as by `seikan join`.
for socket in /run/seikan/*.sock; do
    [ ! -S "$socket" ] || seikan down "$(basename "$socket" .sock)" || :
done
