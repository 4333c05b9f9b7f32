#!/usr/bin/env bash
# The manifests for Kubernetes fit its schemas, the compose file is one, and the program takes their commands. A misspelt key is
# refused, and so is a misspelt option.
. ./machines.sh
set -euo pipefail
for file in ../kubernetes/*.yaml; do
    "$validators/bin/kubernetes-validate" --strict "$file"
done
sed 's/readOnlyRootFilesystem/readonlyRootFilesystem/' ../kubernetes/sidecar.yaml >"$work/misspelt.yaml"
! "$validators/bin/kubernetes-validate" --strict --quiet "$work/misspelt.yaml" || fail "a misspelt key is not noticed"
grep -A 2 'startupProbe:' ../kubernetes/sidecar.yaml | grep 'seikan, status' >/dev/null || fail "an application starts before its tunnel"
"$validators/bin/podman-compose" -f ../container/compose.yaml config | grep 'coordinator:' >/dev/null
HUB=192.0.2.1 JOIN_PIN=sha256:$(printf '0%.0s' {1..43}) SEIKAN_TOKEN=skt_0 "$validators/bin/podman-compose" -f ../container/compose.yaml \
    --profile member config >"$work/compose.yaml"
python3 - "$work/compose.yaml" <<'END'
import sys
text = open(sys.argv[1]).read()
assert all(f"  {name}:" in text for name in ("coordinator", "relay", "member")), text
END

root=$work/image
mkdir -p "$root/usr"
tar -C "$root/usr" --strip-components=1 -xzf "$dist"/seikan-*-linux-x86_64.tar.gz
arguments() { "$validators/bin/python" arguments.py "$root" "$@"; }
# The comments of the compose file are not in what podman-compose prints.
grep '^ *#' ../container/compose.yaml >>"$work/compose.yaml"
arguments "$work/compose.yaml" ../kubernetes/*.yaml
# misspelt EXPRESSION FILE: a change that has to be noticed
misspelt() {
    sed "$1" "$2" >"$work/misspelt.yaml"
    ! cmp -s "$2" "$work/misspelt.yaml" || fail "$2 has nothing like $1"
    ! arguments "$work/misspelt.yaml" >/dev/null || fail "the program takes $2 with $1"
}
misspelt 's/--foreground/--forground/' ../kubernetes/sidecar.yaml
misspelt 's/status, seikan0/state, seikan0/' ../kubernetes/sidecar.yaml
misspelt 's/--pin=sha256:0/--pin=sha256:/' ../kubernetes/daemonset.yaml
misspelt 's/SEIKAN_TOKEN/SEIKAN_TOKENS/' ../kubernetes/daemonset.yaml
misspelt 's/--advertise=$(POD_NAME)/--advertise=$(NAME)/' ../kubernetes/coordinator.yaml
misspelt 's/--reusable/--reuseable/' "$work/compose.yaml"
