//! A copy without an etcd, which is told anything at all. What is taken has to be what it was when it is read and taken again, and
//! whatever it is, questions of members and operators get an answer or an error.

use std::sync::{Arc, Mutex};

use prost::Message as _;
use seikan_proto::mesh::Digest;

use super::super::Etcd;
use super::super::messages::{Event, KeyValue, RangeResponse, WatchResponse};
use super::keep::{LIVE, STATE};
use super::{Head, Replica, Shared, lock};
use crate::store::{Backing, MemberId, SCHEMA, Store};

/// Tells it rows: `KEY VALUE` a line, what comes before the first empty line at once, and each part after that as one change; a line
/// `-KEY` takes away. Each part has a head that fits, unless it has one. How many parts were taken.
pub fn rows(text: &str) -> usize {
    let (copy, mut count_taken) = (copy(), 0);
    for (turn, part) in text.split("\n\n").take(16).enumerate() {
        let revision = turn as i64 + 2;
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
        let taken = match turn {
            0 => {
                let all = events.into_iter().filter(|event| event.kind == 0);
                let all = all.filter_map(|event| event.kv).collect();
                copy.replace(all, (revision, 1), false)
            }
            _ => copy.hear(watched(events, STATE)),
        };
        if taken.is_ok() {
            count_taken += 1;
            assert_same_again(&copy);
        }
    }
    ask(copy);
    count_taken
}

/// Tells it what an etcd says, byte for byte.
pub fn messages(bytes: &[u8]) {
    let copy = copy();
    if let Ok(range) = RangeResponse::decode(bytes) {
        let _ = copy.replace(range.kvs, (1, 1), false);
    }
    if let Ok(told) = WatchResponse::decode(bytes) {
        let _ = copy.hear(told);
    }
    ask(copy);
}

fn copy() -> Shared {
    let copy = Shared::new(&Etcd {
        endpoints: Vec::new(),
        prefix: "/test".to_owned(),
        ca: None,
        identity: None,
        user: None,
        mesh: None,
        advertise: None,
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
        create_revision: 0,
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

fn watched(events: Vec<Event>, watch_id: i64) -> WatchResponse {
    let (live, state): (Vec<_>, Vec<_>) =
        events.into_iter().partition(|e| is_under(e, "/test/live/"));
    let (watch_id, events) = match state.is_empty() {
        true => (LIVE, live),
        false => (watch_id, state),
    };
    WatchResponse {
        watch_id,
        events,
        ..WatchResponse::default()
    }
}

/// What it has is what another copy has that is told of it.
fn assert_same_again(one: &Shared) {
    let two = copy();
    let rows = one.tables.all(&lock(&one.database)).expect("rows");
    assert!(two.apply(&rows, true).is_ok(), "rows of its own");
    let again = two.tables.all(&lock(&two.database));
    assert_eq!(again.expect("rows"), rows);
}

fn ask(copy: Shared) {
    let replica = Replica {
        shared: Arc::new(copy),
        jobs: Mutex::default(),
        turn: Mutex::new(()),
        caught_up: Mutex::default(),
        questions: None,
        thread: None,
    };
    let store = Store {
        parsed: crate::store::policy::Parsed::default(),
        everybody: crate::store::changes::Last::default(),
        backing: Backing::Etcd(replica),
        _folder: None,
    };
    let _ = store.networks();
    let _ = store.revision();
    let _ = store.tokens();
    let _ = store.relays();
    let _ = store.policy();
    let _ = store.audit(10);
    let _ = store.recognise(&Digest([0; 32]));
    store.coordinators();
    store.calls();
    for member in [0, 1, 7] {
        for since in [0, 1, 5] {
            // Not one that another coordinator may have told of, for which etcd is asked.
            let is_known = store.revision().is_ok_and(|revision| since <= revision);
            let told = is_known.then(|| store.changes(since, MemberId(member)));
            if let Some(Ok(told)) = told {
                serde_json::to_vec(&told).expect("JSON");
            }
        }
        let _ = store.tickets(MemberId(member), 1_800_000_000);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_fuzzing_found_is_taken_or_refused() {
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
            let taken = super::rows(&String::from_utf8_lossy(&input));
            // True rows are not just refused.
            match name.to_str() {
                Some("mesh") => assert_eq!(taken, 1),
                Some("changes") => assert_eq!(taken, 4),
                _ => {}
            }
        }
        for (_, input) in all("etcd_messages") {
            super::messages(&input);
        }
    }
}
