#!/bin/busybox sh
# The first program of a guest of reproduce-guests.sh: sets up its NIC, then runs the commands that come over its serial port.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/lib/modules/$module"; done </lib/modules/order
read -r line </proc/cmdline
for word in $line; do
    case $word in guest=*) number=${word#guest=} ;; esac
done
ip link set lo up
ip addr add "10.92.0.$number/24" dev eth0
ip link set eth0 up
echo "guest is up: $(nproc) processors"
exec sh </dev/ttyS0 >/dev/ttyS0 2>&1
