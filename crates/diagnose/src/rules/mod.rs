//! The specification of each cause: one file for each fault.
//!
//! A specification has the cause's sentence, its place on the path, its effects, its counter, and
//! its rule: a pure function from [`Evidence`] to a [`Judgement`] with the figures and the
//! remedies. A rule checks the signature of its cause and the differences from similar causes; it
//! does not depend on other rules. Thresholds are named at the top of the file, with the reason for
//! their values.

use crate::signature::{Per, Signature, Source};
use crate::{Cause, Evidence, Judgement, PathStep, Severity};

mod application_limited;
mod backlog_full;
mod bufferbloat;
mod calls;
mod cipher_bound;
mod conntrack_full;
mod copy_or_checksum_bound;
mod cpu_contention;
mod cpu_quota;
mod cpu_steal;
mod effects;
mod frame_per_syscall;
mod gro_breaks_encapsulation;
mod handoff_overhead;
mod mtu_black_hole;
mod mtu_mismatch;
mod napi_budget;
mod offload_broken;
mod offload_missing;
mod outer_flow_cannot_spread;
mod outer_fragmentation;
mod packets_too_small;
mod path_delay;
mod path_loss;
mod prelude;
mod receive;
mod reordering;
#[cfg(test)]
mod scenes;
mod scheduling;
mod shaper;
mod single_thread_saturated;
mod softirq_one_core;
mod tcp_outer_buffer;
mod tcp_over_tcp;
mod tcp_receive_window;
#[cfg(test)]
pub(crate) mod testing;
mod tun_queue_overflow;
mod udp_receive_buffer;
mod udp_send_buffer;
mod vhost_starved;
mod virtual_switch_upcalls;
mod weigh;

/// Specification of a cause.
#[derive(Debug)]
pub struct Spec {
    /// The cause.
    pub cause: Cause,
    /// Whether it is a fault.
    pub severity: Severity,
    /// Explanation in one sentence.
    pub sentence: &'static str,
    /// Step of the path where it is; `None` without a fault.
    pub step: Option<PathStep>,
    /// Causes whose signature this one produces: a reader without a processor makes queues
    /// overflow. If both are present, this one is named and the others are its chain.
    pub effects: &'static [Cause],
    /// Whether an end only infers it from its effects: it may be on the path or at the other end.
    pub(crate) is_inferred: bool,
    /// Whether it loses packets at the end where it is.
    pub(crate) drops_packets: bool,
    /// Counter that shows it, if one of the sampled counters does.
    pub(crate) signature: Option<Signature>,
    /// The rule; `None`: the verdict if no rule finds a fault.
    pub rule: Option<fn(&Evidence) -> Judgement>,
}

impl Spec {
    /// Returns a verdict that is not a fault.
    const fn verdict(cause: Cause, severity: Severity, sentence: &'static str) -> Self {
        Spec {
            cause,
            severity,
            sentence,
            step: None,
            effects: &[],
            is_inferred: false,
            drops_packets: false,
            signature: None,
            rule: None,
        }
    }

    /// Returns a fault that a rule finds.
    const fn fault(
        cause: Cause,
        step: PathStep,
        sentence: &'static str,
        rule: fn(&Evidence) -> Judgement,
    ) -> Self {
        Spec {
            step: Some(step),
            rule: Some(rule),
            ..Self::verdict(cause, Severity::Fault, sentence)
        }
    }

    const fn effects(self, effects: &'static [Cause]) -> Self {
        Spec { effects, ..self }
    }

    const fn inferred(self) -> Self {
        Spec {
            is_inferred: true,
            ..self
        }
    }

    const fn drops_packets(self) -> Self {
        Spec {
            drops_packets: true,
            ..self
        }
    }

    /// Sets the counter that shows the cause.
    const fn counted(
        self,
        source: Source,
        names: &'static [&'static str],
        per: Per,
        normal: f64,
    ) -> Self {
        Spec {
            signature: Some(Signature::new(source, names, per, normal)),
            ..self
        }
    }
}

/// The specification of each cause, in the order of [`Cause::ALL`].
pub static ALL: &[Spec] = &[
    tun_queue_overflow::SPEC,
    frame_per_syscall::SPEC,
    single_thread_saturated::SPEC,
    cpu_contention::SPEC,
    cpu_quota::SPEC,
    cpu_steal::SPEC,
    softirq_one_core::SPEC,
    outer_flow_cannot_spread::SPEC,
    backlog_full::SPEC,
    napi_budget::SPEC,
    udp_receive_buffer::SPEC,
    udp_send_buffer::SPEC,
    tcp_outer_buffer::SPEC,
    tcp_receive_window::SPEC,
    application_limited::SPEC,
    path_loss::SPEC,
    path_delay::SPEC,
    reordering::SPEC,
    tcp_over_tcp::SPEC,
    mtu_black_hole::SPEC,
    outer_fragmentation::SPEC,
    mtu_mismatch::SPEC,
    packets_too_small::SPEC,
    gro_breaks_encapsulation::SPEC,
    offload_missing::SPEC,
    offload_broken::SPEC,
    cipher_bound::SPEC,
    copy_or_checksum_bound::SPEC,
    handoff_overhead::SPEC,
    shaper::SPEC,
    bufferbloat::SPEC,
    conntrack_full::SPEC,
    virtual_switch_upcalls::SPEC,
    vhost_starved::SPEC,
    Spec::verdict(
        Cause::Healthy,
        Severity::Healthy,
        "Nothing is wrong: the tunnel carries the offered traffic.",
    ),
    Spec::verdict(
        Cause::Idle,
        Severity::Notice,
        "The tunnel carries next to no traffic, so its speed cannot be diagnosed: run it under load.",
    ),
    Spec::verdict(
        Cause::Unknown,
        Severity::Warning,
        "The tunnel is slow, and no known cause shows.",
    ),
];

impl Cause {
    /// Its specification.
    pub fn spec(self) -> &'static Spec {
        &ALL[self as usize]
    }

    /// Explanation in one sentence.
    pub fn sentence(self) -> &'static str {
        self.spec().sentence
    }

    /// Whether something is wrong and known: not [`Cause::Healthy`], [`Cause::Idle`] and [`Cause::Unknown`].
    pub fn is_fault(self) -> bool {
        self.spec().severity == Severity::Fault
    }

    /// Whether this cause brings about another.
    pub(crate) fn explains(self, effect: Cause) -> bool {
        self.spec().effects.contains(&effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_its_specification() {
        assert_eq!(ALL.len(), Cause::ALL.len());
        for cause in Cause::ALL {
            let spec = cause.spec();
            assert_eq!(spec.cause, *cause);
            assert!(!spec.sentence.is_empty(), "{cause}");
            let signature = spec.signature.as_ref();
            assert!(signature.is_none_or(|it| it.normal > 0.0), "{cause}");
            let is_fault = cause.is_fault();
            assert_eq!(
                (spec.step.is_some(), spec.rule.is_some()),
                (is_fault, is_fault),
                "{cause}"
            );
        }
    }

    #[test]
    fn no_effect_is_its_own_cause() {
        for cause in Cause::ALL {
            for effect in cause.spec().effects {
                assert!(!effect.explains(*cause), "{cause} and {effect}");
            }
        }
    }
}
