#!/usr/bin/env python3
"""Checks the message of a commit. `make hooks` installs it as Git's commit-msg hook.

    scripts/commit_msg.py FILE          checks the message in FILE; exit 1 and one line per fault
    scripts/commit_msg.py --self-test   checks the rules themselves on invented messages
    scripts/commit_msg.py --install     installs the hook in this repository; an own hook there stays

    proto: refuse empty datagrams

    A datagram without bytes was counted as truncated, which hid a broken sender.

1. The subject is `AREA: verb ...`: crates or parts of the tree, then a verb in the imperative. It has at most 72 columns
   and no full stop.
2. An empty line follows, then a body that says why. Its lines have at most 100 columns.

Merges, reverts and commits for --autosquash are not checked.
"""

import pathlib
import re
import subprocess
import sys

SUBJECT, BODY = 72, 100
AREA = re.compile(r"[a-z][\w./-]*(?:, [a-z][\w./-]*)*: (?P<text>\S.*)")
UNCHECKED = re.compile(r"(?:Merge |Revert |fixup! |squash! |amend! )")
# Forms that are hardly ever imperative; words that are, in spite of their ending.
NOT_IMPERATIVE = re.compile(r"[a-z]+(?:ed|ing)")
IMPERATIVE = {"bring", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "spring", "string", "ping"}
THIRD_PERSON = re.compile(r"(?:add|bound|chang|check|count|drop|fix|let|mak|mov|refus|remov|renam|return|say|test|us|writ)e?s")


def faults(message):
    lines = [line.rstrip() for line in message.split("# ------------------------ >8")[0].splitlines() if not line.startswith("#")]
    while lines and not lines[-1]:
        lines.pop()
    if not lines or UNCHECKED.match(lines[0]):
        return []
    subject, found = lines[0], []
    match = AREA.fullmatch(subject)
    if not match:
        found.append("the subject is not `AREA: verb ...`, such as `proto: refuse empty datagrams`")
    else:
        verb = match["text"].split()[0].lower().rstrip(",;")
        if verb not in IMPERATIVE and (NOT_IMPERATIVE.fullmatch(verb) or THIRD_PERSON.fullmatch(verb)):
            found.append(f"the subject begins with `{verb}`; use the imperative (`add`, not `added` or `adds`)")
    if len(subject) > SUBJECT:
        found.append(f"the subject has {len(subject)} columns; at most {SUBJECT}")
    if subject.endswith("."):
        found.append("the subject ends with a full stop")
    if len(lines) > 1 and lines[1]:
        found.append("the line after the subject is not empty")
    body = lines[1:]
    if not any(body):
        found.append("there is no body that says why")
    for line in body:
        if len(line) > BODY and " " in line.strip():
            found.append(f"a line of the body has {len(line)} columns; at most {BODY}: {line[:40]}...")
    return found


def self_test():
    why = "\n\nA reason.\n"
    cases = [
        ("a good message", 0, "proto: refuse empty datagrams" + why),
        ("two areas", 0, "sys, node: refuse empty datagrams" + why),
        ("a path as area", 0, "lab/load: bring the receiver down" + why),
        ("a merge", 0, "Merge branch 'x'"),
        ("a fixup", 0, "fixup! proto: refuse empty datagrams"),
        ("a comment of git", 0, "proto: refuse it\n\nA reason.\n# " + "x " * 80),
        ("a long link", 0, "proto: refuse it\n\nA reason.\nhttps://example.org/" + "x" * 100),
        ("no area", 1, "Refuse empty datagrams" + why),
        ("past tense", 1, "proto: refused empty datagrams" + why),
        ("third person", 1, "proto: refuses empty datagrams" + why),
        ("a participle", 1, "proto: refusing empty datagrams" + why),
        ("a full stop", 1, "proto: refuse empty datagrams." + why),
        ("a long subject", 1, "proto: refuse " + "x" * 60 + why),
        ("no body", 1, "proto: refuse empty datagrams\n"),
        ("only a comment as body", 1, "proto: refuse empty datagrams\n\n# On branch main\n"),
        ("no empty line", 1, "proto: refuse empty datagrams\nA reason.\n"),
        ("a long line", 1, "proto: refuse it\n\n" + "word " * 30),
    ]
    failed = [(title, faults(text)) for title, expected, text in cases if len(faults(text)) != expected]
    for title, got in failed:
        print(f"self-test: {title}: got {got}", file=sys.stderr)
    print(f"commit_msg: self-test: {len(cases) - len(failed)} passed, {len(failed)} failed")
    return len(failed)


def install():
    out = subprocess.run(["git", "rev-parse", "--git-path", "hooks"], check=True, capture_output=True, text=True).stdout
    hook = pathlib.Path(out.strip()).resolve() / "commit-msg"
    # A commit from before this script has none.
    text = '#!/bin/sh\ncheck="$(git rev-parse --show-toplevel)/scripts/commit_msg.py"\n[ ! -x "$check" ] || exec "$check" "$1"\n'
    if hook.exists() and hook.read_text() != text:
        sys.exit(f"{hook} is another hook; remove it, or call scripts/commit_msg.py from it")
    hook.parent.mkdir(parents=True, exist_ok=True)
    hook.write_text(text)
    hook.chmod(0o755)
    print(f"installed {hook}")


def main():
    match sys.argv[1:]:
        case ["--self-test"]:
            sys.exit(1 if self_test() else 0)
        case ["--install"]:
            install()
        case [file]:
            found = faults(pathlib.Path(file).read_text())
            for fault in found:
                print(f"commit message: {fault}", file=sys.stderr)
            sys.exit(1 if found else 0)
        case _:
            sys.exit("usage: scripts/commit_msg.py FILE | --install | --self-test")


if __name__ == "__main__":
    main()
