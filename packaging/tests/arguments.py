#!/usr/bin/env python3
"""Gives the program every command of the manifests, of a compose file and of their comments, and expects that it takes them.

    arguments.py ROOT FILE...     ROOT has nothing but usr/bin/seikan; it is entered by chroot(8)

A command is taken if it prints its help, which fails for an unknown option or value, and if it does not end with the status of
wrong usage when it is run. What else it ends with does not matter: nothing that it needs is there. The help has to name the
variables of the container's environment.
"""

import re
import shlex
import subprocess
import sys

import yaml

PROGRAM = "/usr/bin/seikan"
WRONG_USAGE = 2
# A coordinator and a relay run until they are stopped.
PATIENCE = 5
# In comments, what a reader replaces.
PLACEHOLDERS = {"NUMBER": "1", "NAME": "web-1", "$HUB": "192.0.2.1"}


def dictionaries(value):
    """All dictionaries in a value."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        yield from dictionaries(part)


def substitute(word, names):
    """A word of `args`, with what Kubernetes puts in place of variables."""
    for name in re.findall(r"\$\((\w+)\)", word):
        if name not in names:
            sys.exit(f"{word}: the container has no variable {name}")
    return re.sub(r"\$\((\w+)\)", lambda found: found[1].lower().replace("_", "-"), word)


def of_manifest(text):
    """Commands of containers of the image, with the variables that they read, and commands of probes and hooks."""
    for container in dictionaries(list(yaml.safe_load_all(text))):
        if "seikan:" not in str(container.get("image")):
            continue
        names = {variable["name"] for variable in container.get("env", [])}
        names |= {variable.partition("=")[0] for variable in container.get("environment") or []}
        words = container["args"] if "args" in container else container["command"]
        words = shlex.split(words) if isinstance(words, str) else words
        read = {name for name in names if f"$({name})" not in " ".join(words)}
        yield [PROGRAM, *(substitute(word, names) for word in words)], read
        for inner in dictionaries({key: value for key, value in container.items() if key not in ("image", "args", "command")}):
            if isinstance(inner.get("exec"), dict):
                yield inner["exec"]["command"], set()


def of_comments(text):
    """Commands that the comments name: between backquotes, or on a line with the path of the program."""
    comments = "\n".join(re.sub(r"^\s*# ?", "", line) for line in text.splitlines() if re.match(r"\s*#", line))
    comments = re.sub(r"\\\n\s*", "", comments)
    for found in re.findall(rf"{PROGRAM} [^\n`]*", comments) + re.findall(r"`seikan [^`]*`", comments):
        words = shlex.split(found.strip("`").replace("\n", " "))
        yield [PROGRAM, *(PLACEHOLDERS.get(word, word) for word in words[1:])], set()


def run(root, words):
    """The status, `None` if it still runs, and what was printed."""
    try:
        ended = subprocess.run(["chroot", root, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None, ""
    return ended.returncode, (ended.stderr or ended.stdout).strip()


def problem_of(root, words, variables):
    """Why the program does not take a command, or `None`."""
    if words[0] != PROGRAM:
        return f"the image has no other program than {PROGRAM}"
    status, said = run(root, [*words, "--help"])
    if status != 0:
        return said
    unread = [name for name in variables if f"[env: {name}]" not in said]
    if unread:
        return f"the program does not read {unread}"
    status, said = run(root, words)
    return said if status == WRONG_USAGE else None


def main():
    root, files = sys.argv[1], sys.argv[2:]
    count = faults = 0
    for file in files:
        with open(file) as opened:
            text = opened.read()
        for words, variables in (*of_manifest(text), *of_comments(text)):
            count += 1
            problem = problem_of(root, words, variables)
            print(f"{file}: {shlex.join(words)}: {'refused' if problem else 'taken'}")
            if problem:
                faults += 1
                print(problem, file=sys.stderr)
    print(f"= the program takes {count - faults} of {count} commands in {len(files)} files")
    sys.exit(1 if faults or not count else 0)


if __name__ == "__main__":
    main()
