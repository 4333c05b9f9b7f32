#!/usr/bin/env python3
"""Checks that the documentation names code that exists.

    scripts/check_named_code.py               checks docs/ and the pages in the root; exit 1 and one line per fault
    scripts/check_named_code.py --self-test   checks the rules themselves on invented pages

1. A link into crates/, fuzz/, scripts/ or packaging/ leads to a file or folder that exists.
2. If the text of such a link is a single code span, as in [`Tunnel::outbound`](../crates/.../outbound.rs), the file
   defines its last name: a function, type, constant, module or macro.
3. A code span with three underscores or more on a page of threats (docs/internals/threats*.md) is the name of a test:
   some file below crates/ defines a function of that name.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ("crates", "fuzz", "scripts", "packaging")
LINK = re.compile(r"\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^()\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
TEST_NAME = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+){3,}")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def defines(text, name):
    """Whether Rust, Python or shell source `text` defines `name`."""
    forms = [
        rf"\b(?:fn|struct|enum|union|trait|const|static|type|mod|def|class)\s+{name}\b",
        rf"\bmacro_rules!\s*{name}\b",
        rf"^{name}\(\)\s*{{",
    ]
    if name[0].isupper():
        forms.append(rf"^\s*{name}(?:\s*[({{,]|\s*=\s*\d+\s*,|$)")
    return any(re.search(form, text, re.MULTILINE) for form in forms)


def link_faults(page, text, read):
    """Faults of rules 1 and 2; `read(path)` returns the text of a file, "" for a folder, None if there is neither."""
    faults = []
    for match in LINK.finditer(FENCE.sub("", text)):
        label, target = " ".join(match[1].split()), match[2].partition("#")[0]
        if not target or "://" in target:
            continue
        path = pathlib.PurePosixPath("/" + page).parent.joinpath(target)
        parts = []
        for part in path.parts[1:]:
            if part == "..":
                parts = parts[:-1]
            elif part != ".":
                parts.append(part)
        if not parts or parts[0] not in SOURCES:
            continue
        source = read("/".join(parts))
        code = re.fullmatch(r"`([\w:]+)(?:\(\))?`", label)
        if source is None:
            faults.append(f"{page}: {'/'.join(parts)} does not exist")
        elif code and source and not defines(source, code[1].split("::")[-1]):
            faults.append(f"{page}: {'/'.join(parts)} does not define {code[1]}")
    return faults


def test_faults(page, text, functions):
    """Faults of rule 3; `functions` are the names of all functions below crates/."""
    if not pathlib.PurePosixPath(page).match("docs/internals/threats*.md"):
        return []
    names = dict.fromkeys(CODE.findall(FENCE.sub("", text)))
    return [f"{page}: no test is named {n}" for n in names if TEST_NAME.fullmatch(n) and n not in functions]


def self_test():
    files = {
        "crates/a/src/b.rs": "impl Tunnel {\n    pub(crate) fn outbound(&mut self) {\n        call(1);\n    }\n}\nenum Reason {\n    Late,\n}\n",
        "crates/a": "",
    }
    link = lambda text: link_faults("docs/internals/x.md", text, files.get)
    tests = lambda page, text: test_faults(page, text, {"a_peer_is_not_heard"})
    cases = [
        ("a function that exists", 0, link("[`Tunnel::outbound`](../../crates/a/src/b.rs)")),
        ("a function with parentheses", 0, link("[`outbound()`](../../crates/a/src/b.rs)")),
        ("a variant", 0, link("[`Reason::Late`](../../crates/a/src/b.rs)")),
        ("a function that was renamed", 1, link("[`Tunnel::inbound`](../../crates/a/src/b.rs)")),
        ("a function that is only called", 1, link("[`call`](../../crates/a/src/b.rs)")),
        ("part of a name", 1, link("[`out`](../../crates/a/src/b.rs)")),
        ("a file that is gone", 1, link("[code](../../crates/a/src/c.rs)")),
        ("a folder", 0, link("[`a`](../../crates/a)")),
        ("another page", 0, link("[`x`](threats.md#part)")),
        ("a site", 0, link("[`x`](https://example.org/crates/)")),
        ("a link broken over lines", 1, link("[`Tunnel::gone`\n](../../crates/a/src/b.rs)")),
        ("a code block", 0, link("```\n[`gone`](../../crates/a/src/b.rs)\n```\n")),
        ("a test that exists", 0, tests("docs/internals/threats-x.md", "`a_peer_is_not_heard`")),
        ("a test that is gone", 1, tests("docs/internals/threats.md", "`a_peer_is_heard_now`")),
        ("another code span", 0, tests("docs/internals/threats.md", "`bad_tag` and `net.ipv4.tcp_wmem_a_b_c`")),
        ("another page's code span", 0, tests("docs/internals/other.md", "`a_peer_is_heard_now`")),
    ]
    failed = [title for title, expected, got in cases if len(got) != expected]
    for title in failed:
        print(f"self-test: {title}", file=sys.stderr)
    print(f"check_named_code: self-test: {len(cases) - len(failed)} passed, {len(failed)} failed")
    return len(failed)


def main():
    if "--self-test" in sys.argv[1:]:
        sys.exit(1 if self_test() else 0)

    def read(path):
        file = ROOT / path
        return file.read_text() if file.is_file() else "" if file.exists() else None

    functions = set()
    for file in (ROOT / "crates").rglob("*.rs"):
        functions.update(re.findall(r"\bfn (\w+)", file.read_text()))
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    faults = []
    for file in pages:
        page, text = str(file.relative_to(ROOT)), file.read_text()
        faults += link_faults(page, text, read) + test_faults(page, text, functions)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"check_named_code: {len(pages)} pages, {len(faults)} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
