//! Every command and option on a page exists.

use super::{all_pages, project};
use std::collections::BTreeMap;
use std::fs;

/// Commands that the help does not list, for tests.
const HIDDEN: [&str; 1] = ["lab naive"];

/// Returns the help by command (`coordinator relay add`), from the golden files.
fn helps() -> BTreeMap<String, String> {
    let folder = project().join("crates/cli/tests/golden/help");
    let files = fs::read_dir(folder)
        .expect("a folder")
        .map(|file| file.expect("a file").path());
    files
        .map(|path| {
            let name = path.file_stem().expect("a name").to_str().expect("UTF-8");
            let name = name.trim_start_matches("seikan").trim_start_matches('-');
            (
                name.replace('-', " "),
                fs::read_to_string(&path).expect("read"),
            )
        })
        .collect()
}

/// Returns the commands of a page, in code spans and in blocks.
fn commands(text: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if in_block {
            commands.push(line.to_owned());
        } else {
            commands.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    commands
        .iter()
        .filter_map(|command| {
            let command = command
                .trim()
                .trim_start_matches("$ ")
                .trim_start_matches("sudo ");
            // `sudo -u USER seikan ...`
            let command = match command.strip_prefix("-u ") {
                Some(rest) => rest.split_once(' ').map_or(rest, |(_, command)| command),
                None => command,
            };
            let end = command
                .find([';', '|', '#', '>', '<', '&'])
                .unwrap_or(command.len());
            Some(
                command.strip_prefix("seikan ")?[..end - 7]
                    .trim_end_matches('\\')
                    .to_owned(),
            )
        })
        .collect()
}

#[test]
fn every_command_and_option_on_a_page_exists() {
    let helps = helps();
    let mut unknown = Vec::new();
    for path in all_pages() {
        let text = fs::read_to_string(project().join(&path)).expect("read");
        for command in commands(&text) {
            // In a list of examples, a description follows each command.
            let command = command.split("  ").next().expect("a command");
            if HIDDEN.iter().any(|hidden| command.starts_with(hidden)) {
                continue;
            }
            let mut verb = String::new();
            let mut words = command.split_whitespace().peekable();
            while let Some(word) = words.peek() {
                // Names of verbs and of the files have hyphens.
                let longer = format!("{verb} {}", word.replace('-', " "));
                if !helps.contains_key(longer.trim()) {
                    break;
                }
                verb = longer.trim().to_owned();
                words.next();
            }
            let help = &helps[&verb];
            let has_verbs = verb.is_empty() || help.contains("\nCommands:\n");
            for (index, word) in words.enumerate() {
                let option = word.split('=').next().expect("a word");
                let is_option = option.starts_with("--") && option.len() > 2;
                let is_verb =
                    index == 0 && has_verbs && word.chars().all(|c| c.is_ascii_lowercase());
                if is_verb || is_option && !help.contains(option) {
                    unknown.push(format!("{path}: seikan {command}: no {option} in {verb:?}"));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
}
