//! The life of a tunnel with the real program: two hosts in namespaces, a link between them, and
//! failures of hosts and links. Interface names are unique per test, so that all can run at once.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use seikan_sys::netlink::{Event, Family, Group, Netlink};

use crate::common::{
    PATIENCE, TUNNEL_PORT, Tunnel, World, eventually, in_world, key_pair, monitor_of, skip, stderr,
    tries,
};

const DEFAULT_ROUTE: &str = "AllowedIPs = 0.0.0.0/0, ::/0\nPersistentKeepalive = 1";

#[test]
fn a_killed_peer_is_back_when_it_is_started_again() {
    in_world(["", ""], |world| {
        let [mut right, _left] = world.both_up();
        right.child.kill().expect("kill");
        right.child.wait().expect("wait");
        let _again = world.up(&world.right);
        assert!(world.answers_within(PATIENCE));
    });
}

#[test]
fn a_tunnel_that_is_started_again_renews_its_sessions_without_traffic() {
    in_world(["", ""], |world| {
        let [right, _left] = world.both_up();
        let stopped = world.run(&world.right, &["down", &world.right.interface]);
        assert!(stopped.status.success(), "{}", stderr(&stopped));
        assert_eq!(right.ended().0, Some(0));
        let _again = world.up(&world.right);
        let has_session = || {
            let status = world.status(&world.right);
            !status["peers"][0]["latest_handshake"].is_null()
        };
        eventually("a session without traffic", has_session);
    });
}

#[test]
fn a_reloaded_file_changes_its_peers_and_no_other_session() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        let reload = || {
            let output = world.run(&world.left, &["reload", world.left.config()]);
            assert!(output.status.success(), "{}", stderr(&output));
            String::from_utf8(output.stdout).expect("UTF-8")
        };
        let first = world.status(&world.left)["peers"][0]["public_key"].clone();
        let handshakes = || {
            let status = world.status(&world.left);
            let peers = status["peers"].as_array().expect("peers").clone();
            let peer = peers.iter().find(|peer| peer["public_key"] == first);
            let handshakes = &peer.expect("the first peer")["traffic"]["handshakes"];
            (peers.len(), handshakes.clone())
        };
        let name = &world.left.interface;
        let (_, session) = handshakes();
        assert_eq!(reload(), format!("{name}: nothing to change\n"));

        let before = fs::read_to_string(&world.left.config).expect("the file");
        let (_, key) = key_pair();
        let peer = format!("[Peer]\nPublicKey = {key}\nAllowedIPs = 10.77.0.0/24\n");
        fs::write(&world.left.config, before.clone() + &peer).expect("written");
        assert_eq!(reload(), format!("{name}: 1 peer added, 1 route added\n"));
        assert_eq!(handshakes(), (2, session.clone()));
        let routes = world.left.netlink.all_routes(Family::V4).expect("routes");
        let added = "10.77.0.0/24".parse().expect("a prefix");
        assert!(routes.iter().any(|route| route.destination == added));

        fs::write(&world.left.config, before).expect("written");
        assert_eq!(reload(), format!("{name}: 1 peer removed\n"));
        assert_eq!(handshakes(), (1, session));
        assert!(world.answers_within(PATIENCE));
    });
}

#[test]
fn a_hangup_applies_a_changed_file() {
    in_world(["", ""], |world| {
        let _right = world.up(&world.right);
        // Without the terminal that this test may have.
        let mut command = Command::new("setsid");
        command.args([env!("CARGO_BIN_EXE_seikan"), "up", world.left.config()]);
        world.settle(&mut command);
        let left = world.start(&world.left, &mut command);
        assert!(world.answers_within(PATIENCE));
        let before = fs::read_to_string(&world.left.config).expect("the file");
        let (_, key) = key_pair();
        let peer = format!("[Peer]\nPublicKey = {key}\nAllowedIPs = 10.77.0.0/24\n");
        fs::write(&world.left.config, before + &peer).expect("written");
        left.signal("HUP");
        let peers = || world.status(&world.left)["peers"].as_array().map(Vec::len);
        eventually("the added peer", || peers() == Some(2));
        assert!(world.answers_within(PATIENCE));
    });
}

/// Returns how often the threads of a process have slept, from procfs.
fn sleeps(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("procfs");
    let of_task = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).expect("procfs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.expect("a count")
            .trim()
            .parse::<u64>()
            .expect("a number")
    };
    tasks.flatten().map(of_task).sum()
}

#[test]
fn an_idle_tunnel_wakes_at_most_once_a_second() {
    in_world(["", ""], |world| {
        let [_right, left] = world.both_up();
        let monitor = monitor_of(&left).parse().expect("a process");
        let processes = [left.child.id(), monitor];
        let count = || processes.map(sleeps).into_iter().sum::<u64>();
        // At first, packets of the kernel and their answers wake it: router solicitations, a
        // keepalive after 10 s.
        let seconds = 5;
        let mut windows = (0..12).map(|_| {
            let before = count();
            std::thread::sleep(Duration::from_secs(seconds));
            count() - before
        });
        assert!(windows.any(|woken| woken <= seconds));
    });
}

#[test]
fn a_deleted_interface_ends_the_tunnel_with_a_word_and_it_can_be_started_again() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let [_right, left] = world.both_up();
        let index = world
            .left
            .netlink
            .link(&world.left.interface)
            .expect("link")
            .index;
        world.left.netlink.delete_link(index).expect("delete");
        let (code, errors) = left.ended();
        assert_eq!(code, Some(1));
        assert!(
            errors.contains("was deleted, so the tunnel ended"),
            "{errors}"
        );
        assert_eq!(world.left.traces(), Vec::<String>::new());
        let _again = world.up(&world.left);
        assert!(world.answers_within(PATIENCE));
    });
}

/// Runs `ip` on the left.
fn ip(world: &World, words: &[&str]) {
    let mut command = Command::new("ip");
    command.args(words);
    let ip = world.left.namespace.spawn_command(&mut command);
    let ip = ip.expect("ip").wait().expect("an end");
    assert!(ip.success(), "ip {words:?}");
}

/// Maximum time from the removal of a setting until the kernel has it again.
const RESTORED_WITHIN: Duration = Duration::from_secs(2);

/// The addresses of the left's tunnel, the routes into it, and all rules, as the kernel lists them.
fn settings(world: &World) -> Vec<String> {
    let netlink = &world.left.netlink;
    let index = netlink.link(&world.left.interface).expect("link").index;
    let addresses = netlink.addresses(index).expect("addresses");
    let mut settings: Vec<String> = addresses.iter().map(|a| format!("{a:?}")).collect();
    for family in [Family::V4, Family::V6] {
        let routes = netlink.all_routes(family).expect("routes");
        let into = routes.iter().filter(|route| route.device == Some(index));
        settings.extend(into.map(|route| format!("{route:?}")));
        let rules = netlink.rules(family).expect("rules");
        settings.extend(rules.iter().map(|rule| format!("{rule:?}")));
    }
    settings.sort_unstable();
    settings
}

/// Removes settings by `ip`, and returns the time from then until the kernel has all of them again.
fn until_restored(world: &World, removal: &[&str], before: &[String]) -> Duration {
    let groups = [Group::Address, Group::Route, Group::Rule];
    let subscribe = || Netlink::subscribe(&groups);
    let changes = world.left.namespace.run(subscribe).expect("namespace");
    let mut changes = changes.expect("a subscription");
    let removed_at = Instant::now();
    ip(world, removal);
    let mut was_removed = false;
    eventually("not restored", || {
        while let Some(event) = changes.next_event().expect("an event") {
            was_removed |= matches!(
                event,
                Event::AddressRemoved(_) | Event::RouteRemoved(_) | Event::RuleRemoved
            );
        }
        was_removed && settings(world) == before
    });
    removed_at.elapsed()
}

#[test]
fn what_another_program_removes_is_restored_until_it_is_fought_for() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let _tunnels = world.both_up();
        let name = world.left.interface.as_str();
        let before = settings(world);
        let restored = |world: &World| world.status(&world.left)["interface"]["restored"].clone();
        assert_eq!(restored(world)["count"], 0);
        let removals: [&[&str]; 5] = [
            &["address", "flush", "dev", name],
            &["-4", "route", "flush", "table", "51820"],
            &["-6", "route", "flush", "table", "51820"],
            &["-4", "rule", "delete", "table", "51820"],
            &["-6", "rule", "delete", "table", "51820"],
        ];
        // Other programs on the machine can only delay it. Ten restorations in a minute are a fight.
        let mut spare = tries() - 1;
        for removal in removals {
            loop {
                let took = until_restored(world, removal, &before);
                println!("{removal:?}: {} ms", took.as_millis());
                if took <= RESTORED_WITHIN {
                    break;
                }
                assert!(spare > 0, "{removal:?}: {} ms", took.as_millis());
                spare -= 1;
            }
        }
        assert!(world.answers_within(PATIENCE));
        let count = restored(world)["count"].as_u64().expect("a number");
        assert!(count >= removals.len() as u64, "{count}");
        // The interface going down is no removal; its routes come back with it.
        ip(world, &["link", "set", name, "down"]);
        ip(world, &["link", "set", name, "up"]);
        eventually("not restored", || settings(world) == before);
        eventually("not given up", || {
            let rule = ["-4", "rule", "delete", "table", "51820"];
            let mut command = Command::new("ip");
            command.args(rule).stderr(Stdio::null());
            let ip = world.left.namespace.spawn_command(&mut command);
            let _ = ip.expect("ip").wait();
            restored(world)["contested"] == true
        });
    });
}

#[test]
fn a_new_address_under_the_tunnel_is_found_out_in_seconds() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        world.left.remove_address("192.0.2.1/24");
        world.left.add_address("192.0.2.77/24");
        assert!(world.answers_within(PATIENCE));
    });
}

#[test]
fn thirty_seconds_without_a_link_are_survived() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        let link = world.right.netlink.link("under").expect("link").index;
        world.right.netlink.set_down(link).expect("down");
        assert!(!world.answers_within(Duration::from_secs(30)));
        world.right.netlink.set_up(link).expect("up");
        assert!(world.answers_within(PATIENCE));
    });
}

#[test]
fn a_peer_is_found_again_after_its_name_changes_address() {
    // No keepalive on either side: the left is not notified of the right's new address.
    let peer = "AllowedIPs = 10.80.0.2/32\nEndpoint = right.example:51820";
    in_world(["", peer], |world| {
        let hosts = world.folder.path().join("hosts");
        fs::write(&hosts, "192.0.2.2 right.example\n").expect("write");
        let _right = world.up(&world.right);
        let script = "mount --bind $folder/hosts /etc/hosts && exec $seikan up \"$0\"";
        let mut command = world.shell(script);
        let _left = world.start(&world.left, command.arg(world.left.config()));
        assert!(world.answers_within(PATIENCE), "no echo");
        world.right.remove_address("192.0.2.2/24");
        world.right.add_address("192.0.2.3/24");
        fs::write(&hosts, "192.0.2.3 right.example\n").expect("write");
        // 15 s until silence is noticed, two attempts 5 s apart, one check after 5 s more.
        assert!(world.answers_within(PATIENCE));
    });
}

#[test]
fn a_name_that_cannot_be_resolved_yet_is_tried_again() {
    let peer = "AllowedIPs = 10.80.0.2/32\nEndpoint = right.example:51820\nPersistentKeepalive = 1";
    in_world(["", peer], |world| {
        let hosts = world.folder.path().join("hosts");
        fs::write(&hosts, "127.0.0.1 localhost\n").expect("write");
        let _right = world.up(&world.right);
        let script = "mount --bind $folder/hosts /etc/hosts && exec $seikan up \"$0\"";
        let mut command = world.shell(script);
        let _left = world.start(&world.left, command.arg(world.left.config()));
        eventually("no tunnel", || world.left.has_tunnel());
        fs::write(&hosts, "192.0.2.2 right.example\n").expect("write");
        assert!(world.answers_within(PATIENCE));
    });
}

/// Starts the left with files of its own in place of /etc/hosts, without a name in it, and /etc/resolv.conf.
fn up_without_names(world: &World, resolv_conf: &str) -> Tunnel {
    let file = |name: &str| world.folder.path().join(name);
    fs::write(file("hosts"), "127.0.0.1 localhost\n").expect("write");
    let resolv_conf = format!("{resolv_conf}options timeout:1 attempts:1\n");
    fs::write(file("resolv.conf"), resolv_conf).expect("write");
    fs::create_dir(file("bin")).expect("folder");
    let resolvconf = file("bin").join("resolvconf");
    fs::write(&resolvconf, "#!/bin/sh\ncat > /dev/null\n").expect("write");
    fs::set_permissions(&resolvconf, fs::Permissions::from_mode(0o755)).expect("mode");
    let script = "mount --bind $folder/hosts /etc/hosts && \
                  mount --bind $folder/resolv.conf /etc/resolv.conf && \
                  export PATH=$folder/bin:$PATH && exec $seikan up \"$0\"";
    let mut command = world.shell(script);
    world.start(&world.left, command.arg(world.left.config()))
}

/// Gives the right its name, and waits until the left uses it.
fn name_the_right(world: &World) {
    let hosts = world.folder.path().join("hosts");
    fs::write(hosts, "192.0.2.2 right.example\n").expect("write");
    assert!(world.answers_within(PATIENCE), "no echo");
}

#[test]
fn half_of_the_internet_does_not_swallow_an_endpoint_that_is_resolved_later() {
    let halves = "AllowedIPs = 0.0.0.0/1, 128.0.0.0/1\nEndpoint = right.example:51820\nPersistentKeepalive = 1";
    in_world(["", halves], |world| {
        world.left.know_the_right_by_default_only();
        // The name server is on a network of this host.
        world.left.add_address("198.51.100.1/24");
        let _right = world.up(&world.right);
        let _left = up_without_names(world, "nameserver 198.51.100.53\n");
        eventually("no tunnel", || world.left.has_tunnel());
        name_the_right(world);
    });
}

#[test]
fn names_that_are_looked_up_through_the_tunnel_are_resolved_before_it_is_set_up() {
    let all = "AllowedIPs = 0.0.0.0/0\nEndpoint = right.example:51820\nPersistentKeepalive = 1";
    in_world(["DNS = 10.80.0.2", all], |world| {
        let _right = world.up(&world.right);
        let mut left = up_without_names(world, "nameserver 198.51.100.53\n");
        let errors = left.child.stderr.take().expect("piped");
        let mut line = String::new();
        let mut errors = BufReader::new(errors);
        errors.read_line(&mut line).expect("read");
        assert!(
            line.contains("cannot resolve the endpoint `right.example`"),
            "{line}"
        );
        assert_eq!(world.left.traces(), Vec::<String>::new());
        name_the_right(world);
    });
}

#[test]
fn a_signal_ends_the_wait_for_a_name() {
    let all = "AllowedIPs = 0.0.0.0/0\nEndpoint = right.example:51820";
    in_world(["DNS = 10.80.0.2", all], |world| {
        let mut left = up_without_names(world, "nameserver 198.51.100.53\n");
        let errors = left.child.stderr.as_mut().expect("piped");
        errors.read_exact(&mut [0; 8]).expect("a warning");
        left.signal("TERM");
        assert_eq!(left.ended().0, Some(0));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn a_second_instance_is_refused_and_the_first_continues() {
    in_world(["", ""], |world| {
        let [_right, left] = world.both_up();
        let second = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(second.status.code(), Some(1));
        let errors = stderr(&second);
        assert!(errors.contains(&left.child.id().to_string()), "{errors}");
        assert!(world.answers_within(PATIENCE));
    });
}

#[test]
fn a_default_route_does_not_swallow_the_tunnel_and_is_taken_back() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let [_right, left] = world.both_up();
        let somewhere: IpAddr = [198, 51, 100, 1].into();
        let route = world
            .left
            .netlink
            .route_get(somewhere, None)
            .expect("route");
        let tunnel = world
            .left
            .netlink
            .link(&world.left.interface)
            .expect("link");
        assert_eq!(route.device, tunnel.index);
        left.signal("TERM");
        let (code, errors) = left.ended();
        assert_eq!((code, errors.as_str()), (Some(0), ""));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn the_last_of_several_tunnels_restores_the_check_of_marks() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let first = world.up(&world.left);
        let name = format!("{}2", world.left.interface);
        let config = world.folder.path().join(format!("{name}.conf"));
        let text = fs::read_to_string(&world.left.config).expect("read");
        let text = text.replace("10.80.0.1/24", "10.81.0.1/24");
        let text = text.replace(&format!("ListenPort = {TUNNEL_PORT}"), "");
        fs::write(&config, text).expect("write");
        let words = ["up", config.to_str().expect("UTF-8")];
        let mut second = world.start(&world.left, &mut world.seikan(&words));
        let mut line = String::new();
        second.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("is up"), "{line}");
        for tunnel in [first, second] {
            tunnel.signal("TERM");
            assert_eq!(tunnel.ended().0, Some(0));
        }
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn half_of_the_internet_does_not_swallow_the_endpoint() {
    let halves = "AllowedIPs = 0.0.0.0/1, 128.0.0.0/1\nPersistentKeepalive = 1";
    in_world(["", halves], |world| {
        world.left.know_the_right_by_default_only();
        let _tunnels = world.both_up();
    });
}

#[test]
fn any_name_of_an_interface_can_have_a_firewall() {
    in_world(["", DEFAULT_ROUTE], |world| {
        if Command::new("nft").arg("--version").output().is_err() {
            return skip("no `nft`: install nftables");
        }
        let name = format!("{}=+", world.left.interface);
        let config = world.folder.path().join(format!("{name}.conf"));
        fs::copy(&world.left.config, &config).expect("copied");
        let words = ["up", config.to_str().expect("UTF-8")];
        let mut tunnel = world.start(&world.left, &mut world.seikan(&words));
        let mut line = String::new();
        tunnel.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("is up"), "{line}");
        tunnel.signal("TERM");
        assert_eq!(tunnel.ended(), (Some(0), String::new()));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn packets_of_peers_pass_strict_reverse_path_filtering() {
    in_world(["", DEFAULT_ROUTE], |world| {
        if Command::new("nft").arg("--version").output().is_err() {
            return skip("no `nft`: install nftables");
        }
        world.left.know_the_right_by_default_only();
        let strict = || fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1");
        let set = world.left.namespace.run(strict).expect("namespace");
        set.expect("sysctl");
        let _tunnels = world.both_up();
    });
}

#[test]
fn a_killed_tunnel_leaves_nothing_behind_and_its_hooks_are_made_good() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let mark = world.folder.path().join("mark");
        let path = mark.display();
        world
            .left
            .add_to_interface(&format!("PostUp = touch {path}\nPostDown = rm {path}"));
        let [_right, left] = world.both_up();
        assert!(mark.exists());
        left.signal("KILL");
        eventually("traces", || {
            world.left.traces().is_empty() && !mark.exists()
        });
    });
}

#[test]
fn down_reverts_a_tunnel_that_was_killed_with_its_monitor() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let [_right, mut left] = world.both_up();
        let kill = format!("kill -KILL {} {}", monitor_of(&left), left.child.id());
        let killed = Command::new("sh").args(["-c", &kill]).status();
        assert!(killed.expect("sh").success());
        left.wait(Duration::from_secs(10));
        let left_behind = world.left.traces();
        assert!(
            left_behind.iter().any(|t| t.contains("rule")),
            "{left_behind:?}"
        );
        let down = || world.run(&world.left, &["down", &world.left.interface]);
        let first = down();
        let said = stderr(&first);
        assert_eq!(first.status.code(), Some(0), "{said}");
        assert!(
            said.contains("was killed; its changes were undone"),
            "{said}"
        );
        assert_eq!(world.left.traces(), Vec::<String>::new());
        let second = down();
        assert_eq!(second.status.code(), Some(1));
        assert!(stderr(&second).contains("is not running"));
        let _again = world.up(&world.left);
    });
}

#[test]
fn a_tunnel_without_its_monitor_ends_and_names_the_clean_up() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let [_right, left] = world.both_up();
        let kill = format!("kill -KILL {}", monitor_of(&left));
        let killed = Command::new("sh").args(["-c", &kill]).status();
        assert!(killed.expect("sh").success());
        let (code, errors) = left.ended();
        assert_eq!(code, Some(1));
        assert!(errors.contains("run `seikan down`"), "{errors}");
        let down = world.run(&world.left, &["down", &world.left.interface]);
        assert_eq!(down.status.code(), Some(0), "{}", stderr(&down));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn a_failing_hook_is_named_and_nothing_stays() {
    in_world(["PostUp = exit 7", DEFAULT_ROUTE], |world| {
        let output = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(
            errors.contains("the PostUp hook `exit 7` failed (exit status: 7)"),
            "{errors}"
        );
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn hooks_run_in_order_and_with_the_interfaces_name() {
    in_world(["", ""], |world| {
        let log = world.folder.path().join("log");
        let hooks = ["PreUp", "PostUp", "PreDown", "PostDown"].map(|moment| {
            format!("{moment} = echo {moment} %i $(ls /sys/class/net >/dev/null; grep -c %i /proc/net/dev) >> {}", log.display())
        });
        world.left.add_to_interface(&hooks.join("\n"));
        let left = world.up(&world.left);
        left.signal("INT");
        assert_eq!(left.ended().0, Some(0));
        let name = &world.left.interface;
        let expected =
            format!("PreUp {name} 0\nPostUp {name} 1\nPreDown {name} 1\nPostDown {name} 0\n");
        assert_eq!(fs::read_to_string(&log).expect("log"), expected);
    });
}

#[test]
fn the_resolver_gets_the_name_servers_and_their_removal() {
    in_world(["DNS = 10.80.0.2, corp.example", ""], |world| {
        let (programs, record) = (
            world.folder.path().join("bin"),
            world.folder.path().join("dns"),
        );
        fs::create_dir(&programs).expect("folder");
        let resolvconf = programs.join("resolvconf");
        let script = format!(
            "#!/bin/sh\n{{ echo \"$1 ${{2##*.}}\"; cat; }} >> {}\n",
            record.display()
        );
        fs::write(&resolvconf, script).expect("write");
        fs::set_permissions(&resolvconf, fs::Permissions::from_mode(0o755)).expect("mode");
        let path = std::env::var("PATH").expect("PATH");
        let mut command = world.seikan(&["up", world.left.config()]);
        command.env("PATH", format!("{}:{path}", programs.display()));
        let mut left = world.start(&world.left, &mut command);
        let mut line = String::new();
        left.stdout.read_line(&mut line).expect("read");
        let name = &world.left.interface;
        let expected = format!("-a {name}\nnameserver 10.80.0.2\nsearch corp.example\n");
        assert_eq!(
            fs::read_to_string(&record).expect("record"),
            expected,
            "{line}"
        );
        left.signal("TERM");
        assert_eq!(left.ended(), (Some(0), String::new()));
        let expected = format!("{expected}-d {name}\n");
        assert_eq!(fs::read_to_string(&record).expect("record"), expected);
    });
}

#[test]
fn a_port_in_use_is_reported_with_its_process_and_nothing_stays() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let bind = || UdpSocket::bind(("0.0.0.0", TUNNEL_PORT));
        let _bound = world
            .left
            .namespace
            .run(bind)
            .expect("namespace")
            .expect("bind");
        let output = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        let holder = format!("(process {})", std::process::id());
        assert!(
            errors.contains("port 51820 is in use") && errors.contains(&holder),
            "{errors}"
        );
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn an_interface_of_somebody_else_is_left_alone() {
    in_world(["", ""], |world| {
        let name = &world.left.interface;
        world.left.netlink.create_bridge(name).expect("bridge");
        let output = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(
            errors.contains("exists already: it is a bridge device"),
            "{errors}"
        );
        assert_eq!(world.left.netlink.link(name).expect("link").kind, "bridge");
    });
}

#[test]
fn in_the_background_it_returns_when_it_is_up() {
    in_world(["", ""], |world| {
        let _right = world.up(&world.right);
        let output = world.run(&world.left, &["up", "-d", world.left.config()]);
        let errors = stderr(&output);
        assert_eq!((output.status.code(), errors.as_str()), (Some(0), ""));
        assert!(world.answers_within(PATIENCE), "no echo");
        // The name of the process, for `ps` and `pidof`.
        let command = format!("seikan\0up\0--detached\0{}\0", world.left.config());
        let processes = fs::read_dir("/proc").expect("processes").flatten();
        // Other processes come and go meanwhile.
        let read = |process: &fs::DirEntry, file| fs::read(process.path().join(file)).ok();
        let ours = |process: &fs::DirEntry| {
            read(process, "cmdline").is_some_and(|words| words == command.as_bytes())
        };
        let names: Vec<_> = processes
            .filter(ours)
            .map(|process| read(&process, "comm"))
            .collect();
        assert!(!names.is_empty(), "{command:?}");
        let is_seikan = |name: &Option<Vec<u8>>| name.as_deref() == Some(b"seikan\n");
        assert!(names.iter().all(is_seikan), "{names:?}");
        let down = world.run(&world.left, &["down", &world.left.interface]);
        assert!(down.status.success(), "{}", stderr(&down));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn the_log_of_a_background_tunnel_has_its_sessions_and_no_secrets() {
    in_world(["", ""], |world| {
        let _right = world.up(&world.right);
        let words = ["up", "-d", "--log", "trace", world.left.config()];
        let output = world.run(&world.left, &words);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(world.answers_within(PATIENCE), "no echo");
        let status = world.status(&world.left);
        let path = status["interface"]["log"].as_str().expect("a log file");
        let mode = fs::metadata(path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let log = fs::read_to_string(path).expect("a log");
        assert!(
            log.contains("INFO tunnel: session established peer="),
            "{log}"
        );
        let config = fs::read_to_string(world.left.config()).expect("a configuration");
        for name in ["PrivateKey", "PresharedKey"] {
            let lines = config.lines().filter_map(|line| line.strip_prefix(name));
            let mut secrets = lines.map(|rest| rest.trim_start_matches([' ', '=']));
            assert!(name != "PrivateKey" || secrets.clone().next().is_some());
            assert!(secrets.all(|secret| !log.contains(secret)), "{log}");
        }
        let down = world.run(&world.left, &["down", &world.left.interface]);
        assert!(down.status.success(), "{}", stderr(&down));
        assert!(!Path::new(path).exists());
    });
}

#[test]
fn the_log_has_a_format_for_programs_and_one_for_the_journal() {
    in_world(["", ""], |world| {
        let _right = world.up(&world.right);
        let log = world.folder.path().join("left.log");
        let run = |prepare: &str, options: &str| {
            let script = format!(
                "exec 2>{log}; unset SEIKAN_LOG; {prepare}; exec $seikan up {options} {config}",
                log = log.display(),
                config = world.left.config()
            );
            let mut tunnel = world.start(&world.left, &mut world.shell(&script));
            let mut line = String::new();
            tunnel.stdout.read_line(&mut line).expect("read");
            assert!(line.contains("is up"), "{line}");
            assert!(world.answers_within(PATIENCE), "no echo");
            tunnel.signal("TERM");
            tunnel.wait(PATIENCE);
            fs::read_to_string(&log).expect("a log")
        };
        let json = run(":", "--log-format json");
        let mut events = json
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        let established = |event: &serde_json::Value| {
            event["fields"]["message"] == "session established" && event["target"] == "tunnel"
        };
        assert!(events.any(|event| established(&event)), "{json}");
        let journal = "export JOURNAL_STREAM=$(stat -L -c %d:%i /dev/stderr)";
        let text = run(journal, "--log info");
        assert!(text.contains("<6>tunnel: session established"), "{text}");
        assert_eq!(run(":", "--log off"), "");
    });
}

#[test]
fn in_the_background_a_failure_comes_back() {
    in_world(["PreUp = exit 9", ""], |world| {
        let output = world.run(&world.left, &["up", "-d", world.left.config()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(errors.contains("PreUp hook `exit 9`"), "{errors}");
    });
}

#[test]
fn settings_of_wg_are_saved() {
    in_world(["SaveConfig = true", ""], |world| {
        let left = world.up(&world.left);
        let (_, new) = key_pair();
        let mut set = Command::new("wg");
        set.args([
            "set",
            &world.left.interface,
            "peer",
            &new,
            "allowed-ips",
            "10.80.9.0/24",
        ]);
        match world.left.namespace.spawn_command(&mut set) {
            Ok(mut child) => assert!(child.wait().expect("wg").success()),
            Err(_) => return skip("no `wg`: install wireguard-tools"),
        }
        left.signal("TERM");
        assert_eq!(left.ended(), (Some(0), String::new()));
        let saved = fs::read_to_string(&world.left.config).expect("read");
        assert!(
            saved.contains(&new) && saved.contains("10.80.9.0/24"),
            "{saved}"
        );
    });
}

#[test]
fn a_failed_start_saves_nothing() {
    in_world(["SaveConfig = true\nPostUp = exit 7", ""], |world| {
        world.left.add_to_interface("# by hand");
        let before = fs::read_to_string(&world.left.config).expect("read");
        let output = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert_eq!(
            fs::read_to_string(&world.left.config).expect("read"),
            before
        );
    });
}

#[test]
fn a_mark_that_the_tunnel_chose_is_not_saved() {
    in_world(["SaveConfig = true", DEFAULT_ROUTE], |world| {
        let left = world.up(&world.left);
        left.signal("TERM");
        assert_eq!(left.ended().0, Some(0));
        let saved = fs::read_to_string(&world.left.config).expect("read");
        assert!(
            saved.contains("0.0.0.0/0") && !saved.contains("FwMark"),
            "{saved}"
        );
    });
}

#[test]
fn on_a_full_disk_the_old_configuration_stays() {
    in_world(["SaveConfig = true", ""], |world| {
        let script = "mkdir $folder/small && mount -t tmpfs -o size=16k none $folder/small && \
             cp \"$0\" $folder/small && cd $folder/small && \
             { cat /dev/zero > fill 2>/dev/null; true; } && \
             $seikan up ./\"${0##*/}\"; echo rc $?; cmp \"$0\" ./\"${0##*/}\" && echo same; ls";
        let mut command = world.shell(script);
        let mut shell = world.start(&world.left, command.arg(world.left.config()));
        let mut line = String::new();
        shell.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("is up"), "{line}");
        let down = world.run(&world.left, &["down", &world.left.interface]);
        assert!(down.status.success(), "{}", stderr(&down));
        let mut rest = String::new();
        shell.stdout.read_to_string(&mut rest).expect("read");
        assert!(rest.contains("same"), "{rest}");
        assert!(!rest.contains(".new"), "{rest}");
        let (_, errors) = shell.ended();
        assert!(
            errors.contains("No space left on device") && errors.contains("the file is unchanged"),
            "{errors}"
        );
    });
}

#[test]
fn a_missing_tun_device_is_reported_with_the_remedy() {
    in_world(["", ""], |world| {
        let script =
            "mkdir $folder/none && mount --bind $folder/none /dev/net && exec $seikan up \"$0\"";
        let mut command = world.shell(script);
        let left = world.start(&world.left, command.arg(world.left.config()));
        let (code, errors) = left.ended();
        assert_eq!(code, Some(1));
        for part in ["cannot open /dev/net/tun: No such file", "modprobe tun"] {
            assert_eq!(errors.matches(part).count(), 1, "`{part}`: {errors}");
        }
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}
