//! Resolution of addresses to functions.
//!
//! Files of other programs are read only if these use a notable part of the time.

use std::collections::HashMap;
use std::fs;

use seikan_observe::path::Unseen;
use seikan_observe::profile::{Function, Functions};

use super::elf::{Budget, Elf};
use super::kallsyms::Kernel;
use super::maps::{self, Mapping};
use super::symbols::readable;
use super::{Location, Mode, RawProfile, Scope};

/// Part of all samples from which the files of another program are read.
const NOTABLE: f64 = 0.01;
/// Prefixes of the names of functions in which the kernel is idle: drivers/cpuidle, drivers/acpi,
/// kernel/sched/idle.c, and the architectures.
const IDLE: [&str; 22] = [
    "default_idle",
    "pv_native_safe_halt",
    "native_safe_halt",
    "native_halt",
    "acpi_idle_",
    "acpi_safe_halt",
    "acpi_processor_ffh_cstate_enter",
    "mwait_idle",
    "intel_idle",
    "amd_e400_idle",
    "xen_safe_halt",
    "kvm_halt",
    "poll_idle",
    "cpu_idle_poll",
    "arch_cpu_idle",
    "cpuidle_",
    "cpu_do_idle",
    "cpu_startup_entry",
    "do_idle",
    "psci_",
    "tick_nohz_idle",
    "haltpoll",
];

impl RawProfile {
    /// Finds the functions of processes that still exist. Reads `/proc` and the programs' files,
    /// which takes some tenths of a second.
    pub fn functions(&self) -> Functions {
        let mut names = Names::new(self);
        let mut counted: HashMap<(String, String), (u64, u64)> = HashMap::new();
        let (mut program, mut idle) = (0, 0);
        let mut locations: Vec<(&Location, &u64)> = self.locations.iter().collect();
        // The program comes first: it may end while files are read.
        locations.sort_by_key(|(location, _)| self.program != Some(location.pid));
        for (location, &samples) in locations {
            let name = names.of(location.pid, location.mode, location.address);
            if names.is_idle(location, &name.0) {
                idle += samples;
                continue;
            }
            let own = if self.program == Some(location.pid) {
                samples
            } else {
                0
            };
            let counts = counted.entry(name).or_default();
            counts.0 += own;
            counts.1 += samples;
            program += own;
        }
        let functions = counted.into_iter();
        let mut functions: Vec<Function> = functions
            .map(|((symbol, module), (program, machine))| Function {
                symbol,
                module,
                program,
                machine,
            })
            .collect();
        functions.sort_by(|a, b| {
            let by_name = || (&a.symbol, &a.module).cmp(&(&b.symbol, &b.module));
            b.machine.cmp(&a.machine).then_with(by_name)
        });
        Functions {
            samples: functions.iter().map(|function| function.machine).sum(),
            program,
            idle,
            lost: self.lost,
            machine: self.scope == Scope::Machine,
            functions,
            stacks: self.named_stacks(&mut names),
            unseen: names.unseen,
        }
    }

    /// Returns the stacks of busy processors, each below the name of its process.
    fn named_stacks(&self, names: &mut Names<'_>) -> Vec<(Vec<String>, u64)> {
        let mut counted: HashMap<Vec<String>, u64> = HashMap::new();
        for ((pid, stack), &samples) in &self.stacks {
            let Some(&(mode, address)) = stack.first() else {
                continue;
            };
            let location = Location {
                pid: *pid,
                mode,
                address,
            };
            let leaf = names.of(*pid, mode, address).0;
            if names.is_idle(&location, &leaf) {
                continue;
            }
            let mut path = vec![names.process(*pid)];
            for (depth, &(mode, address)) in stack.iter().enumerate().rev() {
                // A return address may be the first address after the calling function.
                let address = address.saturating_sub(u64::from(depth > 0));
                path.push(names.of(*pid, mode, address).0);
            }
            *counted.entry(path).or_default() += samples;
        }
        let mut stacks: Vec<_> = counted.into_iter().collect();
        stacks.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        stacks
    }
}

/// The symbols known so far.
struct Names<'a> {
    raw: &'a RawProfile,
    kernel: Option<Kernel>,
    processes: HashMap<u32, Vec<Mapping>>,
    files: HashMap<(String, u64), Option<Elf>>,
    budget: Budget,
    unseen: Vec<Unseen>,
}

impl<'a> Names<'a> {
    fn new(raw: &'a RawProfile) -> Self {
        let mut unseen = raw.unseen.clone();
        let mut kernel = None;
        if raw.scope != Scope::ProgramOnly {
            match Kernel::read() {
                Ok(read) => kernel = Some(read),
                Err(why) => unseen.push(Unseen {
                    what: "the kernel's functions, and packets that idle processors receive".into(),
                    why,
                }),
            }
        }
        let mut by_process: HashMap<u32, u64> = HashMap::new();
        for (location, samples) in &raw.locations {
            if location.mode == Mode::User {
                *by_process.entry(location.pid).or_default() += samples;
            }
        }
        let busy: u64 = by_process.values().sum();
        let notable = |(pid, samples): &(u32, u64)| {
            raw.program == Some(*pid) || *samples as f64 >= NOTABLE * busy as f64
        };
        let mut processes = HashMap::new();
        for (pid, _) in by_process.into_iter().filter(notable) {
            match fs::read(format!("/proc/{pid}/maps")) {
                Ok(text) => _ = processes.insert(pid, maps::parse(&String::from_utf8_lossy(&text))),
                Err(error) if raw.program == Some(pid) => unseen.push(Unseen {
                    what: "the program's functions".into(),
                    why: format!("cannot read /proc/{pid}/maps: {error}"),
                }),
                // The process has ended.
                Err(_) => {}
            }
        }
        Names {
            raw,
            kernel,
            processes,
            files: HashMap::new(),
            budget: Budget::new(),
            unseen,
        }
    }

    /// Returns the symbol and the file or module that it belongs to.
    fn of(&mut self, pid: u32, mode: Mode, address: u64) -> (String, String) {
        match mode {
            Mode::Kernel => self.kernel(address),
            Mode::Guest => ("[guest]".into(), "guest".into()),
            Mode::User => self.user(pid, address),
        }
    }

    fn kernel(&self, address: u64) -> (String, String) {
        let found = self.kernel.as_ref().and_then(|kernel| kernel.find(address));
        match found {
            Some((name, module)) => (readable(name), String::from_utf8_lossy(module).into_owned()),
            None => ("[kernel]".into(), "kernel".into()),
        }
    }

    fn user(&mut self, pid: u32, address: u64) -> (String, String) {
        let mappings = self.processes.get(&pid);
        let Some(mapping) = mappings.and_then(|mappings| maps::find(mappings, address)) else {
            return self.unnamed(pid);
        };
        if mapping.inode == 0 {
            return if mapping.path.starts_with('[') {
                (mapping.path.clone(), mapping.path.clone())
            } else {
                self.unnamed(pid)
            };
        }
        let file = self.files.entry((mapping.device.clone(), mapping.inode));
        let file = file.or_insert_with(|| Elf::read(&paths(pid, mapping), &self.budget));
        let offset = (address - mapping.start).saturating_add(mapping.offset);
        let name = file.as_ref().and_then(|file| file.find(offset));
        let module = mapping.name().replace(char::is_control, "?");
        match name {
            Some(name) => (readable(name), module),
            None => (format!("[{module}]"), module),
        }
    }

    /// Returns a name for code of a process without a known file.
    fn unnamed(&self, pid: u32) -> (String, String) {
        let name = self.process(pid);
        (format!("[{name}]"), name)
    }

    fn process(&self, pid: u32) -> String {
        match (pid, self.raw.names.get(&pid)) {
            (0, _) => "idle".to_owned(),
            (_, Some(name)) => name.clone(),
            (_, None) => "ended".to_owned(),
        }
    }

    /// Whether the processor was idle. Without names, all time without a process counts as idle.
    fn is_idle(&self, location: &Location, symbol: &str) -> bool {
        let nobody = location.pid == 0 && location.mode == Mode::Kernel;
        let nothing = || IDLE.iter().any(|idle| symbol.starts_with(idle));
        nobody && (self.kernel.is_none() || nothing())
    }
}

/// Returns paths to open a mapped file: the file itself, even if it is deleted or in another mount
/// namespace; and, if that is not permitted, its path below the root directory of the process.
fn paths(pid: u32, mapping: &Mapping) -> [String; 2] {
    let Mapping { start, end, .. } = mapping;
    [
        format!("/proc/{pid}/map_files/{start:x}-{end:x}"),
        format!("/proc/{pid}/root{}", mapping.path),
    ]
}
