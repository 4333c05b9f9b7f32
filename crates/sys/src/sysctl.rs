//! Kernel parameters under `net.` (sysctl(8), Documentation/networking/ip-sysctl.rst), read and
//! written as files of `/proc/sys/net`.
//!
//! A parameter is named by the components of its path, the interface's name being one of them:
//! `["ipv4", "conf", "eth0.10", "forwarding"]`. The dotted notation cannot tell such a name from
//! two components.
//!
//! The values are those of the calling thread's network namespace: the kernel looks a name below
//! `/proc/sys/net` up in the namespace of the task that looks (`net_ctl_header_lookup()`,
//! net/sysctl_net.c). Enter another with [`crate::netns::NetNs::run`].

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

const ROOT: &str = "/proc/sys/net";

/// Why a parameter could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SysctlError {
    /// There is no such parameter: the kernel lacks the feature, or the interface is gone.
    #[error(
        "there is no kernel parameter {}: this kernel lacks what it controls, or there is no such \
         interface",
        path.display()
    )]
    Absent {
        /// The file.
        path: PathBuf,
    },
    /// It may not be written: no privilege, or `/proc/sys` is mounted read-only as in most
    /// containers.
    #[error(
        "not permitted to write {}: {source}; run as root (CAP_NET_ADMIN), and in a container let \
         /proc/sys be writable, or set the parameter from outside",
        path.display()
    )]
    NotPermitted {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A component that cannot be one.
    #[error("{component:?} cannot be part of a kernel parameter's name")]
    Name {
        /// The component.
        component: String,
    },
    /// The kernel refused the value, or the file cannot be read.
    #[error("cannot {action} {}: {source}", path.display())]
    Refused {
        /// "read", or "set to" which value.
        action: String,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The file of a parameter, `components` being below `net`.
pub fn path(components: &[&str]) -> Result<PathBuf, SysctlError> {
    let mut path = PathBuf::from(ROOT);
    for &component in components {
        if matches!(component, "" | "." | "..") || component.contains(['/', '\0']) {
            return Err(SysctlError::Name {
                component: component.into(),
            });
        }
        path.push(component);
    }
    Ok(path)
}

/// The value, without the line's end.
pub fn read(components: &[&str]) -> Result<String, SysctlError> {
    let path = path(components)?;
    match fs::read_to_string(&path) {
        Ok(text) => Ok(text.trim_end().to_owned()),
        Err(source) => Err(error(source, path, "read".into())),
    }
}

/// Sets the value.
pub fn write(components: &[&str], value: &str) -> Result<(), SysctlError> {
    let path = path(components)?;
    fs::write(&path, value).map_err(|source| error(source, path, format!("write {value:?} to")))
}

/// Whether the value could be set; some of a network namespace's are only read in it, the machine's being the ones that count.
pub fn check_writable(components: &[&str]) -> Result<(), SysctlError> {
    let path = path(components)?;
    // Nothing changes until something is written.
    match File::options().write(true).open(&path) {
        Ok(_) => Ok(()),
        Err(source) => Err(error(source, path, "write".into())),
    }
}

/// The names in a directory, such as `["ipv4", "conf"]`: interfaces, and `all` and `default`.
pub fn list(components: &[&str]) -> Result<Vec<String>, SysctlError> {
    let path = path(components)?;
    match fs::read_dir(&path) {
        Ok(entries) => Ok(entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()),
        Err(source) => Err(error(source, path, "list".into())),
    }
}

fn error(source: io::Error, path: PathBuf, action: String) -> SysctlError {
    match (source.kind(), source.raw_os_error()) {
        (io::ErrorKind::NotFound, _) => SysctlError::Absent { path },
        (_, Some(libc::EACCES | libc::EPERM | libc::EROFS)) if action != "read" => {
            SysctlError::NotPermitted { path, source }
        }
        _ => SysctlError::Refused {
            action,
            path,
            source,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_namespace::namespace;
    use crate::testing::in_child;

    /// net/netfilter/nf_conntrack_standalone.c: `nf_conntrack_max` may only be read in all namespaces but the first.
    #[test]
    fn what_may_only_be_read_is_told_before_it_is_written() {
        let Some(namespace) = namespace() else { return };
        let [tracked, forwarding] = namespace
            .run(|| {
                [
                    check_writable(&["netfilter", "nf_conntrack_max"]),
                    check_writable(&["ipv4", "conf", "lo", "forwarding"]),
                ]
            })
            .unwrap();
        forwarding.unwrap();
        match tracked {
            // No connection tracking here.
            Err(SysctlError::Absent { .. }) => {}
            Err(SysctlError::NotPermitted { .. }) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_interface_with_dots_in_its_name_is_one_component() {
        let Some(namespace) = namespace() else { return };
        let netlink = namespace.netlink().unwrap();
        netlink.create_veth("v.1.x", "v", None).unwrap();
        let (before, after, other) = namespace
            .run(|| {
                let name = ["ipv4", "conf", "v.1.x", "forwarding"];
                let before = read(&name).unwrap();
                write(&name, "1").unwrap();
                let other = read(&["ipv4", "conf", "v", "forwarding"]).unwrap();
                (before, read(&name).unwrap(), other)
            })
            .unwrap();
        assert_eq!(
            (&*before, &*after, &*other),
            ("0", "1", "0"),
            "a new interface does not forward, and only one was told to"
        );
    }

    #[test]
    fn each_namespace_has_its_own_values() {
        let (Some(a), Some(b)) = (namespace(), namespace()) else {
            return;
        };
        let name = ["ipv4", "conf", "all", "proxy_arp"];
        // In this order: what b sees was looked up in a before.
        a.run(|| write(&name, "1").unwrap()).unwrap();
        assert_eq!(a.run(|| read(&name).unwrap()).unwrap(), "1");
        assert_eq!(b.run(|| read(&name).unwrap()).unwrap(), "0");
    }

    #[test]
    fn the_interfaces_are_listed() {
        let Some(namespace) = namespace() else { return };
        let names = namespace.run(|| list(&["ipv4", "conf"]).unwrap()).unwrap();
        for name in ["all", "default", "lo"] {
            assert!(names.iter().any(|other| other == name), "{names:?}");
        }
    }

    #[test]
    fn an_absent_interface_is_absent() {
        let error = read(&["ipv4", "conf", "absent0", "forwarding"]).unwrap_err();
        assert!(matches!(error, SysctlError::Absent { .. }), "{error}");
    }

    #[test]
    fn a_component_cannot_leave_the_directory() {
        for component in ["", ".", "..", "a/b", "a\0b"] {
            let outcome = read(&["ipv4", "conf", component, "forwarding"]);
            assert!(
                matches!(outcome, Err(SysctlError::Name { .. })),
                "{component:?}"
            );
        }
    }

    #[test]
    fn a_refused_value_is_named() {
        let Some(namespace) = namespace() else { return };
        let outcome = namespace
            .run(|| write(&["ipv4", "conf", "all", "forwarding"], "perhaps"))
            .unwrap();
        let text = outcome.unwrap_err().to_string();
        assert!(
            text.contains("perhaps") && text.contains("forwarding"),
            "{text}"
        );
    }

    #[test]
    fn without_privilege_it_is_not_permitted() {
        if !nix::unistd::geteuid().is_root() {
            crate::testing::skip("needs root to become somebody else");
            return;
        }
        in_child(|| {
            nix::unistd::setgid(65534.into()).map_err(|e| e.to_string())?;
            nix::unistd::setuid(65534.into()).map_err(|e| e.to_string())?;
            // The value it has: should the privilege be there after all, nothing changes.
            let name = ["ipv4", "conf", "all", "proxy_arp"];
            let value = read(&name).map_err(|e| e.to_string())?;
            match write(&name, &value) {
                Err(SysctlError::NotPermitted { .. }) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }
}
