#!/usr/bin/env python3
"""Draws the dependencies between the crates of the workspace as an SVG picture.

    scripts/crate_diagram.py FILE       writes the picture to FILE

Each crate stands below all crates that use it. An arrow leads from a crate to one that it uses, in normal and build
dependencies; arrows that follow from others are left out. Tests (dev-dependencies) and the fuzz targets are left out.
"""

import html
import json
import subprocess
import sys

WIDTH, BEND, HEIGHT, GAP_X, GAP_Y, MARGIN = 112, 8, 30, 22, 56, 12


def dependencies():
    """Returns the crates that each crate uses directly."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["packages"]
    ours = {p["name"] for p in packages} - {"seikan-fuzz"}
    return {
        p["name"]: {d["name"] for d in p["dependencies"] if d["kind"] != "dev" and d["name"] in ours}
        for p in packages
        if p["name"] in ours
    }


def reduced(uses):
    """Returns `uses` without what follows from the rest: a -> c where a -> b -> c."""

    def reach(name):
        return uses[name].union(*(reach(n) for n in uses[name])) if uses[name] else set()

    return {name: used - set().union(*(reach(n) for n in used)) if used else set() for name, used in uses.items()}


def rows(uses, edges):
    """Returns the rows, the top one first, and for each edge the points on its route.

    An edge that crosses a row has a point of its own there, so that no line runs behind a crate."""
    rank = {}

    def of(name):
        if name not in rank:
            rank[name] = 1 + max((of(n) for n in uses[name]), default=-1)
        return rank[name]

    for name in uses:
        of(name)
    routes = {}
    for name in sorted(edges):
        for used in sorted(edges[name]):
            bends = [f"{name}>{used}@{r}" for r in range(rank[name] - 1, rank[used], -1)]
            routes[name, used] = [name, *bends, used]
            rank.update({bend: rank[name] - 1 - i for i, bend in enumerate(bends)})
    grid = [sorted(n for n in rank if rank[n] == r) for r in range(max(rank.values()), -1, -1)]
    # Order each row by the mean position of its neighbours above, then below, until that changes little.
    near = {name: set() for name in rank}
    for route in routes.values():
        for upper, lower in zip(route, route[1:]):
            near[upper].add(lower)
            near[lower].add(upper)
    for sweep in range(12):
        order = list(enumerate(grid))
        for y, row in order if sweep % 2 == 0 else reversed(order):
            other = grid[y - 1] if sweep % 2 == 0 and y else grid[y + 1] if sweep % 2 and y + 1 < len(grid) else None
            if other:
                position = {n: (i + 0.5) / len(other) for i, n in enumerate(other)}

                def mean(name):
                    seen = [position[n] for n in near[name] if n in position]
                    return sum(seen) / len(seen) if seen else (row.index(name) + 0.5) / len(row)

                grid[y] = sorted(row, key=mean)
    return grid, routes


def picture(uses):
    grid, routes = rows(uses, reduced(uses))
    wide = lambda name: BEND if "@" in name else WIDTH
    breadth = lambda row: sum(wide(n) + GAP_X for n in row) - GAP_X
    width = 2 * MARGIN + max(breadth(row) for row in grid)
    height = 2 * MARGIN + len(grid) * (HEIGHT + GAP_Y) - GAP_Y
    at = {}
    for y, row in enumerate(grid):
        x = (width - breadth(row)) / 2
        for name in row:
            at[name] = (x + wide(name) / 2, MARGIN + y * (HEIGHT + GAP_Y))
            x += wide(name) + GAP_X
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        ' font-family="sans-serif" font-size="13">',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
    ]
    for route in routes.values():
        x, y = at[route[0]]
        path = f"M{x:g} {y + HEIGHT:g}"
        for name in route[1:]:
            end, top = at[name]
            path += f"C{x:g} {top - GAP_Y / 2:g} {end:g} {top - GAP_Y / 2:g} {end:g} {top:g}"
            if "@" in name:
                path += f"V{top + HEIGHT:g}"
            x = end
        out.append(f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#end)"/>')
    for name, (x, y) in sorted(at.items()):
        if "@" in name:
            continue
        label = html.escape(name.removeprefix("seikan-"))
        out.append(f'<rect x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="#eef3fa" stroke="#456"/>')
        out.append(f'<text x="{x:g}" y="{y + HEIGHT / 2 + 4.5:g}" text-anchor="middle" fill="#123">{label}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/crate_diagram.py FILE")
    with open(sys.argv[1], "w") as file:
        file.write(picture(dependencies()))


if __name__ == "__main__":
    main()
