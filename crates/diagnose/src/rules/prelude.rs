//! Names that nearly every rule uses.

pub(super) use seikan_observe::metric;

pub(super) use super::weigh::{Facts, Ramp, can_turn, program, settled, weighted};
pub(super) use super::{Spec, effects};
pub(super) use crate::signature::{FEW, FULL_PACKET, Per, Source};
pub(super) use crate::{
    Action, Cause, Evidence, Fact, Finding, Judgement, Location, PathStep, Remedy,
};
