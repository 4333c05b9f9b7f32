#!/usr/bin/env bash
# Runs tests by cargo-nextest; prints for `scripts/test.sh` the skipped tests with reasons, the slowest, and the number of passed tests.
#
#   scripts/tests.sh ARG...     arguments of `cargo nextest run`
set -uo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
report=$target/nextest/default/junit.xml
said=$(mktemp)
trap 'rm -f "$said"' EXIT
# Tests of other crates run the command, which cargo builds only for the whole workspace.
export SEIKAN_BIN=${SEIKAN_BIN:-$(realpath -m "$target")/debug/seikan}
rm -f "$report"
cargo nextest run --locked "$@" 2> >(tee "$said" >&2)
code=$?
python3 - "$report" "$said" <<'END'
import re, sys, xml.etree.ElementTree as xml
try:
    cases = list(xml.parse(sys.argv[1]).iter("testcase"))
except (OSError, xml.ParseError):
    sys.exit("the tests did not run")
passed = failed = skipped = 0
for case in cases:
    text = "".join(case.itertext())
    reasons = re.findall(r"^SKIPPED.*", text, re.MULTILINE)
    print("".join(f"{reason}\n" for reason in reasons), end="")
    if case.find("failure") is not None or case.find("error") is not None:
        failed += 1
    elif reasons:
        skipped += 1
    else:
        passed += 1
left = re.findall(r"^\s*Summary.* (\d+) skipped", open(sys.argv[2], errors="replace").read(), re.MULTILINE)
if left and int(left[-1]):
    print(f"SKIPPED: {left[-1]} measurements that nothing but their own targets run (ignored tests)")
    skipped += int(left[-1])
print("the slowest:")
for case in sorted(cases, key=lambda case: -float(case.get("time")))[:10]:
    print(f"{float(case.get('time')):7.1f} s  {case.get('classname')} {case.get('name')}")
print(f"tests: {passed} passed, {failed} failed, {skipped} skipped")
END
exit $code
