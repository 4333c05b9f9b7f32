#!/usr/bin/env bash
# The package for OpenWrt, of `scripts/openwrt-check.sh`: opkg installs it, procd runs the tunnels of /etc/config/seikan, and a
# change is applied. $openwrt has the programs and the sources of a release.
. ./machines.sh
set -euo pipefail
root=$work/openwrt
trap '[ $? = 0 ] || { cat "$root/tmp/messages" "$work"/{procd,coordinator,branch/log,branch/outside} || :; router "seikan status"; }' EXIT
ipk=$(echo "$dist"/seikan-*-openwrt-x86_64.ipk)

# A root as OpenWrt lays it out: all of /var in memory, one shell. The programs need the C library of this machine.
lay_out() {
    local applet file sources=$openwrt/src/openwrt/package
    mkdir -p "$root"/{bin,sbin,lib/functions,lib/config,etc/config,etc/rc.d,etc/init.d,usr/bin,usr/sbin,usr/lib/opkg/info,usr/share,dev/net,proc,sys} \
        "$root"/tmp/{run,lock,lib,log,state}
    ln -s tmp "$root/var"
    ln -s var/run "$root/run"
    cp "$(command -v busybox)" "$root/bin/busybox"
    for applet in $(busybox --list); do
        ln -s /bin/busybox "$root/bin/$applet" 2>/dev/null || :
    done
    cp "$openwrt"/bin/{ubus,opkg-cl,apk} "$root/bin/"
    ln -sf opkg-cl "$root/bin/opkg"
    cp "$openwrt"/sbin/{ubusd,procd} "$openwrt/bin/uci" "$root/sbin/"
    # Of this machine, whose busybox has none.
    rm -f "$root/bin/flock"
    cp "$openwrt"/bin/{jshn,jsonfilter} "$(command -v flock)" "$root/usr/bin/"
    cp -r "$openwrt/share/libubox" "$root/usr/share/"
    cp "$openwrt"/lib/*.so* "$root/usr/lib/"
    for file in $(LD_LIBRARY_PATH=$openwrt/lib ldd "$root"/bin/{ubus,opkg-cl,apk} "$root"/sbin/{ubusd,procd,uci} "$root"/usr/bin/{jshn,jsonfilter,flock} |
        grep -o '[[:space:]]/lib[^ ]*' | sort -u); do
        mkdir -p "$root/$(dirname "$file")"
        cp -L "$file" "$root/$file"
    done
    cp "$sources/base-files/files/lib/functions.sh" "$root/lib/"
    cp "$sources"/base-files/files/lib/functions/*.sh "$sources/system/procd/files/procd.sh" "$root/lib/functions/"
    cp "$sources/system/uci/files/lib/config/uci.sh" "$root/lib/config/"
    cp "$sources/base-files/files/etc/rc.common" "$root/etc/"
    chmod 755 "$root/etc/rc.common"
    printf 'root:x:0:0:root:/root:/bin/ash\n' >"$root/etc/passwd"
    printf 'root:x:0:\n' >"$root/etc/group"
    printf 'dest root /\n' >"$root/etc/opkg.conf"
    printf 'config system\n' >"$root/etc/config/system"
    # Of the real system, which this root does not have: a module of the kernel, and certificates.
    for file in kmod-tun ca-bundle; do
        : >"$root/usr/lib/opkg/info/$file.list"
        printf 'Package: %s\nVersion: 1\nStatus: install ok installed\nArchitecture: all\n\n' $file
    done >"$root/usr/lib/opkg/status"
    for file in null zero urandom net/tun; do
        : >"$root/dev/$file"
        mount --bind "/dev/$file" "$root/dev/$file"
    done
    mount -t proc proc "$root/proc"
}

router() { ip netns exec router chroot "$root" /bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root /bin/sh -ec "$*"; }
process() { router "ubus call service list '{\"name\":\"seikan\"}'" | python3 -c '
import json, sys
instance = json.load(sys.stdin)["seikan"]["instances"].get(sys.argv[1], {})
print(instance.get("pid", "none"))' "$1"; }
runs() { [ "$(process "$1")" != none ]; }
# What `reload_config` and LuCI send after a change.
changed() { router "uci commit seikan; ubus call service event '{\"type\":\"config.change\",\"data\":{\"package\":\"seikan\"}}'"; }
status() { router "seikan status $1"; }

lay_out
ip link add switch type bridge
ip link set switch up
number=0
for name in router branch; do
    number=$((number + 1))
    ip netns add $name
    ip link add port-$name type veth peer name eth0 netns $name
    ip link set port-$name master switch up
    ip -n $name link set lo up
    ip -n $name link set eth0 up
    ip -n $name address add 192.0.2.$number/24 dev eth0
done
router 'syslogd -n -O /tmp/messages' &
router 'exec ubusd' &
eventually 10 test -S "$root/var/run/ubus/ubus.sock"
# Not as the first process, which is the test, so that it only runs services.
router 'exec procd -S' >"$work/procd" 2>&1 &
eventually 10 router 'ubus call service list'

log "the package"
cp "$ipk" "$root/tmp/seikan.ipk"
router 'opkg install /tmp/seikan.ipk
    seikan --version
    [ -L /etc/rc.d/S95seikan ]
    [ "$(stat -c %a /etc/config/seikan)" = 600 ]
    [ "$(stat -c %a /etc/seikan)" = 700 ]
    # Commands use the state that survives a reboot.
    [ "$(readlink -f /var/lib/seikan)" = /etc/seikan/state ]
    [ "$(stat -c %a /etc/seikan/state)" = 700 ]'

log "a tunnel of UCI, with a peer that runs the same program outside"
mkdir -m 700 "$work/branch"
seikan=$root/usr/bin/seikan
(umask 077; "$seikan" genkey >"$work/branch/key"; "$seikan" genpsk >"$work/branch/psk")
psk=$(cat "$work/branch/psk")
router "
    uci set seikan.office=tunnel
    uci set seikan.office.listen_port=51820
    uci add_list seikan.office.address=10.9.0.1/24
    uci set seikan.office.mtu=1400
    uci add_list seikan.office.post_up='echo \"%i is up\" >/tmp/hook \\\\; true'
    uci add seikan peer
    uci set seikan.@peer[0].tunnel=office
    uci set seikan.@peer[0].name=branch
    uci set seikan.@peer[0].public_key='$("$seikan" pubkey <"$work/branch/key")'
    uci set seikan.@peer[0].preshared_key='$psk'
    uci add_list seikan.@peer[0].allowed_ips=10.9.0.2/32
    uci add_list seikan.@peer[0].allowed_ips=10.9.2.0/24"
changed
eventually 20 runs office
eventually 20 router 'seikan status office'
router '
    for file in /var/run/seikan/uci/office.toml /etc/seikan/office.key /etc/config/seikan; do
        [ "$(stat -c %a "$file")" = 600 ]
    done
    [ "$(stat -c %a /var/run/seikan/uci)" = 700 ]
    # Of other packages.
    [ ! -e /var/etc ]
    seikan check /var/run/seikan/uci/office.toml
    grep -q "office is up" /tmp/hook'
cat >"$work/branch/branch.toml" <<END
private-key-file = "key"
address = "10.9.0.2/24"
mtu = 1400
[[peer]]
public-key = "$(router 'seikan pubkey </etc/seikan/office.key')"
preshared-key-file = "psk"
allowed-ips = "10.9.0.1/32"
endpoint = "192.0.2.1:51820"
END
SEIKAN_RUN_DIR=$work/branch/run SEIKAN_STATE_DIR=$work/branch/state ip netns exec branch "$seikan" up "$work/branch/branch.toml" \
    >"$work/branch/log" 2>&1 &
eventually 30 ip netns exec branch ping -c 1 -W 1 10.9.0.1
router 'seikan status office' | grep branch >/dev/null

log "a new peer is applied without a restart, a new address by one"
before=$(process office)
router "
    uci add seikan peer
    uci set seikan.@peer[1].name=third
    uci set seikan.@peer[1].public_key='$("$seikan" genkey | "$seikan" pubkey)'
    uci add_list seikan.@peer[1].allowed_ips=10.9.0.3/32"
changed
eventually 20 router 'seikan status office | grep -q 10.9.0.3/32'
[ "$(process office)" = "$before" ] || fail "the tunnel was started anew for a peer"
ip netns exec branch ping -c 1 -W 2 10.9.0.1
router 'uci add_list seikan.office.address=10.9.3.1/24'
changed
eventually 20 router 'ip address show office | grep -q 10.9.3.1'
[ "$(process office)" != "$before" ] || fail "the tunnel was not started anew for an address"
eventually 30 ip netns exec branch ping -c 1 -W 1 10.9.0.1
# A default route needs a start, too.
before=$(process office)
router 'uci add_list seikan.@peer[1].allowed_ips=0.0.0.0/0; uci set seikan.@peer[1].endpoint=192.0.2.9:51820'
changed
again() { runs office && [ "$(process office)" != "$before" ] && router 'seikan status office'; }
eventually 30 again
ip -n router -4 route show table all dev office | grep default
eventually 30 ip netns exec branch ping -c 1 -W 1 10.9.0.1

log "procd starts a killed tunnel again"
before=$(process office)
router "kill -KILL $before"
eventually 30 again
eventually 30 ip netns exec branch ping -c 1 -W 1 10.9.0.1

log "a faulty value is named, and does not stop another tunnel"
router '
    uci set seikan.lab=tunnel
    uci set seikan.lab.mtu=100
    uci set seikan.broken=tunnel
    uci set seikan.broken.metrics="127.0.0.1:9586
offload = false"'
changed
eventually 20 grep -q 'tunnel broken does not start' "$root/tmp/messages"
eventually 20 grep -q 'mtu' "$root/tmp/messages"
router '! /usr/lib/seikan/uci-to-toml broken 2>/tmp/fault; grep -q "control character" /tmp/fault'
runs office
router 'uci delete seikan.lab; uci delete seikan.broken'

log "a fault does not stop a tunnel that runs"
before=$(process office)
# refused MESSAGE: a reload fails, the log has the message, and the tunnel goes on
refused() {
    router 'uci commit seikan; ! /etc/init.d/seikan reload 2>/tmp/fault'
    grep -q "$1" "$root/tmp/fault" || fail "no \`$1\`: $(cat "$root/tmp/fault")"
    eventually 10 grep -q "$1" "$root/tmp/messages"
    [ "$(process office)" = "$before" ] || fail "the tunnel was stopped for a fault: $1"
    ip netns exec branch ping -c 1 -W 2 10.9.0.1
}
router 'uci set seikan.office.mtu=100'
refused '100'
refused 'tunnel office goes on without the change'
router 'uci set seikan.office.mtu=14OO'
refused '.mtu. is not a whole number'
router 'uci set seikan.office.mtu=1400; uci add_list seikan.office.adress=10.9.9.1/24'
refused 'unknown option .adress.'
router 'uci delete seikan.office.adress; uci set seikan.plc=device; uci set seikan.plc.name=plc; uci add_list seikan.plc.alow_from=any'
refused 'unknown option .alow_from.'
router 'uci delete seikan.plc; uci set seikan.plc=devise'
refused 'unknown type .devise.'
router 'uci delete seikan.plc; uci commit seikan; cp -p /etc/config/seikan /tmp/sound
    printf "config device\n\tlist allow_from \047\047\n" >>/etc/config/seikan'
refused 'has no value'
router 'cp -p /tmp/sound /etc/config/seikan; printf "config device\n\tlist allow_from \047any\n" >>/etc/config/seikan'
! router '/etc/init.d/seikan reload' || fail "an open quote was accepted"
[ "$(process office)" = "$before" ] || fail "the tunnel was stopped for an open quote"
router 'cp -p /tmp/sound /etc/config/seikan; /etc/init.d/seikan reload'
[ "$(process office)" = "$before" ] || fail "the tunnel was started anew for nothing"

log "a file of its own, as \`seikan join\` writes"
router "umask 077
    printf 'private-key-file = \"office.key\"\naddress = \"10.9.4.1/24\"\n' >/etc/seikan/mesh.toml
    uci set seikan.mesh=tunnel
    uci set seikan.mesh.file=/etc/seikan/mesh.toml"
changed
eventually 20 router 'ip address show mesh | grep -q 10.9.4.1'
before=$(process mesh)
router "printf '[[peer]]\npublic-key = \"%s\"\nallowed-ips = \"10.9.4.2/32\"\n' '$("$seikan" genkey | "$seikan" pubkey)' >>/etc/seikan/mesh.toml
    /etc/init.d/seikan reload
    seikan status mesh | grep -q 10.9.4.2/32"
router 'echo "mtu = [" >>/etc/seikan/mesh.toml; ! /etc/init.d/seikan reload'
router 'seikan status mesh | grep -q 10.9.4.2/32'
[ "$(process mesh)" = "$before" ] || fail "a change of its file stopped the tunnel"
router 'sed -i -e \$d -e s/10.9.4.1/10.9.5.1/ /etc/seikan/mesh.toml; /etc/init.d/seikan reload'
[ "$(process mesh)" = "$before" ] || fail "a change of its file started the tunnel anew"
router '/etc/init.d/seikan restart'
eventually 40 router 'ip address show mesh | grep -q 10.9.5.1'
eventually 20 runs office
# Without its file it goes on. Once it has ended, as after `seikan leave`, procd does not try it again and again.
before=$(process mesh)
router 'mv /etc/seikan/mesh.toml /tmp/mesh.toml; ! /etc/init.d/seikan reload'
[ "$(process mesh)" = "$before" ] || fail "a tunnel was stopped without its file"
router 'seikan down mesh; ! /etc/init.d/seikan reload'
[ -z "$(router "ubus call service list '{\"name\":\"seikan\"}' | jsonfilter -q -e '@.seikan.instances.mesh' || :")" ] ||
    fail "procd starts a tunnel without its file"
runs office
router 'mv /tmp/mesh.toml /etc/seikan/mesh.toml; /etc/init.d/seikan reload'
eventually 20 router 'seikan status mesh'
router 'uci set seikan.mesh.enabled=0'
changed
gone() { ! ip -n router link show "$1"; }
eventually 20 gone mesh
runs office

log "a member of a mesh, by the commands of the guide"
# block PAGE HEADING WORD: the block of commands with this word below a heading
block() {
    python3 - "$@" <<'END'
import re, sys
page, heading, word = sys.argv[1:]
below = open(page).read().split(f"\n## {heading}\n")[1].split("\n## ")[0]
[found] = [text for text in re.findall(r"^```sh\n(.*?)^```", below, re.M | re.S) if word in text]
print(found, end="")
END
}
page=../../docs/guides/openwrt.md
# A function of /etc/profile there.
as_user='service() { "/etc/init.d/$1" "$2"; }'
echo '192.0.2.2 hub.example.org' >"$root/etc/hosts"
# The coordinator becomes a user who cannot enter $work.
ip netns exec branch "$seikan" coordinator --dir /run/coordinator >"$work/coordinator" 2>&1 &
eventually 20 grep -q listens "$work/coordinator"
join=$("$seikan" coordinator token --dir /run/coordinator --reusable --host hub.example.org | grep -o 'seikan join .*')
secret=$(echo "$join" | grep -o 'skt_[^ ]*')
pin=$(echo "$join" | grep -o 'sha256:[^ ]*')
members() { "$seikan" coordinator members --dir /run/coordinator --json | python3 -c 'import json, sys; print(*(m["name"] for m in json.load(sys.stdin)))'; }
commands=$(block $page 'A member of a mesh' 'seikan join' | sed -e "s/sha256:\.\.\./$pin/" -e "s/skt_\.\.\./$secret/")
[[ $commands == *"$secret"* ]] || fail "$page has no token to replace"
router "$as_user
$commands"
eventually 30 router 'seikan status seikan0 --json | grep -q "\"contact\": *\"connected\""'
name=$(members)
[ -n "$name" ] || fail "the coordinator has no member"
# Another member reaches it; the file of this one is not in /etc of this machine.
SEIKAN_RUN_DIR=$work/branch/run SEIKAN_STATE_DIR=$work/branch/state ip netns exec branch "$seikan" join https://192.0.2.2:7443 \
    --pin "$pin" --token "$secret" --name outside --iface "$work/branch/outside.toml" --foreground >"$work/branch/outside" 2>&1 &
address=$(ip -n router -4 -o address show seikan0 | sed -n 's|.*inet \([0-9.]*\)/.*|\1|p')
eventually 30 ip netns exec branch ping -c 1 -W 1 "$address"
# It is the same member after a restart of the service.
router '/etc/init.d/seikan restart'
eventually 40 ip netns exec branch ping -c 1 -W 1 "$address"
router "$as_user
$(block $page 'A member of a mesh' 'enabled=0')"
eventually 20 gone seikan0
runs office
router 'uci set seikan.seikan0.enabled=1'
changed
eventually 40 ip netns exec branch ping -c 1 -W 1 "$address"
router "$as_user
$(block $page 'A member of a mesh' 'seikan leave')"
eventually 20 gone seikan0
! runs seikan0 || fail "procd still starts a tunnel that has left its mesh"
router '[ ! -e /etc/seikan/seikan0.toml ]'
[ "$(members)" = outside ] || fail "after it has left, the members are: $(members)"
runs office

log "no secret is in a log"
secrets=("$psk" "$secret" "$(cat "$root/etc/seikan/office.key")")
for secret in "${secrets[@]}"; do
    ! grep -rqF "$secret" "$root/tmp/messages" "$work/procd" || fail "a secret is in the log"
done
# The pattern from a file, since the arguments of grep are read too.
[ "$(cat "$root"/proc/*/cmdline 2>/dev/null | tr '\0' '\n' | grep -cFf "$work/branch/psk")" = 0 ] ||
    fail "a secret is an argument of a process"

log "removal"
router 'opkg remove seikan'
eventually 20 gone office
router '
    [ ! -e /usr/bin/seikan ]
    [ ! -e /etc/init.d/seikan ]
    [ ! -e /etc/rc.d/S95seikan ]
    # Changed by the administrator.
    [ -s /etc/config/seikan ]
    [ -s /etc/seikan/office.key ]'

log "the package of apk runs the same tunnel"
cp "$dist"/seikan-*-openwrt-x86_64.apk "$root/tmp/seikan.apk"
mkdir -p "$root/etc/apk"
echo x86_64 >"$root/etc/apk/arch"
router '
    for name in kmod-tun ca-bundle; do
        apk mkpkg --info name:$name --info version:1 --info arch:noarch --output /tmp/$name.apk
    done
    apk add --initdb --no-network --allow-untrusted /tmp/kmod-tun.apk /tmp/ca-bundle.apk /tmp/seikan.apk
    [ -L /etc/rc.d/S95seikan ]
    # The configuration of before, not the one of the package.
    grep -q "^config tunnel" /etc/config/seikan'
eventually 20 runs office
eventually 30 ip netns exec branch ping -c 1 -W 1 10.9.0.1
# For aarch64 it has to be told the architecture.
cp "$dist"/seikan-*-openwrt-aarch64_generic.apk "$root/tmp/aarch64.apk"
router '
    if apk add --simulate --no-network --allow-untrusted /tmp/aarch64.apk; then exit 1; fi
    cp /etc/apk/arch /tmp/arch
    echo aarch64_generic >>/etc/apk/arch
    apk add --simulate --no-network --allow-untrusted /tmp/aarch64.apk
    cp /tmp/arch /etc/apk/arch'
router 'apk del --no-network seikan'
eventually 20 gone office
router '
    [ ! -e /usr/bin/seikan ]
    [ ! -e /etc/rc.d/S95seikan ]
    [ -s /etc/seikan/office.key ]'

log "a package for another architecture is refused, unless its architecture is added"
for file in "$dist"/seikan-*-openwrt-aarch64_generic.ipk; do
    [ -e "$file" ] || fail "there is no package for aarch64"
    cp "$file" "$root/tmp/aarch64.ipk"
done
router '
    if opkg --noaction install /tmp/aarch64.ipk; then exit 1; fi
    opkg --noaction --add-arch all:1 --add-arch aarch64_generic:2 install /tmp/aarch64.ipk'
echo "= by opkg and procd of OpenWrt v24.10.8, and by apk of 25.12; $(stat -c %s "$ipk") bytes of ipk"
