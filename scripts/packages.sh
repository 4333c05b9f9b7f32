# Installs Debian packages; sourced by the other scripts.

# install_missing COMMAND:PACKAGE...: installs the packages of missing commands (or files, by path), as root, without starting
# their services.
install_missing() {
    local need missing=() sudo=() policy=/usr/sbin/policy-rc.d
    for need in "$@"; do
        [ -e "${need%%:*}" ] || PATH=$PATH:/usr/sbin:/sbin command -v "${need%%:*}" >/dev/null || missing+=("${need##*:}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || { echo "missing: ${missing[*]}; install them as root, then run this again" >&2; exit 1; }
        sudo=(sudo)
    fi
    echo "installing ${missing[*]}"
    (
        if [ ! -e $policy ]; then
            trap '"${sudo[@]}" rm -f $policy' EXIT
            printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee $policy >/dev/null
            "${sudo[@]}" chmod 755 $policy
        fi
        "${sudo[@]}" apt-get update -q >/dev/null
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "${missing[@]}" >/dev/null
    )
}
