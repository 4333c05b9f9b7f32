#!/usr/bin/env bash
# Builds what users install, in $CARGO_TARGET_DIR/dist: static binaries in an archive, packages for Debian and for RPM
# systems, the image for containers, a list of all that is linked in (SBOM), and checksums. Installs the tools for it.
#
#   scripts/dist.sh           everything; ten minutes from cold
#   scripts/dist.sh smoke     only the packages, of the debug binaries, and what is in them is checked; tests the alerts; a minute from cold
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
: "${TOOLS:=${CARGO_HOME:-$HOME/.cargo}/seikan-tools}"
export PATH=$TOOLS/bin:$PATH
triple=x86_64-unknown-linux-musl
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
dist=$target/dist
VERSION=$(sed -nE '/^\[workspace.package\]/,/^\[/ s/^version = "(.*)"/\1/p' Cargo.toml)
# Files bear the time of the commit, so that two builds of one commit are equal.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
GOARCH=amd64 STAGE=$dist/stage
export VERSION SOURCE_DATE_EPOCH GOARCH STAGE

main() {
    install_packager
    if [ "${1:-}" = smoke ]; then
        dist=$target/dist-smoke STAGE=$target/dist-smoke/stage
        start
        # Those of the tests, which are built anyway.
        [ -x "$target/debug/seikan" ] && [ -x "$target/debug/seikan-lab" ] || cargo build --locked -p seikan-cli -p seikan-lab
        stage_programs "$target/debug"
        gzip -9nc LICENSE-MIT >"$STAGE/doc/licenses-of-libraries.gz"
        write_packages
        check_packages
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
    stage_programs "$target/$triple/release"
    check_programs
    write_licenses
    write_archive
    write_packages
    check_packages
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
    [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ] || rustup target add $triple
    # The list of linked crates (Apache-2.0), and the texts of their licences (Apache-2.0 OR MIT).
    cargo_tool cargo-cyclonedx 0.5.9
    cargo_tool cargo-about 0.9.3 --features cli
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
    mkdir -p "$STAGE"/{bin,doc}
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
    for program in seikan seikan-lab; do
        readelf -lW "$STAGE/bin/$program" | { ! grep -q INTERP; } || { echo "$program is not static" >&2; exit 1; }
    done
    size=$(stat -c %s "$STAGE/bin/seikan")
    [ "$size" -le $((20 * 1000 * 1000)) ] || { echo "seikan has $size bytes, more than 20 MB" >&2; exit 1; }
}

# The archive has the layout of a file system below /usr/local.
write_archive() {
    local program name=seikan-$VERSION-linux-x86_64 tree=$STAGE/seikan-$VERSION-linux-x86_64
    mkdir -p "$tree/bin" "$tree/share/man/man1" "$tree/share/bash-completion/completions" "$tree/share/zsh/site-functions" \
        "$tree/share/fish/vendor_completions.d" "$tree/share/doc/seikan" "$tree"/share/seikan/{prometheus,grafana}
    cp "$STAGE"/bin/* "$tree/bin/"
    cp "$STAGE"/man/*/*.1.gz "$tree/share/man/man1/"
    for program in seikan seikan-lab; do
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

write_packages() {
    local package packager
    for package in seikan seikan-lab; do
        for packager in deb rpm; do
            nfpm package --config packaging/nfpm/$package.yaml --packager $packager --target "$dist/" >"$STAGE/nfpm.log" 2>&1 || {
                cat "$STAGE/nfpm.log" >&2
                exit 1
            }
        done
    done
}

# What is in the packages: every unit, the scripts, the rights; and that the program in it runs.
check_packages() {
    local file root=$STAGE/root
    dpkg-deb -x "$dist"/seikan_*.deb "$root"
    dpkg-deb -x "$dist"/seikan-lab_*.deb "$root"
    dpkg-deb -e "$dist"/seikan_*.deb "$STAGE/control"
    for file in packaging/systemd/* packaging/sysusers.d/*; do
        cmp "$file" "$root/usr/lib/${file#packaging/}" 2>/dev/null || cmp "$file" "$root/usr/lib/systemd/system/${file##*/}"
    done
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
    echo "packages: $(find "$root" -type f | wc -l) files, $(stat -c %s "$dist"/seikan_*.deb) bytes of deb"
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
