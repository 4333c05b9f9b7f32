//! Errors of missing rights: tells a user without root how to go on.

use std::env;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::unistd::Uid;

use crate::service::shown_command;

/// Words of such errors: numbers of EPERM and EACCES as the standard library and nix print them, and
/// the phrases of the crates that name the remedy instead of the number. Other programs, for example
/// ssh, print other words.
const SIGNS: [&str; 7] = [
    "(os error 1)",
    "(os error 13)",
    "EPERM",
    "EACCES",
    "permission denied",
    "not permitted",
    "this process lacks",
];

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
    if *IS_ROOT.get_or_init(|| Uid::effective().is_root()) {
        return;
    }
    let words: Vec<String> = env::args_os()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if let Some(advice) = advice(error, &words, can_do_without)
        && !IS_DONE.swap(true, Ordering::Relaxed)
    {
        let advice = seikan_ui::screen::printable(&advice);
        let _ = writeln!(io::stderr(), "help: {advice}");
    }
}

/// Returns the advice for an error of a command; `None` if the error is another one.
fn advice(error: &str, words: &[String], can_do_without: bool) -> Option<String> {
    if !SIGNS.iter().any(|sign| error.contains(sign)) {
        return None;
    }
    let command = shown_command(words.iter().cloned());
    let mut advice = format!("needs root: run `sudo {command}`");
    let is_up = words.get(1).is_some_and(|verb| verb == "up");
    let names_it = |text: &str| text.contains("--userspace");
    if is_up && can_do_without && !names_it(error) && !names_it(&command) {
        advice.push_str(&format!(", or `{command} --userspace` without root"));
    }
    Some(advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(error: &str, words: &str, can_do_without: bool) -> Option<String> {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        advice(error, &words, can_do_without)
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
