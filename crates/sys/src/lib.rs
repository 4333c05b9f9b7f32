//! TODO
pub mod netlink;
pub mod netns;
