#!/usr/bin/env bash
# The image under podman and crun: coordinator, relay and two members. All with a read-only root and few
# capabilities, as in packaging/container/compose.yaml. Applications are in containers of Debian that share the network of a
# member; one of these members has no capability and no interface, but a proxy. Then the services of the compose file, by
# podman-compose.
. ./machines.sh
set -euo pipefail
# crun refuses to run beside an empty cgroup2 hierarchy; this is in a mount namespace of its own.
umount /sys/fs/cgroup/unified 2>/dev/null || :
engine() { podman --storage-driver vfs --root "$work/images" --runroot "$work/containers" --runtime crun --cgroup-manager cgroupfs "$@"; }
finish() {
    if [ "$1" != 0 ]; then
        for name in $(engine ps --all --format '{{.Names}}'); do
            log "$name"
            engine logs "$name" || :
        done
    fi
    engine rm --force --all --time 1 >/dev/null 2>&1 || :
    [ -z "${server:-}" ] || kill "$server"
}
trap 'finish $?' EXIT
engine load -q -i "$dist"/seikan-*-image.tar
image=$(engine images --format '{{.Repository}}:{{.Tag}}' | head -n 1)

ip link add switch type bridge
ip link set switch up
number=0
for name in hub pod edge; do
    number=$((number + 1))
    ip netns add $name
    ip link add port-$name type veth peer name eth0 netns $name
    ip link set port-$name master switch up
    ip -n $name link set lo up
    ip -n $name link set eth0 up
    ip -n $name address add 192.0.2.$number/24 dev eth0
done

confined=(--cgroups disabled --ulimit nofile=4096:4096 --ulimit nproc=1024:1024 --cap-drop ALL --security-opt no-new-privileges --read-only)
# run NAME NETWORK OPTIONS... -- ARGUMENTS...
run() {
    local name=$1 network=$2 options=()
    shift 2
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    engine run --detach --name "$name" --network "ns:/run/netns/$network" "${confined[@]}" --pull never "${options[@]}" "$image" "$@"
}
# beside MEMBER OPTIONS... -- COMMAND...: an application that shares the network of a member
beside() {
    local member=$1 options=()
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    engine run --rm --network "container:$member" "${confined[@]}" "${options[@]}" --rootfs "$work/application" "$@"
}
member=(--cap-add NET_ADMIN,NET_BIND_SERVICE,SETUID,SETGID,SETPCAP,CHOWN --device /dev/net/tun --tmpfs /run --tmpfs /var/run)

run coordinator hub --user 61001:61001 --volume coordinator:/var/lib/seikan-coordinator -- coordinator
run relay hub --user 61002:61002 --volume relay:/var/lib/seikan-relay -- relay
eventually 20 engine exec coordinator /usr/bin/seikan coordinator members
join=$(engine exec coordinator /usr/bin/seikan coordinator token --reusable --host 192.0.2.1)
pin=$(echo "$join" | grep -o 'sha256:[^ ]*')
SEIKAN_TOKEN=$(echo "$join" | grep -o 'skt_[^ ]*')
export SEIKAN_TOKEN
eventually 10 engine exec relay /usr/bin/seikan relay secret
for name in hub pod; do
    run member-$name $name --hostname $name "${member[@]}" --env SEIKAN_TOKEN --volume config-$name:/etc/seikan --volume state-$name:/var/lib/seikan -- \
        join https://192.0.2.1:7443 --pin "$pin" --foreground
done
eventually 30 ip -n hub -4 -o address show seikan0
address=$(ip -n hub -4 -o address show seikan0 | sed -n 's|.*inet \([0-9.]*\)/.*|\1|p')
eventually 30 ip netns exec pod ping -c 1 -W 1 "$address"
engine exec member-pod /usr/bin/seikan status
[ "$(engine exec coordinator /usr/bin/seikan coordinator members --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)))')" = 2 ]

# Sidecars. Debian has neither curl nor Python here.
cp -a "$base" "$work/application"
cat >"$work/application/usr/local/bin/fetch" <<'END'
#!/bin/bash
# fetch HOST PORT [PROXY]: a page, directly or by SOCKS5 (RFC 1928) from this port of 127.0.0.1
set -eu
if [ $# = 2 ]; then
    exec 3<>"/dev/tcp/$1/$2"
else
    exec 3<>"/dev/tcp/127.0.0.1/$3"
    printf '\5\1\0' >&3
    [ "$(dd bs=1 count=2 <&3 2>/dev/null | od -An -tx1)" = " 05 00" ]
    printf "\\5\\1\\0\\3\\x$(printf %x ${#1})%s\\x$(printf %x $(($2 / 256)))\\x$(printf %x $(($2 % 256)))" "$1" >&3
    [ "$(dd bs=1 count=10 <&3 2>/dev/null | od -An -tx1 | cut -c 1-6)" = " 05 00" ]
fi
printf 'GET / HTTP/1.0\r\n\r\n' >&3
cat <&3
END
chmod 755 "$work/application/usr/local/bin/fetch"
mkdir "$work/served"
echo 'hello from the hub' >"$work/served/index.html"
ip netns exec hub python3 -m http.server --directory "$work/served" --bind "$address" 8000 >/dev/null 2>&1 &
server=$!
eventually 10 ip netns exec hub python3 -c "import socket; socket.create_connection(('$address', 8000), 1)"
beside member-pod --cap-add NET_RAW -- ping -c 1 -W 2 "$address"
beside member-pod -- fetch "$address" 8000 | grep -x 'hello from the hub'

# Without a capability and a device, as containers.md says.
run member-edge edge --tmpfs /run --tmpfs /var/run --env SEIKAN_TOKEN --volume config-edge:/etc/seikan --volume state-edge:/var/lib/seikan -- \
    join https://192.0.2.1:7443 --pin "$pin" --name edge --foreground --userspace --socks 1080
eventually 30 engine exec member-edge /usr/bin/seikan status seikan0
! ip -n edge link show seikan0 2>/dev/null || fail "a tunnel without rights has an interface"
fetched() { beside member-edge -- fetch hub 8000 1080 | grep -x 'hello from the hub'; }
eventually 30 fetched
[ "$(engine exec coordinator /usr/bin/seikan coordinator members --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)))')" = 3 ]
kill $server
server=

# A second start is the same member, although its token is gone.
engine rm --force --time 2 member-pod
SEIKAN_TOKEN=skt_used run member-pod pod "${member[@]}" --env SEIKAN_TOKEN --volume config-pod:/etc/seikan --volume state-pod:/var/lib/seikan -- \
    join https://192.0.2.1:7443 --pin "$pin" --name pod --foreground
eventually 30 ip netns exec pod ping -c 1 -W 1 "$address"
echo "= image of $(($(stat -c %s "$dist"/seikan-*-image.tar) / 1000)) kB; coordinator, relay, three members and applications beside them"
engine rm --force --all --time 1
engine volume rm --force --all

# packaging/container/compose.yaml by podman-compose, with the command of its comment. The engine is the same. A namespace
# replaces the network of the host, and another one the bridge of the engine, which needs a firewall.
cat >"$work/podman" <<END
#!/usr/bin/env bash
engine=(podman --storage-driver vfs --root $work/images --runroot $work/containers --runtime crun --cgroup-manager cgroupfs)
[ "\$1" != network ] || exit 0
words=("\$1")
case \$1 in run | create) words+=(--cgroups disabled --ulimit nofile=4096:4096 --ulimit nproc=1024:1024 --pull never) ;; esac
for word in "\${@:2}"; do
    case \$word in
    --network=host) word=--network=ns:/run/netns/hub ;;
    --network=*) word=--network=ns:/run/netns/pod ;;
    --network-alias=*) continue ;;
    esac
    words+=("\$word")
done
exec "\${engine[@]}" "\${words[@]}"
END
chmod 755 "$work/podman"
compose() {
    SEIKAN_VERSION=${image##*:} HUB=192.0.2.1 timeout 120 "$validators/bin/podman-compose" --podman-path "$work/podman" --in-pod false \
        --project-name mesh --file ../container/compose.yaml "$@"
}
compose up --detach
eventually 20 compose exec -T coordinator /usr/bin/seikan coordinator members
# As in the comment, without a terminal.
grep -F 'compose exec coordinator /usr/bin/seikan coordinator token --reusable --host "$HUB"' ../container/compose.yaml
join=$(compose exec -T coordinator /usr/bin/seikan coordinator token --reusable --host 192.0.2.1)
eventually 10 compose exec -T relay /usr/bin/seikan relay secret
JOIN_PIN=$(echo "$join" | grep -o 'sha256:[^ ]*')
SEIKAN_TOKEN=$(echo "$join" | grep -o 'skt_[^ ]*')
export JOIN_PIN SEIKAN_TOKEN
compose --profile member up --detach
eventually 30 compose --profile member exec -T member /usr/bin/seikan status seikan0
compose exec -T coordinator /usr/bin/seikan coordinator members | grep web-1
# Restarted, it is the same member, without its token.
compose --profile member down
SEIKAN_TOKEN=skt_used compose --profile member up --detach
eventually 30 compose --profile member exec -T member /usr/bin/seikan status seikan0
[ "$(compose exec -T coordinator /usr/bin/seikan coordinator members --json | grep -c '"name"')" = 1 ] || fail "the member of the compose file joined twice"
compose --profile member down --volumes
echo "= podman-compose runs a coordinator, a relay and a member of compose.yaml"
engine rm --force --all --time 1
ip netns delete hub
ip netns delete pod
ip netns delete edge
rm -rf --one-file-system "$work/application"
ip link delete switch
