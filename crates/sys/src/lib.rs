//! TODO
pub mod dns;
pub mod ethtool;
pub mod hooks;
pub mod netlink;
pub mod netns;
pub mod privilege;
pub mod process;
