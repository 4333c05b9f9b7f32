#!/usr/bin/env bash
# The manifests for Kubernetes fit its schemas, and the compose file is one. A misspelt key is refused.
. ./machines.sh
set -euo pipefail
for file in ../kubernetes/*.yaml; do
    "$validators/bin/kubernetes-validate" --strict "$file"
done
sed 's/readOnlyRootFilesystem/readonlyRootFilesystem/' ../kubernetes/sidecar.yaml >"$work/misspelt.yaml"
! "$validators/bin/kubernetes-validate" --strict --quiet "$work/misspelt.yaml" || fail "a misspelt key is not noticed"
grep -A 2 'startupProbe:' ../kubernetes/sidecar.yaml | grep 'seikan, status' >/dev/null || fail "an application starts before its tunnel"
"$validators/bin/podman-compose" -f ../container/compose.yaml config | grep 'coordinator:' >/dev/null
HUB=192.0.2.1 JOIN_PIN=sha256:0 SEIKAN_TOKEN=skt_0 "$validators/bin/podman-compose" -f ../container/compose.yaml --profile member config |
    python3 -c 'import sys; text = sys.stdin.read(); assert all(f"  {name}:" in text for name in ("coordinator", "relay", "member")), text'
