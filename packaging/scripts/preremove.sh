#!/bin/sh
# Before a removal, not before an upgrade. dpkg gives "remove"; rpm gives 0.
set -e
case "$1" in
    remove | 0) ;;
    *) exit 0 ;;
esac

if [ -d /run/systemd/system ]; then
    for link in /etc/systemd/system/*.wants/seikan@*.service; do
        [ ! -L "$link" ] || systemctl disable --now "${link##*/}" || :
    done
    systemctl stop 'seikan@*.service' || :
    systemctl disable --now seikan-coordinator.service seikan-relay.service || :
fi
# Tunnels that no unit started, as by `seikan join`.
for socket in /run/seikan/*.sock; do
    [ ! -S "$socket" ] || seikan down "$(basename "$socket" .sock)" || :
done
