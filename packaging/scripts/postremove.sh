#!/bin/sh
# After a removal. `apt purge` gives "purge": it disables the services, and removes the state as well, with the members of a
# coordinator. Files in /etc/seikan, which an administrator wrote, stay.
set -e
if [ "$1" = purge ]; then
    # Not by `systemctl disable`, which needs the files of the units.
    rm -f /etc/systemd/system/*.wants/seikan@*.service /etc/systemd/system/*.wants/seikan-coordinator.service \
        /etc/systemd/system/*.wants/seikan-relay.service
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
fi
if [ "$1" = purge ]; then
    rm -rf /var/lib/seikan /var/lib/seikan-coordinator /var/lib/seikan-relay
    rmdir --ignore-fail-on-non-empty /etc/seikan 2>/dev/null || :
fi
