//! Load of threads and processors, as several rules need it.
//!
//! The demand of a thread is the time in which it ran or was ready to run. Its waiting time is
//! compared with that demand, not with the clock: a busy thread that gets its demand does not lack
//! a processor.

use std::ops::Add;

use seikan_observe::profile::Share;
use seikan_observe::{Subject, metric};

use crate::{Evidence, Stage, ThreadUse};

impl ThreadUse {
    /// Share of the time in which it ran or was ready to run.
    pub fn demand(&self) -> f64 {
        self.running + self.waiting
    }

    /// Share of its demand in which it waited for a processor, 0 to 1.
    pub fn kept_waiting(&self) -> f64 {
        self.waiting / self.demand().max(1e-9)
    }

    /// Whether it moves a virtual machine's packets or is one of its processors: `vhost-PID`, `CPU 0/KVM`.
    pub fn serves_guest(&self) -> bool {
        self.name.starts_with("vhost-") || self.name.ends_with("/KVM")
    }
}

impl Evidence {
    /// Returns the program's thread with the largest demand.
    pub fn busiest_thread(&self) -> Option<ThreadUse> {
        let threads = self.threads().into_iter();
        threads.max_by(|a, b| a.demand().total_cmp(&b.demand()))
    }

    /// Returns the load of the program, 0 to 1: the demand of its busiest thread, or of all threads
    /// relative to the processors that they may use, whichever is larger. Without a program (a
    /// tunnel of the kernel), the load of the busiest processor.
    pub fn busy(&self) -> Option<f64> {
        let Some(program) = &self.map.program else {
            let idle = self.idle().into_iter().map(|(_, idle)| idle);
            return idle.min_by(f64::total_cmp).map(|idle| 1.0 - idle);
        };
        let one = self.busiest_thread()?.demand();
        let processors = match program.cpus.len() {
            0 => self.map.host.cpus.len(),
            allowed => allowed,
        };
        let all: f64 = self.threads().iter().map(ThreadUse::demand).sum();
        Some(one.max(all / processors.max(1) as f64).min(1.0))
    }

    /// Returns the mean idle share of the processors that the program may use.
    pub fn idle_share(&self) -> Option<f64> {
        let allowed = self.map.program.as_ref().map(|program| &program.cpus);
        let allowed = allowed.filter(|cpus| !cpus.is_empty());
        let idle = self.idle().into_iter();
        let idle: Vec<f64> = idle
            .filter(|(cpu, _)| allowed.is_none_or(|cpus| cpus.contains(cpu)))
            .map(|(_, idle)| idle)
            .collect();
        (!idle.is_empty()).then(|| idle.iter().sum::<f64>() / idle.len() as f64)
    }

    /// Returns the mean busy share of all processors; 0 if it was not measured.
    pub fn busy_share(&self) -> f64 {
        let idle = self.idle();
        idle.iter().map(|(_, idle)| 1.0 - idle).sum::<f64>() / idle.len().max(1) as f64
    }

    /// Returns the processors that the program's threads used: 1 for one processor.
    pub fn running(&self) -> f64 {
        self.threads().iter().map(|thread| thread.running).sum()
    }

    /// Returns the processors that the rest of the machine used.
    pub fn used_by_others(&self) -> Option<f64> {
        let used = self.idle().into_iter().map(|(_, idle)| 1.0 - idle);
        let used = used.reduce(f64::add)?;
        Some((used - self.running()).max(0.0))
    }

    /// Returns the share of the time in which the program's control group was throttled, summed
    /// over processors.
    pub fn throttled(&self) -> Option<f64> {
        let group = self.map.program.as_ref()?.group.clone()?;
        let stopped = self.growth(&Subject::Group(group), metric::GROUP_THROTTLED_US)?;
        Some(stopped / 1e6 / self.seconds())
    }

    /// Returns the kernel's share of the program's processor time.
    pub fn in_kernel(&self) -> Option<f64> {
        let program = self.map.program.as_ref()?;
        let sum = |name| -> f64 {
            let threads = program.threads.iter();
            let of = threads.filter_map(|(tid, _)| {
                let (pid, tid) = (program.pid, *tid);
                self.growth(&Subject::Thread { pid, tid }, name)
            });
            of.sum()
        };
        let (user, system) = (sum(metric::THREAD_USER_NS), sum(metric::THREAD_SYSTEM_NS));
        (user + system > 0.0).then(|| system / (user + system))
    }

    /// Returns the share of a stage in the program's time, or in the machine's time for a tunnel of
    /// the kernel.
    pub fn work(&self, stage: Stage) -> Option<f64> {
        let of = self.shares()?.iter().filter(|share| share.stage == stage);
        Some(of.map(|share| share.share).sum())
    }

    /// Returns the largest function of these stages in the same time as [`Evidence::work`].
    pub fn leading_function(&self, stages: &[Stage]) -> Option<&str> {
        let mut of = self.shares()?.iter();
        let first = of.find(|share| stages.contains(&share.stage));
        first.map(|share| &*share.symbol)
    }

    fn shares(&self) -> Option<&[Share]> {
        let profile = self.profile.as_ref()?;
        Some(match self.map.program {
            Some(_) => &profile.program,
            None => &profile.machine,
        })
    }

    /// Returns a numeric setting below `/proc/sys`.
    pub fn sysctl(&self, name: &str) -> Option<f64> {
        self.map.host.sysctls.get(name)?.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use crate::rules::testing::*;

    #[test]
    fn waiting_is_relative_to_the_demand() {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, 0.1, 0.3);
        let thread = evidence.busiest_thread().expect("thread");
        assert!((thread.demand() - 0.4).abs() < 1e-9);
        assert!((thread.kept_waiting() - 0.75).abs() < 1e-9);
    }

    #[test]
    fn many_threads_fill_the_processors_together() {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, 0.9, 0.0);
        thread(&mut evidence, 101, 0.3, 0.0);
        assert_eq!(evidence.busy(), Some(0.9));
        thread(&mut evidence, 101, 1.0, 0.0);
        evidence.map.program.as_mut().expect("program").cpus = vec![0];
        assert_eq!(evidence.busy(), Some(1.0));
    }

    #[test]
    fn others_use_the_rest() {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, 0.5, 0.0);
        processor(&mut evidence, 0, 1.0, 0.0);
        processor(&mut evidence, 1, 0.2, 0.0);
        let others = evidence.used_by_others().expect("processors");
        assert!((others - 0.7).abs() < 1e-9);
    }
}
