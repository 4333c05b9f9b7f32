//! The processor time that the control group of a process allows: `cpu.max` of cgroup v2
//! (Documentation/admin-guide/cgroup-v2.rst), `cpu.cfs_quota_us` of v1 (scheduler/sched-bwc.rst).

use std::path::{Component, Path, PathBuf};

use super::procfs;

/// Maximum number of groups from the process up to the root that are read.
const DEPTH: usize = 64;

/// Maximum number of ancestors whose mounts are tried.
const ANCESTORS_MAX: usize = 16;

/// No mounted control group hierarchy that limits processors is visible.
#[derive(Debug)]
pub(super) struct NoHierarchy;

/// A limit of processor time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Limit {
    /// The directory of the limiting group.
    pub(super) directory: PathBuf,
    /// Processor time per time, in processors.
    pub(super) processors: f64,
}

/// Returns the tightest limit of a process, the innermost of equal ones. `Err` if no hierarchy that
/// limits processors is visible.
pub(super) fn limit(pid: u32) -> Result<Option<Limit>, NoHierarchy> {
    let groups = procfs::read(format!("/proc/{pid}/cgroup")).map_err(|_| NoHierarchy)?;
    let seen = |(root, mounts): (PathBuf, String)| {
        let directories = directories(&groups, &mounts, &root);
        (!directories.is_empty()).then_some(directories)
    };
    let hierarchies = views().into_iter().find_map(seen).ok_or(NoHierarchy)?;
    let limits = hierarchies
        .iter()
        .filter_map(|(mount, directory)| tightest(mount, directory));
    Ok(limits.min_by(|a, b| a.processors.total_cmp(&b.processors)))
}

/// Returns mount tables with their roots: that of the caller and, because `ip netns exec` hides
/// `/sys/fs/cgroup`, those of the first process and of the caller's ancestors.
fn views() -> Vec<(PathBuf, String)> {
    let mut views = Vec::new();
    if let Ok(mounts) = procfs::read("/proc/thread-self/mountinfo") {
        views.push((PathBuf::from("/"), mounts));
    }
    let mut pids = vec![1];
    let mut next = std::process::id();
    while let Some(parent) = parent(next).filter(|pid| *pid > 1 && pids.len() < ANCESTORS_MAX) {
        pids.push(parent);
        next = parent;
    }
    for pid in pids {
        if let Ok(mounts) = procfs::read(format!("/proc/{pid}/mountinfo")) {
            views.push((format!("/proc/{pid}/root").into(), mounts));
        }
    }
    // A root that may not be entered is of no use.
    views.retain(|(root, _)| std::fs::metadata(root.join("sys")).is_ok());
    views
}

fn parent(pid: u32) -> Option<u32> {
    let status = procfs::read(format!("/proc/{pid}/status")).ok()?;
    procfs::value(&status, "PPid")?.parse().ok()
}

/// Returns the tightest limit from a directory up to the mount point of its hierarchy.
fn tightest(mount: &Path, directory: &Path) -> Option<Limit> {
    let groups = directory.ancestors().take(DEPTH);
    let groups = groups.take_while(|group| group.starts_with(mount));
    let limits = groups.filter_map(|group| {
        Some(Limit {
            directory: group.to_owned(),
            processors: read_limit(group)?,
        })
    });
    limits.min_by(|a, b| a.processors.total_cmp(&b.processors))
}

/// Returns the hierarchies that can limit processors: the mount point, and the directory of the
/// process.
fn directories(groups: &str, mounts: &str, root: &Path) -> Vec<(PathBuf, PathBuf)> {
    // cgroups(7): hierarchy:controllers:path; 0 and no controllers is v2.
    groups
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let second = hierarchy == "0" && controllers.is_empty();
            if !second && !controllers.split(',').any(|name| name == "cpu") {
                return None;
            }
            let mut mounts = mounts.lines().filter_map(Mount::parse);
            let mount = mounts.find(|mount| mount.is_of(second))?;
            // A path above the root of the reader (`/../x`) or outside of the mount cannot be
            // found.
            let below = Path::new(path).strip_prefix(&mount.root).ok()?;
            let plain = |part: Component| matches!(part, Component::Normal(_));
            if !below.components().all(plain) {
                return None;
            }
            let point = root.join(mount.point.strip_prefix("/").ok()?);
            let directory = if below.as_os_str().is_empty() {
                point.clone()
            } else {
                point.join(below)
            };
            Some((point, directory))
        })
        .collect()
}

struct Mount {
    root: PathBuf,
    point: PathBuf,
    kind: String,
    options: String,
}

impl Mount {
    /// Parses a line of proc_pid_mountinfo(5): id, parent, device, root, mount point, options,
    /// optional fields, `-`, kind, source, options of the file system.
    fn parse(line: &str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ').skip(3);
        let mut back = back.split(' ');
        Some(Self {
            root: unescape(front.next()?),
            point: unescape(front.next()?),
            kind: back.next()?.to_owned(),
            options: back.nth(1)?.to_owned(),
        })
    }

    fn is_of(&self, second: bool) -> bool {
        if second {
            self.kind == "cgroup2"
        } else {
            self.kind == "cgroup" && self.options.split(',').any(|option| option == "cpu")
        }
    }
}

/// Decodes `\040` for a space and similar escapes (`mangle()`, fs/seq_file.c).
fn unescape(text: &str) -> PathBuf {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain.into()
}

fn read_limit(directory: &Path) -> Option<f64> {
    let read = |file: &str| procfs::read(directory.join(file)).ok();
    if let Some(text) = read("cpu.max") {
        return parse_max(&text);
    }
    quota(&read("cpu.cfs_quota_us")?, &read("cpu.cfs_period_us")?)
}

/// Parses a limit: `50000 100000` is half a processor, `max 100000` is no limit.
fn parse_max(text: &str) -> Option<f64> {
    let (quota_text, period) = text.trim().split_once(' ')?;
    quota(quota_text, period)
}

fn quota(quota: &str, period: &str) -> Option<f64> {
    let quota: i64 = quota.trim().parse().ok()?;
    let period: i64 = period.trim().parse().ok()?;
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
41 31 0:38 / /sys/fs/cgroup/uni\\040fied rw,relatime - cgroup2 cgroup2 rw
";

    fn found(groups: &str, mounts: &str) -> Vec<String> {
        let found = directories(groups, mounts, Path::new("/")).into_iter();
        found
            .map(|(_, directory)| directory.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn both_hierarchies_are_found_where_they_are_mounted() {
        let groups = "9:name=systemd:/\n3:cpuset:/x\n1:cpu,cpuacct:/vpn/a:b\n0::/system.slice\n";
        assert_eq!(
            found(groups, MOUNTS),
            [
                "/sys/fs/cgroup/cpu,cpuacct/vpn/a:b",
                "/sys/fs/cgroup/uni fied/system.slice"
            ]
        );
    }

    #[test]
    fn a_group_of_a_container_is_below_the_root_of_the_mount() {
        let mounts = "9 1 0:2 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
        assert_eq!(found("0::/docker/abc/x\n", mounts), ["/sys/fs/cgroup/x"]);
        assert_eq!(found("0::/docker/abc\n", mounts), ["/sys/fs/cgroup"]);
    }

    #[test]
    fn a_group_that_cannot_be_seen_is_not_made_up() {
        for groups in ["0::/../../x\n", "0:/x\n", "0\n", "1:memory:/x\n", ""] {
            assert!(found(groups, MOUNTS).is_empty(), "{groups}");
        }
        let mounts = "9 1 0:2 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
        assert!(found("0::/docker/other\n", mounts).is_empty());
    }

    #[test]
    fn a_limit_is_in_processors() {
        assert_eq!(parse_max("50000 100000\n"), Some(0.5));
        assert_eq!(parse_max("max 100000\n"), None);
        assert_eq!(quota("250000\n", "100000\n"), Some(2.5));
        assert_eq!(quota("-1\n", "100000\n"), None);
        assert_eq!(quota("1", "0"), None);
    }

    #[test]
    fn the_tightest_group_counts() {
        let folder = tempfile::tempdir().unwrap();
        let outer = folder.path().join("outer");
        let inner = outer.join("inner");
        let process = inner.join("process");
        std::fs::create_dir_all(&process).unwrap();
        let set = |group: &Path, text| std::fs::write(group.join("cpu.max"), text).unwrap();
        set(&outer, "20000 100000\n");
        set(&inner, "50000 100000\n");
        set(&process, "max 100000\n");
        let limit = tightest(folder.path(), &process).unwrap();
        assert_eq!((limit.directory, limit.processors), (outer.clone(), 0.2));
        // Above the mount point there are no groups of the hierarchy.
        let limit = tightest(&inner, &process).unwrap();
        assert_eq!((limit.directory, limit.processors), (inner, 0.5));
    }
}
