//! Errors of missing rights: names the command that has them.

use std::env;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::unistd::{Uid, User};
use seikan_sys::privilege;

use crate::logging;
use crate::service::shown_command;
use crate::verbs::{coordinator, relay};

/// Words of such errors: numbers of EPERM and EACCES as the standard library and nix print them, and
/// the phrases of the crates that name the remedy instead of the number. Other programs, for example
/// ssh and etcd, print other words.
const SIGNS: [&str; 8] = [
    "(os error 1)",
    "(os error 13)",
    "EPERM",
    "EACCES",
    "permission denied; run as",
    "not permitted to",
    ": not permitted; run as",
    "this process lacks",
];

/// Begin of the errors of another host, whose user is not this one.
const OF_FAR_END: &str = "the far end failed";
/// Begins of the names of variables that change what a command does. sudo(8) removes them.
const VARIABLES: [&str; 4] = ["SEIKAN_", "HTTPS_PROXY", "https_proxy", "NO_PROXY"];

/// Whether root started this process. A service that has become another user is not told to use sudo.
static IS_ROOT: OnceLock<bool> = OnceLock::new();

/// Remembers the user at the start of the program.
pub fn remember_user() {
    let _ = IS_ROOT.set(Uid::effective().is_root());
}

/// Prints how to go on after an error, once, if the error is a lack of rights and the user is not
/// root. `can_do_without`: whether a tunnel without root could avoid the error.
pub fn advise(error: &str, can_do_without: bool) {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    // Nobody would run the command of a service, or the one that `up -d` starts, by hand.
    let words: Vec<String> = env::args_os()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if *IS_ROOT.get_or_init(|| Uid::effective().is_root())
        || logging::is_journal()
        || words.iter().any(|word| word == "--detached")
    {
        return;
    }
    let variables = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let variables: Vec<String> = variables
        .filter(|name| VARIABLES.iter().any(|begin| name.starts_with(begin)))
        .collect();
    if let Some(advice) = advice(error, &words, &variables, can_do_without)
        && !IS_DONE.swap(true, Ordering::Relaxed)
    {
        let advice = seikan_ui::screen::printable(&advice);
        let _ = writeln!(io::stderr(), "help: {advice}");
    }
}

/// Returns the advice for an error of a command; `None` if the error is another one.
fn advice(
    error: &str,
    words: &[String],
    variables: &[String],
    can_do_without: bool,
) -> Option<String> {
    if error.contains(OF_FAR_END) || !SIGNS.iter().any(|sign| error.contains(sign)) {
        return None;
    }
    let command = shown_command(words.iter().cloned());
    let mut sudo = "sudo".to_owned();
    if !variables.is_empty() {
        sudo.push_str(&format!(" --preserve-env={}", variables.join(",")));
    }
    if let Some(user) = service_user(words) {
        return Some(format!(
            "needs user {user}: run `{sudo} -u {user} {command}`"
        ));
    }
    let mut advice = format!("needs root: run `{sudo} {command}`");
    let is_up = words.get(1).is_some_and(|verb| verb == "up");
    let names_it = |text: &str| text.contains("--userspace");
    if is_up && can_do_without && !names_it(error) && !names_it(&command) {
        advice.push_str(&format!(", or `{command} --userspace` without root"));
    }
    Some(advice)
}

/// Returns the user of the service in whose directory a command works, if it has one of its own.
/// Root is refused there.
fn service_user(words: &[String]) -> Option<String> {
    let usual = match words.get(1)?.as_str() {
        "coordinator" => coordinator::DIRECTORY,
        "relay" => relay::DIRECTORY,
        _ => return None,
    };
    let mut given = words.iter().enumerate();
    let directory = given.find_map(|(at, word)| match word.strip_prefix("--dir")? {
        "" => words.get(at + 1).map(String::as_str),
        value => value.strip_prefix('='),
    });
    let owner = Path::new(directory.unwrap_or(usual)).metadata().ok()?.uid();
    let user = User::from_uid(Uid::from_raw(owner)).ok()??;
    let is_roots = user.uid.is_root() || user.name == privilege::USER;
    (!is_roots && user.uid != Uid::effective()).then_some(user.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(error: &str, words: &str, can_do_without: bool) -> Option<String> {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        advice(error, &words, &[], can_do_without)
    }

    #[test]
    fn a_lack_of_rights_names_the_command_with_sudo() {
        for errno in [libc_error(1), libc_error(13)] {
            let advice = of(&format!("cannot open it: {errno}"), "seikan down wg0", true);
            let expected = "needs root: run `sudo seikan down wg0`";
            assert_eq!(advice.as_deref(), Some(expected), "{errno}");
        }
        let errno = nix::errno::Errno::EPERM;
        assert!(of(&format!("cannot open it: {errno}"), "seikan status", true).is_some());
        for other in [libc_error(2), libc_error(111)] {
            assert_eq!(of(&format!("failed: {other}"), "seikan up wg0", true), None);
        }
        // Of ssh(1): root here would not help.
        let ssh = "root@hub: Permission denied (publickey).";
        assert_eq!(of(ssh, "seikan bench hub", true), None);
        let far = "the far end failed: not permitted to open a packet socket: run as root";
        assert_eq!(of(far, "seikan bench hub", true), None);
        let etcd = "etcd refuses: permission denied";
        assert_eq!(of(etcd, "seikan coordinator token", true), None);
    }

    #[test]
    fn variables_that_sudo_removes_are_kept() {
        let words = ["seikan", "join", "https://x"].map(str::to_owned);
        let error = libc_error(13).to_string();
        let advice = advice(&error, &words, &["SEIKAN_TOKEN".to_owned()], true);
        let expected = "needs root: run `sudo --preserve-env=SEIKAN_TOKEN seikan join https://x`";
        assert_eq!(advice.as_deref(), Some(expected));
    }

    #[test]
    fn a_command_in_the_directory_of_a_service_names_its_user() {
        // Each system has this user, and a directory of the test can be given to it only by root.
        let nobody = User::from_name("nobody").expect("users").expect("nobody");
        let folder = tempfile::tempdir().expect("a folder");
        if std::os::unix::fs::chown(folder.path(), Some(nobody.uid.as_raw()), None).is_err() {
            return eprintln!("SKIPPED: root is needed to give a folder away");
        }
        let error = libc_error(13).to_string();
        for option in [" ", "="] {
            let words = format!(
                "seikan relay secret --dir{option}{}",
                folder.path().display()
            );
            let advice = of(&error, &words, true).expect("an advice");
            assert!(advice.starts_with("needs user nobody: run `sudo -u nobody seikan relay"));
        }
    }

    #[test]
    fn up_can_do_without_root_unless_a_file_is_the_reason() {
        let error = libc_error(1).to_string();
        assert_eq!(
            of(&error, "seikan up wg0", true).as_deref(),
            Some(
                "needs root: run `sudo seikan up wg0`, or `seikan up wg0 --userspace` without root"
            )
        );
        for (words, can_do_without) in [
            ("seikan up wg0", false),
            ("seikan up wg0 --userspace", true),
            ("seikan join up", true),
        ] {
            let advice = of(&error, words, can_do_without).expect("an advice");
            assert!(!advice.contains("without root"), "{advice}");
        }
    }

    #[test]
    fn the_command_has_no_token() {
        let error = libc_error(13).to_string();
        let advice = of(&error, "seikan join https://x --token skt_abc", true).expect("an advice");
        assert!(!advice.contains("skt_abc"), "{advice}");
    }

    fn libc_error(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }
}
