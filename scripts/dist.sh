#!/usr/bin/env bash
# Builds what users install, in $CARGO_TARGET_DIR/dist, for x86-64 and aarch64: static binaries in archives, packages for Debian,
# for RPM systems and for OpenWrt, the image for containers, a list of all that is linked in (SBOM), and checksums. Installs the
# tools for it. `seikan-lab` and the image are made for x86-64 only.
#
#   scripts/dist.sh           everything; twenty minutes from cold
#   scripts/dist.sh smoke     only the packages, of the debug binaries, and what is in them is checked; tests the alerts; a minute from cold
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
: "${TOOLS:=${CARGO_HOME:-$HOME/.cargo}/seikan-tools}"
export PATH=$TOOLS/bin:$PATH
triple=x86_64-unknown-linux-musl arm_triple=aarch64-unknown-linux-musl
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
dist=$target/dist
VERSION=$(sed -nE '/^\[workspace.package\]/,/^\[/ s/^version = "(.*)"/\1/p' Cargo.toml)
# Files bear the time of the commit, so that two builds of one commit are equal.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
STAGE=$dist/stage
export VERSION SOURCE_DATE_EPOCH STAGE

main() {
    install_packager
    if [ "${1:-}" = smoke ]; then
        dist=$target/dist-smoke STAGE=$target/dist-smoke/stage
        start
        # Those of the tests, which are built anyway.
        [ -x "$target/debug/seikan" ] && [ -x "$target/debug/seikan-lab" ] || cargo build --locked -p seikan-cli -p seikan-lab
        stage_programs "$target/debug"
        gzip -9nc LICENSE-MIT >"$STAGE/doc/licenses-of-libraries.gz"
        write_packages amd64
        write_openwrt x86_64
        check_packages
        check_openwrt x86_64 x86-64
        scripts/monitoring-check.sh rules
        rm -rf "$dist"
        exit
    fi
    install_builders
    # Written beside the manifests, also when this is interrupted.
    trap 'find crates fuzz -name seikan-sbom.json -delete' EXIT
    start
    # Without the paths of this machine.
    export RUSTFLAGS="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$PWD=/seikan"
    CC_x86_64_unknown_linux_musl=musl-gcc cargo build --locked --release --target $triple -p seikan-cli -p seikan-lab
    PATH=$TOOLS/zig/bin:$PATH cargo zigbuild --locked --release --target $arm_triple -p seikan-cli
    stage_programs "$target/$triple/release"
    # Linked without symbols.
    install -m 755 "$target/$arm_triple/release/seikan" "$STAGE/arm/seikan"
    check_programs
    write_licenses
    write_archive x86_64 "$STAGE/bin"
    write_archive aarch64 "$STAGE/arm"
    write_packages amd64
    write_packages arm64
    write_openwrt x86_64
    write_openwrt aarch64_generic
    check_packages
    check_arm_packages
    check_openwrt x86_64 x86-64
    check_openwrt aarch64_generic aarch64
    write_image
    write_sbom
    rm -rf "$STAGE"
    (cd "$dist" && sha256sum -- * >SHA256SUMS)
    (cd "$dist" && ls -l --block-size=1 | awk 'NR > 1 { printf "%12d  %s\n", $5, $9 }')
}

install_packager() {
    local nfpm=2.45.0 needs=(strip:binutils gzip:gzip)
    command -v go >/dev/null || needs+=(go:golang-go)
    install_missing "${needs[@]}"
    # Writes deb and rpm from one description, without the tools of either (MIT).
    [ "$(cat "$TOOLS/nfpm.version" 2>/dev/null)" = $nfpm ] || {
        echo "installing nfpm $nfpm"
        GOBIN=$TOOLS/bin go install -trimpath "github.com/goreleaser/nfpm/v2/cmd/nfpm@v$nfpm"
        echo $nfpm >"$TOOLS/nfpm.version"
    }
}

install_builders() {
    install_missing cc:gcc musl-gcc:musl-tools readelf:binutils buildah:buildah crun:crun \
        /usr/share/ca-certificates/mozilla:ca-certificates
    local name
    for name in $triple $arm_triple; do
        [ -d "$(rustc --print sysroot)/lib/rustlib/$name" ] || rustup target add $name
    done
    install_zig
    # The list of linked crates (Apache-2.0), and the texts of their licences (Apache-2.0 OR MIT).
    cargo_tool cargo-cyclonedx 0.5.9
    cargo_tool cargo-about 0.9.3 --features cli
}

# A C compiler and a C library (musl) for aarch64 in one package: Zig (MIT), called by cargo-zigbuild (MIT). From PyPI.
install_zig() {
    [ "$(cat "$TOOLS/zig/version" 2>/dev/null)" != "zigbuild 0.24.0, zig 0.17.1" ] || return 0
    echo "installing cargo-zigbuild 0.24.0, zig 0.17.1"
    install_missing python3:python3 /usr/share/doc/python3-venv:python3-venv
    rm -rf "$TOOLS/zig"
    python3 -m venv "$TOOLS/zig"
    cat >"$TOOLS/zig/requirements" <<'END'
cargo-zigbuild==0.24.0 --hash=sha256:484412e39e4c6039474535ce97ee75a22bab22d58233056f8ec8a8f9034bb957
ziglang==0.17.1 --hash=sha256:ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54
END
    "$TOOLS/zig/bin/pip" install -q --disable-pip-version-check --only-binary :all: --require-hashes -r "$TOOLS/zig/requirements"
    echo "zigbuild 0.24.0, zig 0.17.1" >"$TOOLS/zig/version"
}

# cargo_tool NAME VERSION OPTIONS...
cargo_tool() {
    grep -qs "\"$1 $2 " "$TOOLS/.crates2.json" || {
        echo "installing $1 $2"
        cargo install -q --locked --root "$TOOLS" "$1@$2" "${@:3}"
    }
}

start() {
    rm -rf "$dist"
    mkdir -p "$STAGE"/{bin,arm,doc}
}

# stage_programs DIR: the programs of DIR without symbols, and all that they write about themselves
stage_programs() {
    local program
    for program in seikan seikan-lab; do
        strip -o "$STAGE/bin/$program" "$1/$program"
        "$STAGE/bin/$program" generate man "$STAGE/man/$program"
        "$STAGE/bin/$program" generate completions "$STAGE/completions"
    done
    gzip -9n "$STAGE"/man/*/*.1
    gzip -9nc CHANGELOG.md >"$STAGE/doc/changelog.gz"
    printf 'seikan (%s-1) stable; urgency=medium\n\n  * See changelog.gz.\n\n -- Seikan developers <packages@seikan.net>  %s\n' \
        "$VERSION" "$(date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9nc >"$STAGE/doc/changelog.Debian.gz"
}

write_licenses() {
    local program
    # The list is made offline, and is read from the crates of all platforms.
    cargo fetch --quiet --locked
    for program in cli lab; do
        cargo-about generate --frozen --target $triple --manifest-path crates/$program/Cargo.toml --config packaging/licenses/about.toml \
            packaging/licenses/about.hbs 2>"$STAGE/about.log" >"$STAGE/licenses.$program" || {
            cat "$STAGE/about.log" >&2
            exit 1
        }
    done
    {
        cat packaging/licenses/musl
        printf '\nLibraries in seikan\n\n'
        cat "$STAGE/licenses.cli"
        printf '\nLibraries in seikan-lab\n\n'
        cat "$STAGE/licenses.lab"
    } | gzip -9nc >"$STAGE/doc/licenses-of-libraries.gz"
}

check_programs() {
    local program size
    for program in bin/seikan bin/seikan-lab arm/seikan; do
        readelf -lW "$STAGE/$program" | { ! grep -q INTERP; } || { echo "$program is not static" >&2; exit 1; }
    done
    for program in bin/seikan arm/seikan; do
        size=$(stat -c %s "$STAGE/$program")
        [ "$size" -le $((20 * 1000 * 1000)) ] || { echo "$program has $size bytes, more than 20 MB" >&2; exit 1; }
    done
    readelf -hSW "$STAGE/arm/seikan" >"$STAGE/arm.elf"
    grep -q AArch64 "$STAGE/arm.elf"
    ! grep -q symtab "$STAGE/arm.elf" || { echo "arm/seikan has symbols" >&2; exit 1; }
}

# write_archive PROCESSOR PROGRAMS: an archive with the layout of a file system below /usr/local
write_archive() {
    local program name=seikan-$VERSION-linux-$1 tree=$STAGE/seikan-$VERSION-linux-$1
    mkdir -p "$tree/bin" "$tree/share/man/man1" "$tree/share/bash-completion/completions" "$tree/share/zsh/site-functions" \
        "$tree/share/fish/vendor_completions.d" "$tree/share/doc/seikan" "$tree"/share/seikan/{prometheus,grafana}
    cp "$2"/* "$tree/bin/"
    for program in $(cd "$2" && echo *); do
        cp "$STAGE/man/$program"/*.1.gz "$tree/share/man/man1/"
        cp "$STAGE/completions/$program.bash" "$tree/share/bash-completion/completions/$program"
        cp "$STAGE/completions/_$program" "$tree/share/zsh/site-functions/"
        cp "$STAGE/completions/$program.fish" "$tree/share/fish/vendor_completions.d/"
    done
    cp packaging/prometheus/seikan.rules.yaml "$tree/share/seikan/prometheus/"
    cp packaging/grafana/seikan.json "$tree/share/seikan/grafana/"
    cp -r packaging/schemas "$tree/share/seikan/"
    cp -r packaging/examples packaging/systemd packaging/sysusers.d packaging/networkd packaging/networkmanager CHANGELOG.md \
        LICENSE-APACHE LICENSE-MIT "$STAGE/doc/licenses-of-libraries.gz" "$tree/share/doc/seikan/"
    find "$tree" -type f -exec chmod u=rw,go=r {} + -o -type d -exec chmod 755 {} +
    chmod 755 "$tree"/bin/*
    tar -C "$STAGE" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -c "$name" |
        gzip -9n >"$dist/$name.tar.gz"
}

# write_packages GOARCH: deb and rpm
write_packages() {
    local package packager programs=$STAGE/bin packages="seikan seikan-lab"
    [ "$1" = amd64 ] || programs=$STAGE/arm packages=seikan
    for package in $packages; do
        for packager in deb rpm; do
            GOARCH=$1 PROGRAMS=$programs package "$package" $packager "$dist/"
        done
    done
}

# write_openwrt ARCHITECTURE: ipk and apk; the architecture as OpenWrt names it
write_openwrt() {
    local packager programs=$STAGE/bin
    [ "$1" = x86_64 ] || programs=$STAGE/arm
    for packager in ipk apk; do
        OPENWRT_ARCH=$1 PROGRAMS=$programs package openwrt $packager "$dist/seikan-$VERSION-openwrt-$1.$packager"
    done
}

# package CONFIGURATION PACKAGER TARGET
package() {
    nfpm package --config "packaging/nfpm/$1.yaml" --packager "$2" --target "$3" >"$STAGE/nfpm.log" 2>&1 || {
        cat "$STAGE/nfpm.log" >&2
        exit 1
    }
}

# What is in the packages: every unit, the scripts, the rights; and that the program in it runs.
check_packages() {
    local file root=$STAGE/root
    dpkg-deb -x "$dist"/seikan_*_amd64.deb "$root"
    dpkg-deb -x "$dist"/seikan-lab_*_amd64.deb "$root"
    dpkg-deb -e "$dist"/seikan_*_amd64.deb "$STAGE/control"
    for file in packaging/systemd/* packaging/sysusers.d/*; do
        cmp "$file" "$root/usr/lib/${file#packaging/}" 2>/dev/null || cmp "$file" "$root/usr/lib/systemd/system/${file##*/}"
    done
    cmp packaging/networkd/10-seikan.conf "$root/usr/lib/systemd/networkd.conf.d/10-seikan.conf"
    cmp packaging/networkd/10-seikan.network "$root/usr/lib/systemd/network/10-seikan.network"
    cmp packaging/networkmanager/10-seikan.conf "$root/usr/lib/NetworkManager/conf.d/10-seikan.conf"
    check_networkmanager "$root/usr/lib/NetworkManager/conf.d/10-seikan.conf"
    for file in prometheus/seikan.rules.yaml grafana/seikan.json; do
        cmp "packaging/$file" "$root/usr/share/seikan/$file"
    done
    diff -r packaging/schemas "$root/usr/share/seikan/schemas"
    for file in postinst prerm postrm; do
        sh -n "$STAGE/control/$file"
    done
    [ "$(find "$root" -type d ! -perm 755 -printf '%P %m\n')" = "etc/seikan 700" ] ||
        { echo "rights of directories: $(find "$root" -type d ! -perm 755 -printf '%P %m, ')" >&2; exit 1; }
    [ "$("$root/usr/bin/seikan" --version)" = "seikan $VERSION" ]
    [ "$("$root/usr/bin/seikan-lab" --version)" = "seikan-lab $VERSION" ]
    [ -s "$root/usr/share/man/man1/seikan-up.1.gz" ]
    [ -s "$root/usr/share/man/man1/seikan-lab.1.gz" ]
    echo "packages: $(find "$root" -type f | wc -l) files, $(stat -c %s "$dist"/seikan_*_amd64.deb) bytes of deb"
}

# check_networkmanager FILE: no test has a NetworkManager, which ignores a key that it does not know. NetworkManager.conf(5): a file
# of GLib's kind, whose keys end in + to add to a list; a name may have * and ?.
check_networkmanager() {
    python3 - "$1" <<'END'
import configparser, fnmatch, sys
file = configparser.RawConfigParser(delimiters="=", comment_prefixes="#", strict=True)
file.optionxform = str
file.read_string(open(sys.argv[1]).read())
assert file.sections() == ["keyfile"] and list(file["keyfile"]) == ["unmanaged-devices+"], {name: dict(file[name]) for name in file.sections()}
kinds, patterns = zip(*(device.split(":", 1) for device in file["keyfile"]["unmanaged-devices+"].split(";")))
assert set(kinds) == {"interface-name"}, kinds
for name, unmanaged in (("seikan0", True), ("seikan12", True), ("eth0", False), ("myseikan", False)):
    assert any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) == unmanaged, (name, patterns)
END
}

# The packages for aarch64 have the same files as those for x86-64, and another program.
check_arm_packages() {
    local root=$STAGE/arm-root
    dpkg-deb -x "$dist"/seikan_*_arm64.deb "$root"
    diff <(dpkg-deb -c "$dist"/seikan_*_amd64.deb | awk '{ print $1, $2, $6 }') \
        <(dpkg-deb -c "$dist"/seikan_*_arm64.deb | awk '{ print $1, $2, $6 }')
    cmp "$root/usr/bin/seikan" "$STAGE/arm/seikan"
    [ "$(dpkg-deb -f "$dist"/seikan_*_arm64.deb Architecture)" = arm64 ]
    [ -s "$dist/seikan-$VERSION-1.aarch64.rpm" ]
}

# check_openwrt ARCHITECTURE PROCESSOR: the files of the packages for OpenWrt, their rights, and that scripts are of a plain shell
check_openwrt() {
    local root=$STAGE/openwrt-$1 file
    mkdir -p "$root" "$root-control" "$root-apk"
    tar -xzOf "$dist/seikan-$VERSION-openwrt-$1.ipk" ./data.tar.gz | tar -xzf - -C "$root"
    tar -xzOf "$dist/seikan-$VERSION-openwrt-$1.ipk" ./control.tar.gz | tar -xzf - -C "$root-control"
    tar --warning=no-unknown-keyword -xzf "$dist/seikan-$VERSION-openwrt-$1.apk" -C "$root-apk" 2>/dev/null
    grep -qx "Architecture: $1" "$root-control/control"
    grep -qx /etc/config/seikan "$root-control/conffiles"
    cmp packaging/openwrt/files/seikan.init "$root/etc/init.d/seikan"
    for file in etc/init.d/seikan usr/lib/seikan/uci-to-toml; do
        [ "$(stat -c %a "$root/$file")" = 755 ]
        sh -n "$root/$file"
    done
    for file in postinst prerm; do
        sh -n "$root-control/$file"
    done
    [ "$(stat -c %a "$root/etc/config/seikan" "$root/etc/seikan" | tr '\n' ' ')" = "600 700 " ]
    readelf -h "$root/usr/bin/seikan" | grep -i "machine:.*$2" >/dev/null
    for file in usr/bin/seikan etc/init.d/seikan usr/lib/seikan/uci-to-toml lib/upgrade/keep.d/seikan; do
        cmp "$root/$file" "$root-apk/$file"
    done
}

# Built without a daemon.
write_image() {
    local context=$STAGE/context store=(--storage-driver vfs --root "$STAGE/images" --runroot "$STAGE/containers")
    mkdir -p "$context/empty"
    cp "$STAGE/bin/seikan" packaging/container/Containerfile LICENSE-APACHE LICENSE-MIT "$STAGE/doc/licenses-of-libraries.gz" "$context/"
    # Mozilla's, without those that were added to this machine.
    cat /usr/share/ca-certificates/mozilla/*.crt >"$context/ca-certificates.crt"
    buildah "${store[@]}" build --quiet --isolation chroot --format oci --timestamp "$SOURCE_DATE_EPOCH" \
        --label "org.opencontainers.image.version=$VERSION" --label org.opencontainers.image.licenses="Apache-2.0 OR MIT" \
        --tag "localhost/seikan:$VERSION" "$context" >/dev/null
    buildah "${store[@]}" push --quiet "localhost/seikan:$VERSION" "oci:$STAGE/oci:localhost/seikan:$VERSION"
    tar -C "$STAGE/oci" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf \
        "$dist/seikan-$VERSION-image.tar" .
}

write_sbom() {
    cargo cyclonedx --quiet --manifest-path crates/cli/Cargo.toml --format json --spec-version 1.5 --target $triple \
        --override-filename seikan-sbom
    mv crates/cli/seikan-sbom.json "$dist/seikan-$VERSION.cdx.json"
    mv crates/lab/seikan-sbom.json "$dist/seikan-lab-$VERSION.cdx.json"
    sed -i "s|file://$PWD|file:///seikan|g" "$dist"/*.cdx.json
}

main "$@"
