#!/usr/bin/env bash
# The workflow that makes the draft of a release: its targets, the comparison of the tag, and the files that it attaches.
. ./machines.sh
set -euo pipefail
for tool in cargo jq; do
    command -v $tool >/dev/null || { echo "= SKIPPED: there is no $tool"; exit; }
done
"$validators/bin/python" workflow.py "$dist" "$work/workflow"
