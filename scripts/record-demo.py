#!/usr/bin/env python3
"""Records `seikan demo` as an animated picture for the README.

    scripts/record-demo.py SEIKAN OUT.svg       run SEIKAN demo in a terminal of its own (root, or a kernel with user namespaces)

The picture is an SVG that moves by itself and needs no script (SMIL), four times as fast as the program did. Nothing is drawn that
the program did not print. The last picture stays for twelve seconds.
"""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from xml.sax.saxutils import escape

COLUMNS, ROWS = 110, 60
FASTER, LAST = 4, 12.0
WIDTH, HEIGHT, SIZE, MARGIN = 7.8, 17, 13, 12
COLOURS = ["#3b4252", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#dcdfe4"]
PLAIN = "#dcdfe4"
# Sequences of ECMA-48: the parameters and the final byte.
CONTROL = re.compile(r"\x1b\[([0-9;?]*)([@-~])|\x1b[()][A-Z0-9]|\x1b[=>78]|[\r\n\b\x07]")


def run(command):
    """What the command prints, as pieces of text with the seconds since its begin, and its exit status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    begin, pieces = time.monotonic(), []
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        if not piece:
            break
        pieces.append((time.monotonic() - begin, piece))
    return pieces, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Screen:
    """Lines of cells, each a character and its style: colour, bold, dim."""

    def __init__(self):
        self.lines, self.row, self.column, self.style = [[]], 0, 0, (PLAIN, False, False)

    def write(self, text):
        at = 0
        for match in CONTROL.finditer(text):
            self.put(text[at:match.start()])
            self.obey(match)
            at = match.end()
        self.put(text[at:])

    def put(self, text):
        line = self.lines[self.row]
        for character in text:
            line.extend([(" ", self.style)] * (self.column + 1 - len(line)))
            line[self.column] = (character, self.style)
            self.column += 1

    def obey(self, match):
        parameters, final = match.group(1) or "", match.group(2)
        if match.group(0) == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append([])
        elif match.group(0) == "\r":
            self.column = 0
        elif match.group(0) == "\b":
            self.column = max(self.column - 1, 0)
        elif final == "K":
            del self.lines[self.row][0 if parameters == "2" else self.column:]
        elif final == "A":
            self.row = max(self.row - int(parameters or 1), 0)
        elif final == "m":
            self.colour([int(number or 0) for number in parameters.split(";")])

    def colour(self, numbers):
        colour, bold, dim = self.style
        while numbers:
            number = numbers.pop(0)
            if number == 0:
                colour, bold, dim = PLAIN, False, False
            elif number == 1:
                bold = True
            elif number == 2:
                dim = True
            elif number == 22:
                bold = dim = False
            elif number == 39:
                colour = PLAIN
            elif 30 <= number <= 37 or 90 <= number <= 97:
                colour = COLOURS[number % 10]
            elif number == 38 and numbers[:1] == [2]:
                colour = "#%02x%02x%02x" % tuple(numbers[1:4])
                del numbers[:4]
            elif number == 38:
                colour = COLOURS[numbers[1] % 8]
                del numbers[:2]
        self.style = (colour, bold, dim)

    def rows(self):
        return [tuple(line) for line in self.lines]


def frames(pieces):
    """Distinct pictures and when each begins; then when the last one ends."""
    screen, pending, shown, all_frames = Screen(), b"", 0.0, []
    last = None
    for when, piece in pieces:
        pending += piece
        text = pending.decode("utf-8", "ignore")
        pending = pending[len(text.encode()):] if len(pending) - len(text.encode()) < 4 else b""
        screen.write(text)
        rows = screen.rows()
        if last is not None:
            # Eight pictures a second are enough.
            if (when - last) / FASTER < 0.12:
                all_frames[-1] = (all_frames[-1][0], rows)
                continue
            shown += (when - last) / FASTER
        all_frames.append((shown, rows))
        last = when
    return all_frames, shown + LAST


def spans(row):
    """The row as SVG: one element for each run of cells in one style."""
    out, at = [], 0
    while at < len(row):
        end = at
        while end < len(row) and row[end][1] == row[at][1]:
            end += 1
        colour, bold, dim = row[at][1]
        text = "".join(cell[0] for cell in row[at:end])
        if text.strip():
            weight = ' font-weight="bold"' if bold else ""
            opacity = ' opacity="0.6"' if dim else ""
            out.append(f'<tspan x="{MARGIN + at * WIDTH:.1f}" fill="{colour}"{weight}{opacity}>{escape(text)}</tspan>')
        at = end
    return "".join(out)


def svg(pictures, length):
    height = max(len(rows) for _, rows in pictures)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * MARGIN + COLUMNS * WIDTH:.0f}" '
        f'height="{2 * MARGIN + height * HEIGHT}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{SIZE}">',
        '<title>seikan demo, four times as fast as it ran</title><rect width="100%" height="100%" rx="8" fill="#1e222a"/>',
    ]
    # A row stays from the picture in which it came to that in which it changes.
    for number in range(height):
        begin, row = 0.0, ()
        for when, rows in [*pictures, (length, [None] * height)]:
            now = rows[number] if number < len(rows) else ()
            if now == row:
                continue
            text = spans(row)
            if text:
                times = f"0;{begin / length:.4f};{min(when / length, 1):.4f}"
                out.append(
                    f'<text xml:space="preserve" y="{MARGIN + (number + 0.8) * HEIGHT:.1f}" visibility="hidden">{text}'
                    f'<animate attributeName="visibility" values="hidden;visible;hidden" keyTimes="{times}" dur="{length:.1f}s" '
                    'calcMode="discrete" repeatCount="indefinite"/></text>'
                )
            begin, row = when, now
    return "\n".join([*out, "</svg>", ""])


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    pieces, code = run([sys.argv[1], "demo"])
    if code != 0:
        sys.stdout.buffer.write(b"".join(piece for _, piece in pieces))
        sys.exit(f"`seikan demo` ended with {code}: nothing was recorded")
    pictures, length = frames(pieces)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(svg(pictures, length))


main()
