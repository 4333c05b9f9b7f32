#!/usr/bin/env bash
# The archive: its checksum, its files, and that the program runs in a root without any library.
. ./machines.sh
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
