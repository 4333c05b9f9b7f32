#!/usr/bin/env python3
"""Runs inside the virtual machine of reproduce-guests.sh, as root: guests under KVM behind Open vSwitch, and their functions counted.

    reproduce-guests-machine.py KERNEL INITRD OUT.json

    guest N, eth0: 10.92.0.N --virtio, vhost_net-- tapN -- br0, datapath of the kernel: 10.92.0.100, iperf3 receives

A guest sends by iperf3 and spins by `yes`. Kprobes count calls; after that, in an interval of its own,
ftrace measures the time in each function without the time in which its task does not run. OUT.json has every figure.
"""

import contextlib
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

# With two processors each, as in the source, a guest ends now and then with an emulation failure of KVM's, at an interrupt
# from one to the other.
GUESTS, PROCESSORS = 8, 1
HOST = "10.92.0.100"
# Senders and spinning guests of the source's table 2.
PATTERNS = {"A": (2, 0), "B": (4, 0), "C": (8, 0), "D": (2, 2), "E": (2, 4), "F": (2, 6)}
ROUNDS = int(os.environ.get("ROUNDS", 3))
# Seconds of counting and of timing, for each pattern and round, and those between a change and the first figure.
COUNTED, TIMED = 8.0, 5.0
SETTLE = 4.0
# One more guest spins every 25 s, for 200 s. Calls and bytes are added up over half seconds.
STEP, BIN = 25.0, 0.5
# Seconds for a guest to boot, and how often it may try.
PATIENCE, TRIES = 180, 4
# Probed functions. `vcpu_enter_guest` is inlined in Debian's kernel: `svm_vcpu_run` is called once for each entry, by it only.
# Since Linux 5.17 `kvm_vcpu_halt` polls for an idle guest, which `kvm_vcpu_block` did before.
PROBES = {
    "handle_tx": "handle_tx",
    "handle_rx": "handle_rx",
    "vcpu_enter_guest": "svm_vcpu_run",
    "kvm_vcpu_block": "kvm_vcpu_block",
    "kvm_vcpu_halt": "kvm_vcpu_halt",
}
# Functions that are timed. `vcpu_enter_guest` is those two and less than the rest of its thread.
FUNCTIONS = ["handle_tx", "handle_rx", "svm_vcpu_run", "svm_handle_exit", "kvm_vcpu_halt", "kvm_vcpu_block"]
RETURN = re.compile(r"([0-9.]+) us +\| .*?(\w+)(?: \[\w+\])?(?:\(\);| \*/)")
BUFFER_KB = 16384
# Tasks by the beginning of their name; another may run, or none.
GROUPS = {"CPU ": "processors of guests", "vhost-": "vhost threads", "qemu": "qemu, other", "iperf3": "receivers"}
TRACING = "/sys/kernel/tracing"
MODULES = ["kvm_amd", "vhost_net", "tun", "openvswitch"]


def run(*command, **options):
    """Runs a command; its output is in the exception if it fails."""
    return subprocess.run(command, check=True, text=True, capture_output=True, **options).stdout


def read(path):
    with open(path) as file:
        return file.read()


def write(path, text, mode="w"):
    with open(path, mode) as file:
        file.write(text)


class Switch:
    """Open vSwitch with its datapath in the kernel, a bridge with the host's address, and a receiver for each guest."""

    def __init__(self, folder):
        self.processes = []
        for name in ("OVS_RUNDIR", "OVS_DBDIR", "OVS_LOGDIR", "OVS_SYSCONFDIR"):
            os.environ[name] = folder
        database, remote = f"{folder}/conf.db", f"unix:{folder}/db.sock"
        run("ovsdb-tool", "create", database, "/usr/share/openvswitch/vswitch.ovsschema")
        self.start("ovsdb-server", database, f"--remote=p{remote}", "--unixctl", f"{folder}/db.ctl")
        until(lambda: os.path.exists(f"{folder}/db.sock"), "the database of Open vSwitch")
        run("ovs-vsctl", f"--db={remote}", "--no-wait", "init")
        self.start("ovs-vswitchd", remote, "--unixctl", f"{folder}/switch.ctl")
        self.database = f"--db={remote}"
        run("ovs-vsctl", self.database, "--timeout=60", "add-br", "br0")
        run("ip", "addr", "add", f"{HOST}/24", "dev", "br0")
        run("ip", "link", "set", "br0", "up")
        for guest in range(1, GUESTS + 1):
            self.port(f"tap{guest}")
            self.start("iperf3", "-s", "-B", HOST, "-p", str(5200 + guest))

    def start(self, *command):
        self.processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def port(self, name):
        run("ip", "tuntap", "add", name, "mode", "tap", "vnet_hdr")
        run("ip", "link", "set", name, "up")
        run("ovs-vsctl", self.database, "--timeout=60", "add-port", "br0", name)


class Guest:
    """A virtual machine with vhost_net; commands go to a shell on its serial port."""

    def __init__(self, number, kernel, initrd, folder):
        self.number, self.said = number, []
        pipe = f"{tempfile.mkdtemp(dir=folder)}/serial"
        os.mkfifo(f"{pipe}.in")
        os.mkfifo(f"{pipe}.out")
        network = f"tap,id=n,ifname=tap{number},script=no,downscript=no,vhost=on"
        card = f"virtio-net-pci,netdev=n,romfile=,mac=52:54:00:92:00:{number:02x}"
        append = f"console=ttyS0 earlyprintk=ttyS0,115200 quiet panic=-1 guest={number}"
        self.process = subprocess.Popen(
            ["qemu-system-x86_64", "-enable-kvm", "-cpu", "host", "-smp", str(PROCESSORS), "-m", "192", "-M", "q35", "-no-reboot"]
            + ["-name", f"guest{number},debug-threads=on", "-nodefaults", "-no-user-config", "-display", "none"]
            + ["-bios", "qboot.rom", "-serial", f"pipe:{pipe}"]
            + ["-kernel", kernel, "-initrd", initrd, "-append", append, "-netdev", network, "-device", card]
        )
        self.input = open(f"{pipe}.in", "w", buffering=1)
        threading.Thread(target=self.listen, args=(f"{pipe}.out",), daemon=True).start()

    def listen(self, path):
        with open(path, errors="replace") as output:
            for line in output:
                self.said.append(line.rstrip())

    def is_up(self):
        if self.process.poll() is not None:
            time.sleep(1)
            raise RuntimeError(f"guest {self.number} ended with {self.process.returncode}")
        return any(line.startswith("guest is up") for line in self.said)

    def do(self, command):
        # Guests that have ended are started again before the next measurement.
        with contextlib.suppress(BrokenPipeError):
            self.input.write(command + "\n")

    def send(self):
        # A receiver may still be busy with the last connection.
        client = f"iperf3 -c {HOST} -p {5200 + self.number} -t 9999 >/dev/null 2>&1"
        self.do(f"touch /tmp/send; while [ -e /tmp/send ]; do {client}; sleep 1; done &")

    def sent(self):
        return int(read(f"/sys/class/net/tap{self.number}/statistics/rx_bytes"))

    def end(self):
        self.process.kill()
        self.process.wait()

    def spin(self):
        self.do(" ".join(["yes >/dev/null &"] * PROCESSORS))

    def rest(self):
        self.do("rm -f /tmp/send; killall -9 iperf3 yes 2>/dev/null")


class Guests:
    """All guests. In emulation one hangs or ends now and then, and is started again."""

    def __init__(self, kernel, initrd, folder):
        self.arguments = (kernel, initrd, folder)
        self.all = [self.booted(number) for number in range(1, GUESTS + 1)]

    def booted(self, number):
        for _ in range(TRIES):
            begin = time.monotonic()
            guest = Guest(number, *self.arguments)
            try:
                until(guest.is_up, f"guest {number}", PATIENCE)
            except RuntimeError as error:
                print(f"{error}; last: {guest.said[-3:]}", flush=True)
                guest.end()
                continue
            print(f"guest {number}: up after {time.monotonic() - begin:.0f} s", flush=True)
            return guest
        raise RuntimeError(f"guest {number} did not boot in {TRIES} tries")

    def load(self, senders, hogs):
        """Makes the first guests send and those after them spin. Returns when the receivers receive from each sender."""
        for _ in range(TRIES):
            for i, guest in enumerate(self.all):
                if guest.process.poll() is not None:
                    self.all[i] = self.booted(i + 1)
            before = [guest.sent() for guest in self.all[:senders]]
            for guest in self.all[:senders]:
                guest.send()
            for guest in self.all[senders : senders + hogs]:
                guest.spin()
            waiting = set(range(senders))
            end = time.monotonic() + PATIENCE
            while waiting and time.monotonic() < end:
                time.sleep(0.5)
                waiting = {i for i in waiting if self.all[i].sent() - before[i] < 1e5}
            if not waiting:
                time.sleep(SETTLE)
                return
            self.rest()
            for i in waiting:
                print(f"guest {i + 1} does not send; last: {self.all[i].said[-3:]}", flush=True)
                self.all[i].end()
                self.all[i] = self.booted(i + 1)
        raise RuntimeError(f"not every guest sent in {TRIES} tries")

    def rest(self):
        for guest in self.all:
            guest.rest()


def until(done, what, seconds=300):
    """Waits for something; raises an error after some time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not there after {seconds} s")
        time.sleep(0.2)


def counters():
    """Returns the time, the bytes that the host received so far and the calls of each probed function so far."""
    calls = {}
    for line in read(f"{TRACING}/kprobe_profile").splitlines():
        name, hits, _missed = line.split()
        calls[name] = int(hits)
    return {"at": time.monotonic(), "bytes": int(read("/sys/class/net/br0/statistics/rx_bytes")), **calls}


def prefer(this=True):
    """Runs this program before all others, or as any: a sampler that waits for a processor distorts its intervals."""
    if this:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(10))
    else:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def count(seconds, each=lambda second: None):
    """Returns bytes and calls of every half second, scaled to exactly half a second."""
    prefer()
    begin, bins = time.monotonic(), []
    before = counters()
    for i in range(round(seconds / BIN)):
        each(i * BIN)
        time.sleep(max(0.0, begin + (i + 1) * BIN - time.monotonic()))
        now = counters()
        scale = BIN / (now["at"] - before["at"])
        bins.append({key: (now[key] - before[key]) * scale for key in now if key != "at"})
        before = now
    prefer(False)
    return bins


def tasks():
    """Returns nanoseconds that each task has run, with its group."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/task/[0-9]*"):
        try:
            name, ran = read(f"{path}/comm").strip(), int(read(f"{path}/schedstat").split()[0])
        except (OSError, IndexError):
            continue
        group = next((group for start, group in GROUPS.items() if name.startswith(start)), "other")
        found[path] = (group, ran)
    return found


def trace(file, text):
    write(f"{TRACING}/{file}", text)


def shares(seconds):
    """Returns the share of the time of all processors by function, and by group of tasks."""
    trace("events/guests/enable", "0")
    trace("tracing_on", "0")
    trace("set_ftrace_filter", "\n".join(FUNCTIONS))
    trace("buffer_size_kb", str(BUFFER_KB))
    trace("current_tracer", "function_graph")
    for option in ("nosleep-time", "funcgraph-tail"):
        trace("trace_options", option)
    prefer()
    before, begin = tasks(), time.monotonic()
    trace("tracing_on", "1")
    started = time.monotonic()
    time.sleep(seconds)
    trace("tracing_on", "0")
    traced = time.monotonic() - started
    after, took = tasks(), time.monotonic() - begin
    prefer(False)
    lost = sum(int(n) for path in glob.glob(f"{TRACING}/per_cpu/cpu*/stats") for n in re.findall(r"overrun: (\d+)", read(path)))
    timed = dict.fromkeys(FUNCTIONS, 0.0)
    with open(f"{TRACING}/trace") as lines:
        for line in lines:
            if " us " in line and (found := RETURN.search(line)):
                timed[found[2]] += float(found[1]) / 1e6
    trace("current_tracer", "nop")
    trace("set_ftrace_filter", "")
    trace("events/guests/enable", "1")
    trace("tracing_on", "1")
    processors = os.cpu_count()
    groups = dict.fromkeys([*GROUPS.values(), "other"], 0.0)
    for path, (group, ran) in after.items():
        groups[group] += (ran - before.get(path, (group, 0))[1]) / 1e9 / (took * processors)
    functions = {name: spent / (traced * processors) for name, spent in timed.items()}
    return {"functions": functions, "tasks": groups, "lost": lost}


def main(kernel, initrd, out):
    folder = tempfile.mkdtemp(dir="/run")
    for module in MODULES:
        run("modprobe", module)
    if not os.path.ismount(TRACING):
        run("mount", "-t", "tracefs", "tracefs", TRACING)
    trace("kprobe_events", "".join(f"p:guests/{name} {symbol}\n" for name, symbol in PROBES.items()))
    switch = Switch(folder)
    guests = Guests(kernel, initrd, folder)
    vhost = run("ps", "-eo", "comm").count("vhost-")
    print(run("uname", "-r").strip(), run("ovs-dpctl", "show"), f"{vhost} vhost threads", sep="\n", flush=True)
    if vhost < GUESTS:
        raise RuntimeError("a guest has no vhost thread")
    trace("events/guests/enable", "1")
    figures = {"step": STEP, "bin": BIN, "probes": list(PROBES), "growth": measure_growth(guests)}
    figures["patterns"] = {name: [] for name in PATTERNS}
    write(out, json.dumps(figures))
    for _ in range(ROUNDS):
        measure_patterns(guests, figures, out)
    for guest in guests.all:
        guest.end()
    for process in switch.processes:
        process.kill()
    print("reproduce-guests: passed")


def measure_patterns(guests, figures, out):
    """Adds one round to the figures, and writes them after each pattern."""
    for name, (senders, hogs) in PATTERNS.items():
        guests.load(senders, hogs)
        before = [guest.sent() for guest in guests.all[:senders]]
        bins = count(COUNTED)
        sent = [guest.sent() - earlier for guest, earlier in zip(guests.all, before)]
        timed = shares(TIMED)
        guests.rest()
        figures["patterns"][name].append({"bins": bins, "sent": sent, **timed})
        write(out, json.dumps(figures))
        print(f"{name}: {sum(sent) / 1e6:.1f} MB, {timed['lost']} events lost, after {time.monotonic():.0f} s", flush=True)


def measure_growth(guests):
    """Returns every half second of one sender, while every step one more guest spins."""

    def more(second):
        step = second / STEP
        if step >= 1 and step == int(step) and int(step) < GUESTS:
            guests.all[int(step)].spin()

    guests.load(1, 0)
    bins = count(STEP * GUESTS, more)
    guests.rest()
    return bins


if __name__ == "__main__":
    main(*sys.argv[1:])
