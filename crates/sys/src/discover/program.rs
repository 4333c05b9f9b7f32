//! Facts about a program: its threads, and the processor time that it may use.

use std::collections::BTreeSet;

use seikan_observe::path::{ProgramFacts, Unseen};

use super::{group, procfs};
use crate::softirq::parse_cpu_list;

/// Maximum number of threads that are reported.
const THREADS_MAX: usize = 1024;

/// Returns the facts of a process. Fields that cannot be read are empty.
pub(super) fn facts(pid: u32, unseen: &mut Vec<Unseen>) -> ProgramFacts {
    let mut tids = procfs::numbers(format!("/proc/{pid}/task")).unwrap_or_default();
    tids.sort_unstable();
    tids.truncate(THREADS_MAX);
    let mut cpus = BTreeSet::new();
    let mut threads = Vec::new();
    for tid in tids {
        let path = format!("/proc/{pid}/task/{tid}");
        let Ok(name) = procfs::read(format!("{path}/comm")) else {
            continue; // it has ended
        };
        threads.push((tid, procfs::clean(&name)));
        let status = procfs::read(format!("{path}/status")).unwrap_or_default();
        let allowed = procfs::value(&status, "Cpus_allowed_list").unwrap_or_default();
        cpus.extend(parse_cpu_list(allowed));
    }
    let stat = procfs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let limit = group::limit(pid).unwrap_or_else(|_| {
        unseen.push(Unseen {
            what: "whether a control group limits the program's processor time".into(),
            why: "no control groups are mounted here; enter the network namespace alone, with \
                  `nsenter --net=/run/netns/NAME`"
                .into(),
        });
        None
    });
    ProgramFacts {
        pid,
        name: procfs::name(pid),
        threads,
        cpus: cpus.into_iter().collect(),
        group: limit
            .as_ref()
            .map(|limit| limit.directory.to_string_lossy().into_owned()),
        cpu_limit: limit.map(|limit| limit.processors),
        nice: parse_nice(&stat).unwrap_or(0),
    }
}

/// Parses field 19 of proc_pid_stat(5). The name before it may contain spaces and brackets.
fn parse_nice(stat: &str) -> Option<i32> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    fields.nth(16)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nice_is_the_nineteenth_field() {
        let line = "7 (a) b 1 2 (c)) S 1 7 7 0 -1 4194304 90 0 0 0 250 130 0 0 25 5 1 0 5 0 0";
        assert_eq!(parse_nice(line), Some(5));
        assert_eq!(parse_nice("7 (x) S 1"), None);
    }

    #[test]
    fn this_process_is_known_by_its_threads_and_processors() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("discovered".into());
        let thread = thread.spawn(move || {
            tell.send(nix::unistd::gettid().as_raw()).unwrap();
            let _ = ended.recv();
        });
        let tid = told.recv().unwrap().cast_unsigned();
        let facts = facts(std::process::id(), &mut Vec::new());
        drop(end);
        thread.unwrap().join().unwrap();
        assert!(facts.threads.contains(&(tid, "discovered".into())));
        let processors = std::thread::available_parallelism().unwrap().get();
        assert!(facts.cpus.len() >= processors, "{facts:?}");
    }
}
