#!/usr/bin/env bash
# Installs the OpenWrt packages of `make dist` in a root with busybox, opkg, apk, uci, ubus, procd and the shell libraries of
# OpenWrt, all of the sources of a release, and runs a tunnel from it. The kernel, netifd and the firewall are not OpenWrt's.
#
#   scripts/openwrt-check.sh     root; a minute, and a few more for the first run, which builds these programs
#
# OPENWRT_SOURCES=DIR has clones of OpenWrt's repositories and of apk-tools, by name, instead of GitHub.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
: "${TOOLS:=${CARGO_HOME:-$HOME/.cargo}/seikan-tools}"
# v24.10.8. Its makefiles name the commits of the programs.
release=0b795ce79e23b553aa184080c390f9ce92a2b6d4
# v3.0.5 of apk-tools, which OpenWrt 25.12 has.
apk_release=b5a31c0d865342ad80be10d68f1bb3d3ad9b0866
[ "$(id -u)" = 0 ] || { echo "a root of its own needs root" >&2; exit 1; }
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
dist=$target/dist
[ -e "$dist/SHA256SUMS" ] || { echo "nothing in $dist: run \`make dist\` first" >&2; exit 1; }
install_missing git:git cmake:cmake cc:gcc pkg-config:pkg-config /usr/share/doc/libjson-c-dev:libjson-c-dev /usr/share/doc/libbsd-dev:libbsd-dev busybox:busybox-static \
    meson:meson /usr/share/doc/libssl-dev:libssl-dev /usr/share/doc/zlib1g-dev:zlib1g-dev shellcheck:shellcheck ip:iproute2 unshare:util-linux

main() {
    shellcheck --shell=dash packaging/openwrt/files/uci-to-toml packaging/openwrt/scripts/*
    # With the first line of a plain shell.
    sed '1s/.*/#!\/bin\/sh/' packaging/openwrt/files/seikan.init | shellcheck --shell=dash -
    openwrt=$TOOLS/openwrt-$release
    [ -e "$openwrt/done" ] || {
        echo "building the programs of OpenWrt"
        rm -rf "$openwrt"
        mkdir -p "$openwrt/src"
        trap 'tail -n 20 "$openwrt/log" >&2' EXIT
        build_all >"$openwrt/log" 2>&1
        trap - EXIT
        touch "$openwrt/done"
    }
    work=$(mktemp -d)
    trap 'rm -rf --one-file-system "$work"' EXIT
    export dist work openwrt
    unshare --mount --net --pid --fork --kill-child --mount-proc packaging/tests/all.sh openwrt
}

build_all() {
    local file
    unpack openwrt "$release" package/base-files package/system package/libs/libubox package/libs/udebug package/utils/jsonfilter
    build libubox package/libs/libubox
    build ubus package/system/ubus
    # Without its module for ucode.
    build udebug package/libs/udebug "udebug" -Ducode_include_dir=/usr/include
    cp "$openwrt/src/udebug/libudebug.so" "$openwrt/lib/"
    cp "$openwrt"/src/udebug/*.h "$openwrt/include/"
    build uci package/system/uci
    # The C library of Debian 12 has no strlcpy.
    build procd package/system/procd procd -DDISABLE_INIT=1 -DCMAKE_C_STANDARD_LIBRARIES=-lbsd -DCMAKE_C_FLAGS="-I$openwrt/include -include bsd/string.h"
    cp "$openwrt/src/procd/procd" "$openwrt/sbin/"
    build jsonpath package/utils/jsonfilter jsonpath
    cp "$openwrt/src/jsonpath/jsonpath" "$openwrt/bin/jsonfilter"
    build opkg-lede package/system/opkg "" -DBUILD_TESTS=OFF
    build_apk
    for file in bin/apk bin/uci bin/ubus bin/jshn bin/jsonfilter bin/opkg-cl sbin/ubusd sbin/procd; do
        [ -x "$openwrt/$file" ]
    done
}

build_apk() {
    local absent folder=$openwrt/src/apk-tools options=()
    for absent in lua help docs python tests zstd; do
        options+=(-D$absent=disabled)
    done
    unpack apk-tools $apk_release
    meson setup "$folder/out" "$folder" --buildtype=plain -Ddefault_library=static "${options[@]}"
    ninja -C "$folder/out"
    cp "$folder/out/src/apk" "$openwrt/bin/"
}

# unpack NAME COMMIT PATH...: files of a repository to src/NAME
unpack() {
    local name=$1 commit=$2 repository=${OPENWRT_SOURCES:-}/$1
    shift 2
    mkdir -p "$openwrt/src/$name"
    if [ -z "${OPENWRT_SOURCES:-}" ]; then
        repository=$openwrt/git/$name
        git init -q --bare "$repository"
        git -C "$repository" remote add origin "https://github.com/$([ "$name" = apk-tools ] && echo alpinelinux || echo openwrt)/$name"
        git -C "$repository" fetch -q --depth 1 --filter=blob:none origin "$commit"
    fi
    git -C "$repository" archive "$commit" "$@" | tar -x -C "$openwrt/src/$name"
}

# build NAME PACKAGE [TARGET [OPTIONS...]]: builds the commit that a package of OpenWrt names. Newer compilers warn of more.
build() {
    local name=$1 makefile=$openwrt/src/openwrt/$2/Makefile only=${3:-}
    unpack "$name" "$(sed -n 's/^PKG_SOURCE_VERSION:=//p' "$makefile")"
    find "$openwrt/src/$name" -name CMakeLists.txt -exec sed -i 's/-Werror\([ )]\)/-Wno-error\1/g' {} +
    cmake -S "$openwrt/src/$name" -B "$openwrt/src/$name" -DCMAKE_INSTALL_PREFIX="$openwrt" -DCMAKE_INSTALL_LIBDIR=lib \
        -DCMAKE_PREFIX_PATH="$openwrt" -DCMAKE_C_FLAGS="-I$openwrt/include" -DCMAKE_EXE_LINKER_FLAGS="-L$openwrt/lib" \
        -DCMAKE_SHARED_LINKER_FLAGS="-L$openwrt/lib" -DBUILD_LUA=OFF -DBUILD_EXAMPLES=OFF "${@:4}"
    cmake --build "$openwrt/src/$name" ${only:+--target "$only"}
    [ -n "$only" ] || cmake --install "$openwrt/src/$name"
}

main
