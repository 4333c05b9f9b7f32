#!/usr/bin/env python3
"""Checks files of packaging against the files whose settings they repeat, which `make dist` would notice late.

    scripts/check_packaging.py               checks the project; exit 1 and one line per fault
    scripts/check_packaging.py --self-test   breaks each rule on invented data and expects the fault

1. The licences that packaging/licenses/about.toml accepts are those of deny.toml.
2. The makefile for OpenWrt has the version of the workspace.
3. The processors for which deny.toml checks dependencies include those of scripts/dist.sh.
"""

import pathlib
import re
import sys
import tomllib


def licence_faults(accepted, allowed):
    """Licences that only one of the two lists has."""
    faults = [f"packaging/licenses/about.toml: accepts {name}, which deny.toml does not allow" for name in sorted(set(accepted) - set(allowed))]
    return faults + [f"packaging/licenses/about.toml: lacks {name}, which deny.toml allows" for name in sorted(set(allowed) - set(accepted))]


def version_faults(makefile, version):
    """Another version in the makefile."""
    found = re.search(r"^PKG_VERSION:=(.*)$", makefile, re.M)
    if found and found[1] == version:
        return []
    return [f"packaging/openwrt/Makefile: PKG_VERSION is {found[1] if found else 'missing'}, the workspace has {version}"]


def target_faults(script, targets):
    """Targets that are built for users, and whose dependencies nobody checks."""
    built = re.findall(r"\b\w*triple=([\w-]+)", script)
    if not built:
        return ["scripts/dist.sh: names no target"]
    return [f"deny.toml: [graph] lacks the target {name} of scripts/dist.sh" for name in built if name not in targets]


def self_test():
    cases = [
        ("equal licences", [], licence_faults(["MIT", "ISC"], ["ISC", "MIT"])),
        ("a licence too many", ["packaging/licenses/about.toml: accepts ISC"], licence_faults(["MIT", "ISC"], ["MIT"])),
        ("a licence too few", ["packaging/licenses/about.toml: lacks 0BSD"], licence_faults(["MIT"], ["0BSD", "MIT"])),
        ("the same version", [], version_faults("PKG_NAME:=x\nPKG_VERSION:=1.2.3\n", "1.2.3")),
        ("another version", ["packaging/openwrt/Makefile: PKG_VERSION is 1.2.2"], version_faults("PKG_VERSION:=1.2.2\n", "1.2.3")),
        ("no version", ["packaging/openwrt/Makefile: PKG_VERSION is missing"], version_faults("", "1.2.3")),
        ("checked targets", [], target_faults("triple=a-b arm_triple=c-d\n", ["a-b", "c-d"])),
        ("an unchecked target", ["deny.toml: [graph] lacks the target c-d"], target_faults("triple=a-b arm_triple=c-d\n", ["a-b"])),
        ("no target", ["scripts/dist.sh: names no target"], target_faults("", ["a-b"])),
    ]
    failed = 0
    for title, expected, got in cases:
        if len(expected) != len(got) or any(not g.startswith(e) for e, g in zip(expected, got)):
            print(f"self-test: {title}: expected {expected}, got {got}", file=sys.stderr)
            failed += 1
    print(f"check_packaging: self-test: {len(cases) - failed} passed, {failed} failed")
    return failed


def main():
    if "--self-test" in sys.argv[1:]:
        sys.exit(1 if self_test() else 0)
    root = pathlib.Path(__file__).resolve().parent.parent

    def table(path):
        return tomllib.loads((root / path).read_text())

    deny = table("deny.toml")
    faults = licence_faults(table("packaging/licenses/about.toml")["accepted"], deny["licenses"]["allow"])
    version = table("Cargo.toml")["workspace"]["package"]["version"]
    faults += version_faults((root / "packaging/openwrt/Makefile").read_text(), version)
    faults += target_faults((root / "scripts/dist.sh").read_text(), deny["graph"]["targets"])
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"check_packaging: {len(faults)} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
