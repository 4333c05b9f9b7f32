#!/usr/bin/env python3
"""mdBook preprocessor: a link that leaves docs/ becomes its text and the path of the file.

mdBook calls it with `supports RENDERER`, then with the book as JSON on standard input. A link from docs/a/b.md to
../../crates/proto works in a clone of the project, and points nowhere in a built book.
"""
import json
import os
import re
import sys

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def outside(page, target):
    """Returns the path of a link's target within the project if it is outside of docs/, else None."""
    if re.match(r"[a-z]+:|#|/", target):
        return None
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), target.split("#")[0]))
    return None if path.startswith("docs/") else path


def rewrite(page, text):
    """Rewrites the links of one page that leave docs/."""
    def link(match):
        path = outside(page, match[2])
        if path is None:
            return match[0]
        label = match[1].strip("`")
        return f"`{path}`" if path.endswith(label) else f"{match[1]} (`{path}`)"
    return LINK.sub(link, text)


def visit(items):
    """Rewrites all chapters below these."""
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            if chapter.get("path"):
                chapter["content"] = rewrite(chapter["path"], chapter["content"])
            visit(chapter["sub_items"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(0)
    _, book = json.load(sys.stdin)
    visit(book.get("items") or book.get("sections"))
    json.dump(book, sys.stdout)
