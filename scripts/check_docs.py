#!/usr/bin/env python3
"""Checks README.md and the pages under docs/.

1. Every relative link names a file that exists, and every anchor a heading of its page.
2. Every page under docs/ is in docs/SUMMARY.md, and every entry of it exists.
3. A page has at most 25 KB (25,600 bytes).
4. A fenced block names its language. A block of commands has the language `sh`, so that the tests of the pages run it or know why
   not: no line of a block of `text` begins with a command.
5. A line has at most 110 columns. Rows of tables, and a line that consists of one link or one word, may be longer:
   Markdown cannot break them.

    scripts/check_docs.py              check; exit status 1 if anything is wrong
    scripts/check_docs.py --self-test  check the rules on small examples
"""
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 25 * 1024
MAX_COLUMNS = 110

FENCE = re.compile(r"^\s*(```+|~~~+)")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
LANGUAGES = {"console", "ini", "json", "python", "rust", "rust,no_run", "sh", "sql", "text", "toml", "uci", "yaml"}
COMMANDS = {
    *("apk apt apt-get bash cargo cat cp curl dnf docker dpkg echo ethtool git grep install ip iperf3 iptables kubectl make mkdir").split(),
    *("modprobe mv nft opkg pip ping podman podman-compose python3 rm rpm sed seikan seikan-lab service sh ssh sudo sysctl").split(),
    *("systemctl tar tc uci wg wg-quick").split(),
}
ALONE = re.compile(r"^\s*(?:[-*] |\d+\. )?(?:!?\[[^\]]*\]\([^)]*\)|\S+)[.,;:]?$")


def prose(text):
    """Yields the number and the text of each line outside of code blocks."""
    fence = None
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence):
                fence = None
        elif mark:
            fence = mark[1]
        else:
            yield number, line


def anchors(text):
    """Returns the anchors of a page: GitHub and mdBook make the same of a heading."""
    found = {}
    names = set()
    for _, line in prose(text):
        names.update(ANCHOR.findall(line))
        heading = HEADING.match(line)
        if not heading:
            continue
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
        slug = "".join("-" if c.isspace() else c for c in title.lower() if c.isalnum() or c in "_- ")
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def links(text):
    """Yields the number of the line and the target of each link."""
    for number, line in prose(text):
        line = CODE.sub(lambda match: "x" * len(match[0]), line)
        for target in LINK.findall(line) + REFERENCE.findall(line):
            yield number, target


def wrong_fences(text):
    """Yields the number and the fault of each fenced block without a known language, and of each line of `text` that is a command."""
    fence = None
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            end, indent, language = fence
            if mark and mark[1].startswith(end):
                fence = None
                continue
            words = line[indent:].removeprefix("$ ").split()
            # Output that quotes a command is indented.
            if language == "text" and not line[indent:].startswith(" ") and words and (words[0] in COMMANDS or words[0].startswith("#!")):
                yield number, f"`{words[0]}` is a command: the block has the language `sh`"
        elif mark:
            language = line.strip().lstrip("`~")
            fence = mark[1], line.index(mark[1]), language
            if language not in LANGUAGES:
                yield number, f"a block of `{language}`: one of {', '.join(sorted(LANGUAGES))}"


def long_lines(text):
    """Yields the number and the length of each line that is too long."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|") and not ALONE.match(line):
            yield number, len(line)


def check(root):
    """Returns all faults, a line each."""
    faults = []
    pages = {"README.md"} | {str(p.relative_to(root)) for p in sorted((root / "docs").rglob("*.md"))}
    texts = {}

    def text_of(page):
        if page not in texts:
            texts[page] = (root / page).read_text()
        return texts[page]

    listed = set()
    for page in sorted(pages):
        text = text_of(page)
        size = len(text.encode())
        if size > MAX_BYTES:
            faults.append(f"{page}: {size} bytes, at most {MAX_BYTES}: split the page")
        for number, fault in wrong_fences(text):
            faults.append(f"{page}:{number}: {fault}")
        for number, columns in long_lines(text):
            faults.append(f"{page}:{number}: {columns} columns, at most {MAX_COLUMNS}")
        for number, target in links(text):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            path, _, anchor = target.partition("#")
            path = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
            if page == "docs/SUMMARY.md":
                listed.add(path)
            if not (root / path).exists():
                faults.append(f"{page}:{number}: no file {path}")
            elif anchor and path.endswith(".md") and anchor not in anchors(text_of(path)):
                faults.append(f"{page}:{number}: {path} has no heading #{anchor}")
    for page in sorted(pages - listed - {"README.md", "docs/SUMMARY.md"}):
        faults.append(f"{page}: not in docs/SUMMARY.md")
    return faults


def self_test():
    """Checks the rules on small examples."""
    import tempfile

    assert anchors("# A `b-c` and [d](e)!\n# x\n# x\n```\n# y\n```\n") == {"a-b-c-and-d", "x", "x-1"}
    assert list(links("[a](b.md#c) `[no](no)` ![p](q.svg)\n```\n[n](o)\n```\n[r]: s\n")) == [
        (1, "b.md#c"), (1, "q.svg"), (5, "s")]
    assert not list(wrong_fences("```sh\nip link\n```\n~~~text\nipv6\n  ip link\n~~~\n  ```text\n   x\n  ```\n"))
    assert [number for number, _ in wrong_fences("```\nx\n```\n- a\n  ```text\n  sudo x\n  ```\n```text\n\n$ ip a\n```\n")] == [1, 6, 10]
    assert list(long_lines("| " + "x " * 60 + "\n[a](" + "b" * 120 + ")\n" + "x " * 60)) == [(3, 120)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "docs").mkdir()
        (root / "README.md").write_text("[a](docs/a.md#here) [b](docs/b.md)\n")
        (root / "docs/SUMMARY.md").write_text("- [A](a.md)\n")
        (root / "docs/a.md").write_text("# There\n" + "x" * MAX_BYTES)
        (root / "docs/c.md").write_text("# C\n")
        assert [fault.split(":")[0] for fault in check(root)] == ["README.md", "README.md", "docs/a.md", "docs/c.md"]


if __name__ == "__main__":
    if "--self-test" in sys.argv:
        self_test()
        sys.exit(0)
    found = check(ROOT)
    for fault in found:
        print(fault)
    sys.exit(1 if found else 0)
