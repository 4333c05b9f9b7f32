use super::*;

const PROGRAM: u32 = 7;
const SENDER: u32 = 8;

fn probes() -> Probes {
    Probes {
        list: Vec::new(),
        kinds: vec![
            Kind::Begin(XMIT),
            Kind::End(XMIT),
            Kind::Begin(READ),
            Kind::End(READ),
            Kind::Dropped,
            Kind::Copied,
            Kind::Begin(3),
            Kind::End(3),
        ],
        names: [
            "tun_net_xmit",
            "tun_chr_read_iter",
            "tun_chr_write_iter",
            "epoll_wait",
        ]
        .map(str::to_owned)
        .to_vec(),
        length: Some(0..4),
    }
}

fn hit(nanoseconds: u64, tid: u32, probe: usize, length: u32) -> Hit {
    Hit {
        nanoseconds,
        tid,
        probe,
        data: length.to_ne_bytes().to_vec(),
    }
}

/// Two packets go in, a third is dropped, one is read, and a fourth goes in.
#[test]
fn drops_have_the_packets_that_wait() {
    let mut hits = Vec::new();
    for (packet, begin) in [0, 100, 200].into_iter().enumerate() {
        hits.push(hit(begin, SENDER, 0, 60 + packet as u32));
        if packet == 2 {
            hits.push(hit(begin + 5, SENDER, 4, 0));
        }
        hits.push(hit(begin + 10, SENDER, 1, 0));
    }
    hits.extend([
        hit(300, PROGRAM, 2, 0),
        hit(310, PROGRAM, 5, 0),
        hit(330, PROGRAM, 3, 0),
        // Another datagram, and a drop by another device.
        hit(340, PROGRAM, 5, 0),
        hit(350, SENDER, 4, 0),
        hit(400, SENDER, 0, 64),
        hit(410, SENDER, 1, 0),
        hit(420, SENDER, 0, 65),
        hit(425, SENDER, 4, 0),
        hit(430, SENDER, 1, 0),
    ]);
    // As the rings of two processors give them.
    hits.reverse();
    let (calls, dropped) = count(hits, &probes());
    let drop = |nanoseconds, bytes| Dropped {
        nanoseconds,
        bytes: Some(bytes),
        waiting: 2,
    };
    assert_eq!(dropped, [drop(205, 62), drop(425, 65)]);
    let of = |count, nanoseconds| Calls { count, nanoseconds };
    assert_eq!(calls, [of(5, 50), of(1, 30), of(0, 0), of(0, 0)]);
}

#[test]
fn a_return_without_its_call_is_left_out() {
    let hits = vec![
        hit(5, PROGRAM, 7, 0),
        hit(10, PROGRAM, 6, 0),
        hit(40, PROGRAM, 7, 0),
    ];
    let (calls, _) = count(hits, &probes());
    assert_eq!(
        calls[3],
        Calls {
            count: 1,
            nanoseconds: 30
        }
    );
}

#[test]
fn the_program_follows_the_driver_longest_first() {
    let names = [
        "tun_net_xmit",
        "tun_chr_read_iter",
        "tun_chr_write_iter",
        "read",
        "poll",
    ];
    let names = names.map(str::to_owned);
    let of = |nanoseconds| Calls {
        count: 2,
        nanoseconds,
    };
    let list = functions(
        "slow",
        3.0,
        &names,
        &[of(1), of(9), of(0), of(2_000_000), of(3_000_000)],
    );
    let order: Vec<&str> = list.rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(
        order,
        [
            "tun_net_xmit",
            "tun_chr_read_iter",
            "tun_chr_write_iter",
            "poll",
            "read"
        ]
    );
    assert_eq!(list.rows[3], ["poll", "program", "2", "3.0"]);
}

#[test]
fn libraries_are_found_by_the_names_of_their_files() {
    let maps = "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcrypto.so.3\n7f02-7f03 rw-p 0 00:00 0\n\
                    7f04-7f05 r-xp 00000000 08:01 13 /usr/lib/libc.so.6\n";
    assert_eq!(mapped(maps, "libc.so"), Some("/usr/lib/libc.so.6".into()));
    assert_eq!(
        mapped(maps, "libcrypto.so"),
        Some("/usr/lib/libcrypto.so.3".into())
    );
    assert_eq!(mapped(maps, "libssl.so"), None);
}
