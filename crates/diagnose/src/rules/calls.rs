//! Calls of kernel functions per packet, as additional figures.

use crate::{Evidence, Fact};

/// Returns the calls of a function per packet, if they were counted. They only support a finding,
/// because other tunnels and programs of the machine add to them. Of several functions, the one
/// with the most calls is used: they are alternatives (IP versions), and an IPv6 socket that sends
/// to IPv4 calls both.
pub(super) fn per_packet(
    evidence: &Evidence,
    name: impl Into<String>,
    functions: &[&str],
    packets: Option<f64>,
    expected: &str,
) -> Option<Fact> {
    let counted = functions.iter().filter_map(|name| evidence.calls(name));
    let calls = counted.max_by(f64::total_cmp)?;
    let packets = packets.filter(|packets| *packets > 0.0)?;
    let source = format!("calls of {}, whole machine", functions.join(" or "));
    Some(Fact::new(name, calls / packets, expected, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    #[test]
    fn a_socket_that_calls_both_versions_is_not_counted_twice() {
        let mut evidence = tunnel();
        count(&mut evidence, Subject::Host, "call.udp_sendmsg", 1000);
        count(&mut evidence, Subject::Host, "call.udpv6_sendmsg", 900);
        let functions = ["udp_sendmsg", "udpv6_sendmsg"];
        let fact = per_packet(&evidence, "sends", &functions, Some(500.0), "1").unwrap();
        assert_eq!(fact.value, 2.0);
        assert_eq!(
            fact.source,
            "calls of udp_sendmsg or udpv6_sendmsg, whole machine"
        );
    }

    #[test]
    fn uncounted_calls_are_no_fact() {
        let mut evidence = tunnel();
        assert_eq!(per_packet(&evidence, "", &["f"], Some(1.0), ""), None);
        count(&mut evidence, Subject::Host, "call.f", 0);
        assert_eq!(per_packet(&evidence, "", &["f"], Some(0.0), ""), None);
        assert!(per_packet(&evidence, "", &["f"], Some(1.0), "").is_some());
    }
}
