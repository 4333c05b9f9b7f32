#!/usr/bin/env bash
# The archive: its checksum, its files, that the program runs in a root without any library, and that the units work where the
# commands of docs/getting-started/install.md put them.
. ./machines.sh
. ./tunnel.sh
set -euo pipefail
(cd "$dist" && sha256sum --check --quiet SHA256SUMS)
mkdir "$work/archive"
tar -C "$work/archive" --strip-components=1 -xzf "$dist"/seikan-*-linux-x86_64.tar.gz
for file in bin/seikan bin/seikan-lab share/man/man1/seikan.1.gz share/man/man1/seikan-up.1.gz share/man/man1/seikan-lab.1.gz \
    share/bash-completion/completions/seikan share/zsh/site-functions/_seikan share/fish/vendor_completions.d/seikan.fish \
    share/seikan/prometheus/seikan.rules.yaml share/seikan/grafana/seikan.json \
    share/doc/seikan/systemd/seikan@.service share/doc/seikan/examples/office.toml share/doc/seikan/LICENSE-MIT \
    share/seikan/schemas/status.json; do
    [ -s "$work/archive/$file" ] || fail "$file is missing"
done
chroot "$work/archive" /bin/seikan --version
chroot "$work/archive" /bin/seikan genkey >/dev/null
"$validators/bin/check-jsonschema" --check-metaschema "$work"/archive/share/seikan/schemas/*.json
echo "= seikan: $(stat -c %s "$work/archive/bin/seikan") bytes, static"

# The list of linked crates is CycloneDX and names the cryptography.
python3 - "$dist"/seikan-*.cdx.json <<'END'
import json, sys
bom = json.load(open(sys.argv[1]))
assert bom["bomFormat"] == "CycloneDX", bom["bomFormat"]
names = {component["name"] for component in bom["components"]}
assert {"aws-lc-rs", "rustls", "chacha20poly1305"} <= names, names
print(f"= {len(names)} linked crates listed")
END
zcat "$work/archive/share/doc/seikan/licenses-of-libraries.gz" | grep 'aws-lc-sys' >/dev/null

# The commands of that page, as a reader copies them. The machine has no sudo and its user is root.
page=../../docs/getting-started/install.md
version=$(cd "$dist" && echo seikan-*-linux-x86_64.tar.gz | sed 's/^seikan-\(.*\)-linux-.*/\1/')
commands=$(sed -n '/^## Any other distribution/,/^## OpenWrt/ { /^```sh/,/^```$/ { /^```/! p } }' $page |
    sed "s/seikan-[0-9.]*-linux/seikan-$version-linux/")
for part in 'sha256sum --check' 'tar -C /usr/local' systemd-sysusers 'sed -i' daemon-reload; do
    [[ $commands == *"$part"* ]] || fail "$page no longer has the command: $part"
done
boot office branch
rm "$work"/office/root/seikan*.deb
cp "$dist"/SHA256SUMS "$dist"/seikan-*-linux-x86_64.tar.gz "$work/office/root/"
install_on() {
    if [ "$1" = office ]; then
        on office "sudo() { \"\$@\"; }
            cd /root
            $commands
            mkdir -p /etc/seikan"
    else
        on "$1" 'dpkg -i /root/seikan_*.deb'
    fi
}
tunnel office branch
on office '
    [ ! -e /usr/bin/seikan ]
    [ "$(systemctl show -p UnitFileState --value seikan@tunnel)" = enabled ]
    pgrep -u seikan -x seikan
    systemctl reload seikan@tunnel
    systemctl enable --now seikan-coordinator seikan-relay
    pgrep -u seikan-coordinator -x seikan
    pgrep -u seikan-relay -x seikan
    systemctl restart seikan@tunnel'
eventually 30 on office 'ping -c 1 -W 1 10.9.0.2'
eventually 30 on branch 'ping -c 1 -W 1 10.9.0.1'
halt
echo "= the units of the archive run a tunnel, a coordinator and a relay, installed as $(basename $page) says"
