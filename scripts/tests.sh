#!/usr/bin/env bash
# Plays tests by cargo-nextest and says what `scripts/test.sh` sums up: what was skipped and why, which took longest, and how many passed.
#
#   scripts/tests.sh WORD...     words for `cargo nextest run`
set -uo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
report=$target/nextest/default/junit.xml
said=$(mktemp)
trap 'rm -f "$said"' EXIT
# Tests of crates beside the command's, whose build cargo does not see to: of a whole workspace it is there.
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
