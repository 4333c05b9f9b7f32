//! Fuzz targets: a replica without etcd receives arbitrary input. Accepted rows must be the same
//! when they are read and applied again. For any input, queries of members and operators must
//! return an answer or an error.

use std::sync::{Arc, Mutex};

use prost::Message as _;
use seikan_proto::mesh::Digest;

use super::super::Etcd;
use super::super::messages::{Event, KeyValue, RangeResponse, WatchResponse};
use super::{Head, Replica, Shared};
use crate::lock;
use crate::store::file::SCHEMA;
use crate::store::{Backing, MemberId, Store};

/// Applies rows, one `KEY VALUE` a line, or `-KEY` to delete. The part before the first empty line
/// is loaded; each later part is one change. A part without a head gets a matching one. Returns the
/// number of accepted parts.
pub fn rows(text: &str) -> usize {
    let (copy, mut count_accepted) = (copy(), 0);
    for (index, part) in text.split("\n\n").take(16).enumerate() {
        let revision = index as i64 + 2;
        let mut events: Vec<Event> = part.lines().take(256).map(|l| event(l, revision)).collect();
        let count = |folder: &str| events.iter().filter(|e| is_under(e, folder)).count();
        let (rows, heads) = (count("/test/state/rows/"), count("/test/state/head"));
        if heads == 0 {
            let head = Head {
                schema: SCHEMA,
                id: 7,
                rows,
            };
            let head = serde_json::to_string(&head).expect("JSON");
            events.push(event(&format!("state/head {head}"), revision));
        }
        let accepted = match index {
            0 => {
                let all = events.into_iter().filter(|event| event.kind == 0);
                let all = all.filter_map(|event| event.kv).collect();
                copy.replace(all, (revision, 1), false)
            }
            _ => copy.apply_response(WatchResponse {
                events,
                ..WatchResponse::default()
            }),
        };
        if accepted.is_ok() {
            count_accepted += 1;
            assert_round_trip(&copy);
        }
    }
    query_all(copy);
    count_accepted
}

/// Applies encoded responses of etcd.
pub fn messages(bytes: &[u8]) {
    let copy = copy();
    if let Ok(range) = RangeResponse::decode(bytes) {
        let _ = copy.replace(range.kvs, (1, 1), false);
    }
    if let Ok(response) = WatchResponse::decode(bytes) {
        let _ = copy.apply_response(response);
    }
    query_all(copy);
}

fn copy() -> Shared {
    let copy = Shared::new(&Etcd {
        prefix: "/test".to_owned(),
        ..Etcd::default()
    });
    copy.expect("a copy")
}

fn event(line: &str, mod_revision: i64) -> Event {
    let (kind, line) = match line.strip_prefix('-') {
        Some(line) => (1, line),
        None => (0, line),
    };
    let (key, value) = line.split_once(' ').unwrap_or((line, ""));
    let kv = KeyValue {
        key: format!("/test/{key}").into_bytes(),
        mod_revision,
        value: value.as_bytes().to_vec(),
        lease: 0,
    };
    Event { kind, kv: Some(kv) }
}

fn is_under(event: &Event, folder: &str) -> bool {
    let kv = event.kv.as_ref();
    kv.is_some_and(|kv| kv.key.starts_with(folder.as_bytes()))
}

/// Applies the rows of the replica to another one, and compares the results.
fn assert_round_trip(one: &Shared) {
    let two = copy();
    let rows = lock(&one.copy).rows().expect("rows");
    let mut copy = lock(&two.copy);
    assert!(copy.apply(&rows).is_ok(), "rows of its own");
    assert_eq!(copy.rows().expect("rows"), rows);
}

fn query_all(copy: Shared) {
    let replica = Replica {
        shared: Arc::new(copy),
        jobs: Mutex::default(),
        proposing: Mutex::new(()),
        caught_up: Mutex::default(),
        thread: None,
    };
    let store = Store {
        policies: crate::store::policy::PolicyHistory::default(),
        backing: Backing::Etcd(replica),
    };
    let _ = store.networks();
    let _ = store.revision();
    let _ = store.tokens();
    let _ = store.relays();
    let _ = store.policy();
    let _ = store.audit(10);
    let _ = store.authenticate_locally(&Digest([0; 32]));
    store.coordinators();
    store.calls();
    for member in [0, 1, 7] {
        for since in [0, 1, 5] {
            // Later revisions would query etcd.
            let is_known = store.revision().is_ok_and(|revision| since <= revision);
            let response = is_known.then(|| store.changes(since, MemberId(member)));
            if let Some(Ok(response)) = response {
                serde_json::to_vec(&response).expect("JSON");
            }
        }
        let _ = store.tickets(MemberId(member), 1_800_000_000);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_fuzz_corpus_is_accepted_or_refused() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/");
        let all = |target: &str| {
            let files = std::fs::read_dir(format!("{folder}{target}")).expect("a corpus");
            files.map(|file| {
                let path = file.expect("a file").path();
                let name = path.file_name().expect("a name").to_owned();
                (name, std::fs::read(path).expect("bytes"))
            })
        };
        for (name, input) in all("etcd_rows") {
            let accepted = super::rows(&String::from_utf8_lossy(&input));
            // Valid rows must be accepted.
            match name.to_str() {
                Some("mesh") => assert_eq!(accepted, 1),
                Some("changes") => assert_eq!(accepted, 4),
                _ => {}
            }
        }
        for (_, input) in all("etcd_messages") {
            super::messages(&input);
        }
    }
}
