# A tunnel between machines: `. tunnel.sh`, then `tunnel office branch [NAME]` installs the package on both and starts it.

# A test may replace it by another way to install.
install_on() { on "$1" 'dpkg -i /root/seikan_*.deb'; }

configure() { # FILE HOST ADDRESS PEER ADDRESS KEY ALLOWED
    on "$2" "cat >/etc/seikan/$1.toml" <<END
private-key-file = "$1.key"
address = "$3/24"
listen-port = 51820

[[peer]]
name = "$4"
public-key = "$6"
allowed-ips = "${7:-$5/32}"
endpoint = "$4.example.org:51820"
END
    on "$2" "seikan check $1 && systemctl enable --now seikan@$1"
}

tunnel() { # HOST HOST [NAME [ALLOWED-AT-THE-FIRST]]
    local file=${3:-tunnel} name
    declare -A key
    for name in "$1" "$2"; do
        install_on "$name"
        key[$name]=$(on "$name" "umask 077; seikan genkey | tee /etc/seikan/$file.key | seikan pubkey")
    done
    configure "$file" "$1" 10.9.0.1 "$2" 10.9.0.2 "${key[$2]}" "${4:-}"
    configure "$file" "$2" 10.9.0.2 "$1" 10.9.0.1 "${key[$1]}"
    eventually 30 on "$1" 'ping -c 1 -W 1 10.9.0.2'
}
