//! Support for the tests of this crate: network namespaces, and sysfs inside them.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

pub(crate) use crate::netns::NetNs;
use crate::testing::skip;

/// Returns a new namespace, or `None` if this process may not create one.
pub(crate) fn namespace() -> Option<NetNs> {
    NetNs::create()
        .map_err(|error| skip(&error.to_string()))
        .ok()
}

/// Returns an attribute below `/sys/class/net` from the namespace's own sysfs, which is mounted for
/// the length of the call; `None` if it does not exist.
pub(crate) fn sysfs(namespace: &NetNs, path: &str) -> Option<String> {
    namespace
        .run(|| {
            let none: Option<&str> = None;
            // A mount namespace for this thread alone, which ends with the thread.
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none).unwrap();
            let text = std::fs::read_to_string(format!("/sys/class/net/{path}")).ok()?;
            Some(text.trim().to_owned())
        })
        .unwrap()
}
