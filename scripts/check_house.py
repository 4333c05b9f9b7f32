#!/usr/bin/env python3
"""Checks rules of the workspace that no compiler checks.

    scripts/check_house.py               checks the workspace; exit 1 and one line per fault
    scripts/check_house.py --self-test   breaks each rule on invented data and expects the fault

1. A crate uses only the crates that ALLOWED lists (docs/internals/architecture.md), in normal and build dependencies.
2. Unsafe code is in one crate: every other library and binary forbids it, and no other target contains it.
3. All test files of a crate are built: if one binary holds them (tests/it.rs), it names each.
4. No two top-level modules of a crate import each other.
"""

import json
import pathlib
import re
import subprocess
import sys

# `wire` and `observe` are shared by the crates above them.
SHARED = {"seikan-wire", "seikan-observe"}
ALLOWED = {
    "seikan-wire": set(),
    "seikan-observe": set(),
    "seikan-proto": SHARED,
    "seikan-config": {"seikan-wire", "seikan-proto"},
    "seikan-sys": SHARED,
    "seikan-tls": {"seikan-proto"},
    "seikan-mesh": {"seikan-observe", "seikan-config", "seikan-proto", "seikan-sys", "seikan-tls"},
    "seikan-node": SHARED | {"seikan-config", "seikan-mesh", "seikan-proto", "seikan-sys", "seikan-userspace"},
    "seikan-userspace": SHARED | {"seikan-sys"},
    "seikan": {"seikan-config", "seikan-mesh", "seikan-node", "seikan-proto", "seikan-userspace"},
    "seikan-coordinator": SHARED | {"seikan-proto", "seikan-sys", "seikan-tls"},
    "seikan-relay": {"seikan-observe", "seikan-proto", "seikan-sys", "seikan-tls"},
    "seikan-diagnose": {"seikan-observe"},
    "seikan-ui": {"seikan-observe"},
    "seikan-load": {"seikan-sys", "seikan-ui"},
    "seikan-lab": SHARED
    | {
        "seikan-proto",
        "seikan-sys",
        "seikan-config",
        "seikan-mesh",
        "seikan-node",
        "seikan-diagnose",
        "seikan-load",
        "seikan-ui",
    },
    "seikan-cli": SHARED
    | {
        "seikan-proto",
        "seikan-sys",
        "seikan-tls",
        "seikan-config",
        "seikan-mesh",
        "seikan-node",
        "seikan-userspace",
        "seikan-coordinator",
        "seikan-relay",
        "seikan-diagnose",
        "seikan-load",
        "seikan-ui",
    },
    "seikan-interop": {"seikan-sys"},
    "seikan-fuzz": SHARED
    | {"seikan-config", "seikan-proto", "seikan-mesh", "seikan-node", "seikan-userspace", "seikan-coordinator", "seikan-diagnose"},
}
UNSAFE_CRATE = "seikan-sys"
FORBID = re.compile(r"^#!\[forbid\((?:[\w:]+,\s*)*unsafe_code\b", re.MULTILINE)
UNSAFE = re.compile(r"\bunsafe\s*(?:\{|fn\b|impl\b|extern\b|trait\b)|\bunsafe\s*\(no_mangle")
COMMENT = re.compile(r"//[^\n]*")
TESTS = re.compile(r"\n#\[cfg\(test\)\]")
GROUP = re.compile(r"\bcrate::\{((?:[^{}]|\{[^{}]*\})*)\}")


def dependency_faults(packages):
    """Returns faults against ALLOWED in `packages`, as `cargo metadata --no-deps` lists them."""
    ours = {p["name"] for p in packages}
    faults = []
    for p in packages:
        allowed = ALLOWED.get(p["name"])
        if allowed is None:
            faults.append(f"{p['name']}: no dependencies are listed for this crate; add it to ALLOWED and to docs/internals/architecture.md")
            continue
        for d in p["dependencies"]:
            # A dev-dependency is for tests only; cargo itself refuses a cycle of normal ones.
            if d["kind"] != "dev" and d["name"] in ours and d["name"] not in allowed:
                faults.append(f"{p['name']} -> {d['name']}: not allowed; allowed: {sorted(allowed) or 'none'}")
    return faults


def unsafe_faults(name, kind, path, text):
    """Faults of one source file; `kind` is "root" for the root of a library or binary, "file" for any other."""
    if name == UNSAFE_CRATE:
        return []
    faults = []
    if kind == "root" and not FORBID.search(text):
        faults.append(f"{path}: lacks #![forbid(unsafe_code)]; unsafe code is allowed in {UNSAFE_CRATE} only")
    if UNSAFE.search(COMMENT.sub("", text)):
        faults.append(f"{path}: contains unsafe code; it is allowed in {UNSAFE_CRATE} only")
    return faults


def unbuilt_faults(folder, names, text):
    """Faults of a folder of tests: `names` are its files and those of its folders, `text` is its it.rs."""
    built = set(re.findall(r"^mod (\w+);", text, re.MULTILINE)) | {"it"}
    faults = []
    for name in sorted(names):
        parts = name.removesuffix(".rs").split("/")
        if parts[0] not in built and (len(parts) == 1 or parts[1] in ("main", "mod")):
            faults.append(f"{folder}/{name}: nothing builds it; name it in {folder}/it.rs (mod {parts[0]};)")
        elif parts[1:] == ["main"]:
            faults.append(f"{folder}/{name}: a module of {folder}/it.rs; rename it to mod.rs")
    return faults


def imports(text):
    """Returns the top-level modules that the code of a file names by `crate::`, its tests aside."""
    code = TESTS.split(COMMENT.sub("", text))[0]
    names = set(re.findall(r"\bcrate::(\w+)", code))
    for group in GROUP.findall(code):
        names |= set(re.findall(r"(?:^|,)\s*(\w+)", re.sub(r"\{[^{}]*\}", "", group)))
    return names


def cycle_faults(name, files):
    """Faults of a crate whose sources are `files`: text by path below src/."""
    uses = {}
    for path, text in files.items():
        module = path.split("/")[0].removesuffix(".rs")
        # A module may name a sibling by `super::`, too.
        siblings = re.findall(r"\bsuper::(\w+)", TESTS.split(COMMENT.sub("", text))[0]) if "/" not in path else []
        uses.setdefault(module, set()).update(imports(text) | set(siblings))
    pairs = [(a, b) for a in sorted(uses) for b in sorted(uses[a]) if a < b and a in uses.get(b, ())]
    return [f"{name}: {a} <-> {b}: these modules import each other" for a, b in pairs if not {a, b} & {"lib", "main"}]


def judge(packages):
    faults = dependency_faults(packages)
    for p in packages:
        roots = {t["src_path"] for t in p["targets"] if {"lib", "bin", "proc-macro"} & set(t["kind"])}
        home = pathlib.Path(p["manifest_path"]).parent
        tests = home / "tests"
        if (tests / "it.rs").exists():
            names = [str(file.relative_to(tests)) for file in [*tests.glob("*.rs"), *tests.glob("*/*.rs")]]
            faults += unbuilt_faults(tests, names, (tests / "it.rs").read_text())
        sources = home / "src"
        faults += cycle_faults(p["name"], {str(f.relative_to(sources)): f.read_text() for f in sources.rglob("*.rs")})
        for file in sorted(home.rglob("*.rs")):
            if "target" not in file.relative_to(home).parts:
                kind = "root" if str(file) in roots else "file"
                faults += unsafe_faults(p["name"], kind, file, file.read_text())
    return faults


def self_test():
    def package(name, *deps):
        return {"name": name, "dependencies": [{"name": n, "kind": k} for n, k in deps]}

    wire, sys_, proto = package("seikan-wire"), package("seikan-sys"), package("seikan-proto")
    cases = [
        ("a clean tree", [], dependency_faults([wire, package("seikan-proto", ("seikan-wire", None), ("libc", None))])),
        ("proto uses sys", ["seikan-proto -> seikan-sys"], dependency_faults([sys_, package("seikan-proto", ("seikan-sys", None))])),
        ("proto builds with sys", ["seikan-proto -> seikan-sys"], dependency_faults([sys_, package("seikan-proto", ("seikan-sys", "build"))])),
        ("proto tests with sys", [], dependency_faults([sys_, package("seikan-proto", ("seikan-sys", "dev"))])),
        ("wire uses proto", ["seikan-wire -> seikan-proto"], dependency_faults([proto, package("seikan-wire", ("seikan-proto", None))])),
        ("lab uses the command", ["seikan-lab -> seikan-cli"], dependency_faults([package("seikan-cli"), package("seikan-lab", ("seikan-cli", None))])),
        ("a crate that is not listed", ["seikan-attic"], dependency_faults([package("seikan-attic")])),
        ("a root without forbid", ["x.rs: lacks"], unsafe_faults("seikan-wire", "root", "x.rs", "//! Docs.\n")),
        ("a root with forbid", [], unsafe_faults("seikan-wire", "root", "x.rs", "//! Docs.\n#![forbid(unsafe_code)]\n")),
        ("forbid in a comment", ["x.rs: lacks"], unsafe_faults("seikan-wire", "root", "x.rs", "// #![forbid(unsafe_code)]\n")),
        ("an unsafe block in a test", ["x.rs: contains"], unsafe_faults("seikan-wire", "file", "x.rs", "fn f() { unsafe { g() } }")),
        ("the word in a comment", [], unsafe_faults("seikan-wire", "file", "x.rs", "// an unsafe { } block\n")),
        ("tests that are built", [], unbuilt_faults("tests", ["it.rs", "a.rs", "b/mod.rs", "b/c.rs"], "mod a;\nmod b;\n")),
        ("a file of tests that is not", ["tests/z.rs: nothing"], unbuilt_faults("tests", ["it.rs", "a.rs", "z.rs"], "mod a;\n")),
        ("a folder of tests that is not", ["tests/z/main.rs: nothing"], unbuilt_faults("tests", ["z/main.rs", "z/c.rs"], "mod a;\n")),
        ("a module with a root's name", ["tests/b/main.rs: a module"], unbuilt_faults("tests", ["b/main.rs"], "mod b;\n")),
        ("modules in layers", [], cycle_faults("seikan-node", {"a.rs": "use crate::b::X;", "b.rs": "", "lib.rs": "mod a;"})),
        ("a cycle", ["seikan-node: a <-> b"], cycle_faults("seikan-node", {"a.rs": "use crate::b;", "b/c.rs": "crate::a::f()"})),
        ("a cycle by a group", ["seikan-node: a <-> b"], cycle_faults("seikan-node", {"a.rs": "use crate::{c::{X, Y}, b};", "b.rs": "use super::a;"})),
        ("a cycle in a comment and a test", [], cycle_faults("seikan-node", {"a.rs": "use crate::b;", "b.rs": "// crate::a\n#[cfg(test)]\nuse crate::a;"})),
        ("unsafe code where it is allowed", [], unsafe_faults("seikan-sys", "root", "x.rs", "fn f() { unsafe { g() } }")),
    ]
    failed = 0
    for title, expected, got in cases:
        if len(expected) != len(got) or any(not g.startswith(e) for e, g in zip(expected, got)):
            print(f"self-test: {title}: expected {expected}, got {got}", file=sys.stderr)
            failed += 1
    print(f"check_house: self-test: {len(cases) - failed} passed, {failed} failed")
    return failed


def main():
    if "--self-test" in sys.argv[1:]:
        sys.exit(1 if self_test() else 0)
    out = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], check=True, capture_output=True).stdout
    packages = json.loads(out)["packages"]
    faults = judge(packages)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"check_house: {len(packages)} crates, {len(faults)} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
