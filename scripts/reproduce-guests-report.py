#!/usr/bin/env python3
"""Prints the tables of reproduce-guests.sh: calls, shares and correlations. Rates of an emulated machine mean nothing.

    reproduce-guests-report.py FIGURES.json
"""

import json
import random
import statistics
import sys

# Half seconds over which the source smoothed its picture, 10 s, and its correlation of single values.
SMOOTH = 20
PUBLISHED = 0.605
RESAMPLES = 2000
GROUPS = ["processors of guests", "vhost threads", "qemu, other", "receivers", "other"]


def pearson(a, b):
    """Returns the source's equation 1; none if a value is constant."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(a, b)


def interval(a, b, block):
    """Returns the 95 % interval of r, from resampled blocks: neighbours within a step of the load are alike."""
    rng, found = random.Random(len(a)), []
    for _ in range(RESAMPLES):
        starts = [rng.randrange(len(a) - block + 1) for _ in range(len(a) // block)]
        chosen = [i for start in starts for i in range(start, start + block)]
        r = pearson([a[i] for i in chosen], [b[i] for i in chosen])
        if r is not None:
            found.append(r)
    found.sort()
    return found[int(0.025 * len(found))], found[int(0.975 * len(found)) - 1]


def smoothed(values):
    half = SMOOTH // 2
    return [statistics.fmean(values[max(0, i - half) : i + half]) for i in range(len(values))]


def centred(values, block):
    """Returns each value's difference from the mean of its step, so that the load's trend does not count."""
    means = [statistics.fmean(values[i : i + block]) for i in range(0, len(values), block)]
    return [value - means[i // block] for i, value in enumerate(values)]


def row(cells, widths):
    print(str(cells[0]).ljust(widths[0]) + "".join(str(cell).rjust(widths[1]) for cell in cells[1:]), flush=True)


def enters(one):
    return one["functions"]["svm_vcpu_run"] + one["functions"]["svm_handle_exit"]


def four(one):
    return enters(one) + sum(one["functions"][name] for name in ("kvm_vcpu_halt", "handle_tx", "handle_rx"))


def busy(one):
    return sum(one["tasks"].values())


# Rows of the table of shares. What polls and halts is within `kvm_vcpu_halt`.
SHARES = {
    "vcpu_enter_guest": enters,
    "kvm_vcpu_halt": lambda one: one["functions"]["kvm_vcpu_halt"],
    "handle_tx": lambda one: one["functions"]["handle_tx"],
    "handle_rx": lambda one: one["functions"]["handle_rx"],
    "these four": four,
    **{group: lambda one, group=group: one["tasks"][group] for group in GROUPS},
    "idle": lambda one: 1 - busy(one),
    "these four, of the busy": lambda one: four(one) / busy(one),
}


def report_patterns(measured, probes):
    def total(rounds, key):
        return [sum(b[key] for b in one["bins"]) for one in rounds]

    base = {key: statistics.median(total(measured["A"], key)) for key in ["bytes", *probes]}
    print("\ncalls and bytes as multiples of A, medians (ranges)")
    row(["", *measured], (24, 18))
    for key in base:
        row([key, *[cell([v / max(1.0, base[key]) for v in total(rounds, key)]) for rounds in measured.values()]], (24, 18))
    print("\nhow much half seconds fluctuate: 5 to 95 % of them, as a multiple of the median")
    row(["", *measured], (24, 18))
    row(["bytes", *[cell([fluctuation(one["bins"]) for one in rounds]) for rounds in measured.values()]], (24, 18))
    row(["slowest, of equal share", *[cell([slowest(one["sent"]) for one in rounds]) for rounds in measured.values()]], (24, 18))
    print("\nshare of the time of both processors, %")
    row(["", *measured], (24, 18))
    for name, share in SHARES.items():
        row([name, *[cell([100 * share(one) for one in rounds], 1) for rounds in measured.values()]], (24, 18))


def cell(values, digits=2):
    """Returns the median and the range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def fluctuation(bins):
    values = sorted(b["bytes"] for b in bins)
    return (values[int(0.95 * (len(values) - 1))] - values[int(0.05 * (len(values) - 1))]) / max(1.0, statistics.median(values))


def slowest(sent):
    """Returns the slowest guest's part of an equal share of all bytes."""
    return min(sent) * len(sent) / sum(sent)


def report_growth(bins, per_step, probes):
    bytes_ = [b["bytes"] for b in bins]
    print("\nguest 1 sends, one more spins every step: mean of each step, of the first")
    for key in ["bytes", *probes]:
        means = [statistics.fmean([b[key] for b in bins[i : i + per_step]]) for i in range(0, len(bins), per_step)]
        row([key, *[f"{m / means[0]:.2f}" if means[0] else "-" for m in means]], (24, 8))
    print(f"\ncalls against throughput, half seconds; published for handle_tx: r = {PUBLISHED}")
    row(["", "r", "95 %", "r, 10 s", "r within steps"], (24, 18))
    for key in probes:
        calls = [b[key] for b in bins]
        r, smooth = pearson(calls, bytes_), pearson(smoothed(calls), smoothed(bytes_))
        if r is None:
            row([key, "never called"], (24, 18))
            continue
        low, high = interval(calls, bytes_, per_step)
        within = pearson(centred(calls, per_step), centred(bytes_, per_step))
        row([key, f"{r:.2f}", f"{low:.2f} to {high:.2f}", f"{smooth:.2f}", f"{within:.2f}"], (24, 18))


def main(path):
    with open(path) as file:
        figures = json.load(file)
    # A run that was interrupted has some patterns only.
    measured = {name: rounds for name, rounds in figures["patterns"].items() if rounds}
    if "A" in measured:
        report_patterns(measured, figures["probes"])
    report_growth(figures["growth"], round(figures["step"] / figures["bin"]), figures["probes"])


if __name__ == "__main__":
    main(*sys.argv[1:])
