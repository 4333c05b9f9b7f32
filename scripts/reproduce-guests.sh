#!/usr/bin/env bash
# Runs eight virtual machines behind Open vSwitch in a virtual machine with a stock Debian kernel, and compares calls of the
# functions of KVM and vhost_net with the throughput while more of them spin. QEMU emulates AMD-V, so nothing but counts, shares and
# correlations means anything. Takes half an hour. Writes every half second to $target/reproduce-guests.json.
#
#   ROUNDS=1 scripts/reproduce-guests.sh    rounds of the patterns, 3 unless set
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
. scripts/kernel-machine.sh

install_missing ovs-vswitchd:openvswitch-switch ip:iproute2 iperf3:iperf3 cpio:cpio xz:xz-utils
install_machine
work=$target/guests
version=${kernel#*/vmlinuz-}
rm -rf "$work"
mkdir -p "$work/root"/{bin,dev,lib/modules,lib64,proc,sys,tmp} "$work/out"

# Guests start faster from an uncompressed kernel.
offset=$(LC_ALL=C grep -abo $'\xfd7zXZ' "$kernel" | head -n 1 | cut -d: -f1 || true)
tail -c "+$((offset + 1))" "$kernel" | xz -dc --single-stream >"$work/vmlinux" 2>/dev/null || true
head -c 4 "$work/vmlinux" | grep -q ELF || cp "$kernel" "$work/vmlinux"

cp /bin/busybox "$work/root/bin/"
install -m 755 scripts/reproduce-guests-init.sh "$work/root/init"
iperf3=$(command -v iperf3)
for file in "$iperf3" $(ldd "$iperf3" | grep -o '/[^ ]*'); do
    install -D "$file" "$work/root$file"
done
for module in virtio_pci virtio_net; do
    modprobe -S "$version" --show-depends $module | awk '$1 == "insmod" { print $2 }'
done | while read -r file; do
    name=$(basename "$file")
    [ ! -e "$work/root/lib/modules/$name" ] || continue
    cp "$file" "$work/root/lib/modules/"
    echo "$name" >>"$work/root/lib/modules/order"
done
(cd "$work/root" && find . | cpio -o -H newc --quiet) >"$work/initrd"

machine_memory=4G machine_seconds=3600 machine_emulated=yes
machine_options=(--append tsc=reliable --rwdir "$work/out")
status=0
machine reproduce-guests "ROUNDS=${ROUNDS:-3} '$PWD/scripts/reproduce-guests-machine.py' '$work/vmlinux' '$work/initrd' '$work/out/guests.json'" || status=$?
# A machine that stopped has written what it measured until then.
mv "$work/out/guests.json" "$target/reproduce-guests.json"
rm -rf "$work"
scripts/reproduce-guests-report.py "$target/reproduce-guests.json" | tee -a "$target/reproduce-guests.log"
exit $status
