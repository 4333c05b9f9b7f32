#!/usr/bin/env python3
"""Checks files of packaging against the files whose settings they repeat, which `make dist` would notice late.

    scripts/check_packaging.py               checks the project; exit 1 and one line per fault
    scripts/check_packaging.py --self-test   breaks each rule on invented data and expects the fault

1. The licences that packaging/licenses/about.toml accepts are those of deny.toml.
2. The makefile for OpenWrt has the version of the workspace.
3. The processors for which deny.toml checks dependencies include those of scripts/dist.sh.
4. A block of commands that the docs leave to a script of packaging/tests, `<!-- not run: dist-check: archive.sh -->`, is one that
   the script runs: it has a line with the program and the verb of each command, and the command's long options and packages; or
   it reads the page. The target runs the script. The tests of the pages check those left to a test in Rust, `tests: doctor.rs`.
"""

import pathlib
import re
import shlex
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


LEFT_TO_SCRIPT = re.compile(r"<!-- not run: (?!tests: )([\w-]+): (\S+) -->\n+```sh\n(.*?)^```", re.M | re.S)
# The machines of the tests have no Internet.
NEED_INTERNET = {"opkg update", "pipx install"}
# What a test calls instead.
OTHER_NAMES = {"podman": "engine", "apt": "apt-get"}


def commands(block):
    """The commands of a block: program, verb (or an empty one), long options, and files of packages without their versions."""
    for line in re.sub(r"\\\n", " ", block).splitlines():
        words = shlex.split(line, comments=True)
        words = words[1:] if words[:1] == ["sudo"] else words
        if words[:1] == ["service"]:
            words = [f"/etc/init.d/{words[1]}", *words[2:]]
        if not words or words[0] == "cd":
            continue
        verb = next((word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)), "")
        options = [re.match(r"--[a-z-]+", word)[0] for word in words if re.match(r"--[a-z]", word)]
        packages = [found[1] for word in words if (found := re.match(r"\./([a-z-]+[_-])\d", word))]
        yield words[0].rpartition("/")[2], verb, options + packages


def block_faults(page, text, script_of):
    """Blocks of a page that no script runs; `script_of(target, name)` is its text, or `None` if the target has no such script."""
    faults = []
    for target, name, block in LEFT_TO_SCRIPT.findall(text):
        script = script_of(target, name)
        if script is None:
            faults.append(f"{page}: {target} runs no {name}")
            continue
        script = re.sub(r"^\s*#.*\n", "", script, flags=re.M)
        if f"/{page}" in script:
            continue
        for program, verb, needed in commands(block):
            if f"{program} {verb}" in NEED_INTERNET:
                continue
            names = "|".join(map(re.escape, {program, OTHER_NAMES.get(program, program)}))
            if not re.search(rf"(?<![\w-])(?:{names})(?![\w-]).*(?<![\w-]){verb}(?![\w-])", script):
                faults.append(f"{page}: {name} has no `{program} {verb}`")
            faults += [f"{page}: {name} has no {word} for `{program} {verb}`" for word in needed if word not in script]
    return faults


def self_test():
    block = "<!-- not run: dist-check: a.sh -->\n```sh\nsudo apt install \\\n  ./x-y_1.0-1_amd64.deb\nx up --now\n```\n"
    script = "on a 'apt-get install ./x-y_*.deb'\nx up --now\n"

    def left(script, text=block):
        return block_faults("docs/p.md", text, lambda target, name: script if (target, name) == ("dist-check", "a.sh") else None)

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
        ("a block that is run", [], left(script)),
        ("a page that is read", [], left("page=../../docs/p.md\n")),
        ("a page in a comment", ["docs/p.md: a.sh has no `x up`"], left("# As in ../docs/p.md\napt install x-y_ --now\n")),
        ("another verb", ["docs/p.md: a.sh has no `x up`"], left(script.replace("x up", "x upper"))),
        ("another program", ["docs/p.md: a.sh has no `apt install`"], left(script.replace("apt-get", "dpkg"))),
        ("another option", ["docs/p.md: a.sh has no --now for `x up`"], left(script.replace("--now", ""))),
        ("another package", ["docs/p.md: a.sh has no x-y_ for `apt install`"], left(script.replace("x-y", "x"))),
        ("another script", ["docs/p.md: dist-check runs no b.sh"], left(script, block.replace("a.sh", "b.sh"))),
        ("a test in Rust", [], left("", block.replace("dist-check", "tests"))),
        ("the Internet", [], left("", "<!-- not run: dist-check: a.sh -->\n```sh\nopkg update\n```\n")),
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
    tests = root / "packaging/tests"
    run = {
        "dist-check": re.search(r"^tests=\((.*)\)$", (tests / "all.sh").read_text(), re.M)[1].split(),
        "openwrt-check": re.findall(r"tests/all\.sh (\w+)", (root / "scripts/openwrt-check.sh").read_text()),
    }

    def script_of(target, name):
        if name.removesuffix(".sh") not in run.get(target, []) or not (tests / name).is_file():
            return None
        text = (tests / name).read_text()
        return text + "".join((tests / part).read_text() for part in re.findall(r"^\. \./(\S+)$", text, re.M))

    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        faults += block_faults(str(page.relative_to(root)), page.read_text(), script_of)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"check_packaging: {len(faults)} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
