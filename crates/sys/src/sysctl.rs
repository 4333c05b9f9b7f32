//! Kernel parameters under `net.` (sysctl(8), Documentation/networking/ip-sysctl.rst), read and
//! written as files of `/proc/sys/net`.
//!
//! The name of a parameter is given by the components of its path, one of which may be the name of
//! an interface: `["ipv4", "conf", "eth0.10", "forwarding"]`. In dotted notation such a name would
//! look like two components.
//!
//! The values are those of the calling thread's network namespace: the kernel resolves a name below
//! `/proc/sys/net` in the namespace of the reading task (`net_ctl_header_lookup()`,
//! net/sysctl_net.c). Enter another one with [`crate::netns::NetNs::run`].

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

const ROOT: &str = "/proc/sys/net";

/// Why a parameter could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SysctlError {
    /// The parameter does not exist: the kernel lacks the feature, or the interface is gone.
    #[error(
        "there is no kernel parameter {}: this kernel lacks the feature, or there is no such interface",
        path.display()
    )]
    Absent {
        /// The file.
        path: PathBuf,
    },
    /// The parameter may not be written: without privilege, or because `/proc/sys` is mounted
    /// read-only, as in most containers.
    #[error(
        "not permitted to write {}: {source}; run as root (CAP_NET_ADMIN), and in a container make /proc/sys writable, or set the parameter from outside it (docker run --sysctl)",
        path.display()
    )]
    NotPermitted {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A component that is invalid.
    #[error("{component:?} cannot be part of a kernel parameter's name")]
    Name {
        /// The component.
        component: String,
    },
    /// The kernel refused the value, or the file cannot be read.
    #[error("cannot {action} {}: {source}", path.display())]
    Refused {
        /// "read", or "set to" with the value.
        action: String,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Returns the file of a parameter, given its components below `net`.
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

/// Returns the value without the end of the line.
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

/// Checks whether the value can be set. Some parameters of a network namespace are read-only there,
/// because those of the machine apply.
pub fn check_writable(components: &[&str]) -> Result<(), SysctlError> {
    let path = path(components)?;
    // Opening changes nothing.
    match File::options().write(true).open(&path) {
        Ok(_) => Ok(()),
        Err(source) => Err(error(source, path, "write".into())),
    }
}

/// Returns the names in a directory, such as `["ipv4", "conf"]`: interfaces, and `all` and
/// `default`.
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

    /// net/netfilter/nf_conntrack_standalone.c: `nf_conntrack_max` is read-only in all namespaces
    /// except the first.
    #[test]
    fn a_read_only_parameter_is_detected_before_writing() {
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
            // There is no connection tracking here.
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
        // In this order: b's file is looked up before the change in a.
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
            // The current value: if the privilege is there after all, nothing changes.
            let name = ["ipv4", "conf", "all", "proxy_arp"];
            let value = read(&name).map_err(|e| e.to_string())?;
            match write(&name, &value) {
                Err(SysctlError::NotPermitted { .. }) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }
}
