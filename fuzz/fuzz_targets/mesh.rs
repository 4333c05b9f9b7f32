//! Any bytes as messages between coordinators and members. Accepted messages survive encoding and
//! decoding, and a member's state stays consistent after any sequence of messages.
use seikan_proto::mesh::{Change, Changes, Endpoints, JoinRequest, Joined, Membership, Refusal};

/// One input.
pub fn run(bytes: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<JoinRequest>(bytes) {
        let text = serde_json::to_vec(&request).expect("JSON");
        let again: JoinRequest = serde_json::from_slice(&text).expect("its own text");
        assert_eq!(
            (again.token, again.credential),
            (request.token, request.credential)
        );
        assert_eq!(
            (again.name, again.public_key),
            (request.name, request.public_key)
        );
    }
    let _ = serde_json::from_slice::<Endpoints>(bytes);
    let _ = serde_json::from_slice::<Joined>(bytes);
    let _ = serde_json::from_slice::<Refusal>(bytes);
    let _ = serde_json::from_slice::<Membership>(bytes);
    // One answer a line.
    let mut membership = Membership::default();
    let mut known = std::collections::BTreeSet::new();
    let mut refused = std::collections::BTreeSet::new();
    for line in bytes.split(|b| *b == b'\n').take(64) {
        let Ok(changes) = serde_json::from_slice::<Changes>(line) else {
            continue;
        };
        let text = serde_json::to_vec(&changes).expect("JSON");
        assert_eq!(
            serde_json::from_slice::<Changes>(&text).expect("its own text"),
            changes
        );
        let different = membership.take(changes);
        for change in different {
            match change {
                Change::Access(access) => assert_eq!(&access, membership.access()),
                Change::Set(member) => {
                    refused.remove(&member.public_key);
                    known.insert(member.public_key);
                }
                Change::Rotated(former, member) => {
                    assert!(known.remove(&former), "an unknown member has changed");
                    refused.remove(&member.public_key);
                    known.insert(member.public_key);
                }
                Change::Removed(key) => assert!(
                    known.remove(&key) | refused.remove(&key),
                    "an unknown member is removed"
                ),
                Change::Refused(key, _) => {
                    known.remove(&key);
                    refused.insert(key);
                }
            }
        }
        assert!(membership.members().keys().eq(known.iter()));
        let text = serde_json::to_vec(&membership).expect("JSON");
        let kept: Membership = serde_json::from_slice(&text).expect("its own text");
        assert_eq!(kept.members(), membership.members());
        assert_eq!(kept.access(), membership.access());
    }
}
