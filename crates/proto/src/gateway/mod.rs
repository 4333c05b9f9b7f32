//! What a gateway does to the packets of devices that run nothing of ours.

pub mod translate;
