//! A page: its hosts and its blocks.

use std::fs;
use std::path::{Path, PathBuf};

/// A page, split.
pub struct Page {
    path: PathBuf,
    text: String,
    /// Definitions of hosts, in the order of the page.
    pub hosts: Vec<HostDefinition>,
    /// A page whose blocks are run first, and the heading before which that ends.
    pub continues: Option<(String, String)>,
    pub blocks: Vec<Block>,
    changed: bool,
}

/// `<!-- host NAME: INTERFACE ADDRESS MAC at SWITCH; ... -->`; address and MAC address may be
/// missing.
#[derive(Debug, Clone)]
pub struct HostDefinition {
    pub name: String,
    pub interfaces: Vec<Interface>,
}

/// A network interface of a host.
#[derive(Debug, Clone)]
pub struct Interface {
    pub name: String,
    /// Addresses with their prefix lengths.
    pub addresses: Vec<String>,
    pub mac: Option<[u8; 6]>,
    /// The Ethernet switch that it is plugged into.
    pub switch: String,
}

/// Language of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    Shell,
    Console,
    /// A configuration; the value is the extension of such files.
    Configuration(&'static str),
    Other,
}

/// A fenced block.
#[derive(Debug, Clone)]
pub struct Block {
    pub language: Language,
    /// Line of its first fence.
    pub line: usize,
    pub text: String,
    /// The host that the last `on` named.
    pub host: Option<String>,
    pub directive: Directive,
}

/// Directives that apply to the next block alone.
#[derive(Debug, Clone, Default)]
pub struct Directive {
    pub until: Option<String>,
    pub fails: bool,
    pub filled_from: Option<String>,
    pub not_run: Option<String>,
    pub foreign: bool,
    /// How often the block is run at most until its output fits; 0 and 1 are the same.
    pub tries: usize,
}

impl Page {
    /// Reads and splits a page.
    pub fn read(path: &Path) -> Page {
        let text =
            fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut page = Page {
            path: path.to_owned(),
            hosts: Vec::new(),
            continues: None,
            blocks: Vec::new(),
            changed: false,
            text,
        };
        let text = page.text.clone();
        let mut lines = text.lines().enumerate();
        let mut host = None;
        let mut directive = Directive::default();
        while let Some((index, line)) = lines.next() {
            if let Some(comment) = comment(line) {
                page.apply(comment, &mut host, &mut directive);
            } else if let Some(information) = line.trim_start().strip_prefix("```") {
                let body = lines.by_ref().map(|(_, line)| line);
                let body = body.take_while(|line| !line.trim_start().starts_with("```"));
                let indent = line.len() - line.trim_start().len();
                let body = body.map(|line| format!("{}\n", line.get(indent..).unwrap_or_default()));
                page.blocks.push(Block {
                    language: language(information.trim()),
                    line: index + 1,
                    text: body.collect(),
                    host: host.clone(),
                    directive: std::mem::take(&mut directive),
                });
            }
        }
        page
    }

    fn apply(&mut self, comment: &str, host: &mut Option<String>, directive: &mut Directive) {
        if let Some(definition) = comment.strip_prefix("host ") {
            self.hosts.push(host_definition(definition));
        } else if let Some(rest) = comment.strip_prefix("continues ") {
            let (path, heading) = rest.split_once(" up to ").expect("PAGE up to HEADING");
            self.continues = Some((path.to_owned(), heading.trim_matches('"').to_owned()));
        } else if let Some(rest) = comment.strip_prefix("on ") {
            let mut parts = rest.split(", ");
            *host = parts.next().map(str::to_owned);
            for part in parts {
                if let Some(word) = part.strip_prefix("until ") {
                    directive.until = Some(word.trim_matches('"').to_owned());
                } else if let Some(source) = part.strip_prefix("from ") {
                    directive.filled_from = Some(source.to_owned());
                } else if let Some(number) = part.strip_prefix("tries ") {
                    directive.tries = number.parse().expect("a number");
                } else {
                    assert_eq!(part, "fails", "{}: unknown", self.path.display());
                    directive.fails = true;
                }
            }
        } else if let Some(reason) = comment.strip_prefix("not run: ") {
            directive.not_run = Some(reason.to_owned());
        } else if comment == "not a configuration" {
            directive.foreign = true;
        }
    }

    /// Returns the line of a heading.
    pub fn line_of(&self, heading: &str) -> usize {
        let is_it =
            |line: &str| line.starts_with('#') && line.trim_start_matches('#').trim() == heading;
        let index = self.text.lines().position(is_it);
        index.unwrap_or_else(|| panic!("{}: no heading {heading}", self.path.display())) + 1
    }

    /// Puts another text into a block.
    pub fn replace(&mut self, index: usize, text: &str) {
        let block = &self.blocks[index];
        let fence = format!("```console\n{}```", block.text);
        assert_eq!(self.text.matches(&fence).count(), 1, "the same block twice");
        self.text = self.text.replace(&fence, &format!("```console\n{text}```"));
        self.changed = true;
    }

    /// Writes the page back if a block was replaced.
    pub fn write_if_changed(&self) {
        if self.changed {
            fs::write(&self.path, &self.text).expect("written");
        }
    }
}

fn comment(line: &str) -> Option<&str> {
    let inner = line.trim().strip_prefix("<!--")?.strip_suffix("-->")?;
    Some(inner.trim())
}

fn language(information: &str) -> Language {
    match information {
        "sh" => Language::Shell,
        "console" => Language::Console,
        "toml" => Language::Configuration("toml"),
        "ini" => Language::Configuration("conf"),
        _ => Language::Other,
    }
}

fn host_definition(text: &str) -> HostDefinition {
    let (name, interfaces) = text.split_once(": ").expect("host NAME: INTERFACES");
    let interfaces = interfaces.split("; ").map(|interface| {
        let (interface, switch) = interface.split_once(" at ").expect("INTERFACE at SWITCH");
        let mut words = interface.split_whitespace();
        let name = words.next().expect("an interface").to_owned();
        let (addresses, macs): (Vec<&str>, Vec<&str>) = words.partition(|word| word.contains('/'));
        Interface {
            name,
            addresses: addresses.into_iter().map(str::to_owned).collect(),
            mac: macs.first().map(|mac| {
                let octets: Vec<u8> = mac
                    .split(':')
                    .map(|octet| u8::from_str_radix(octet, 16).expect("hexadecimal"))
                    .collect();
                octets.try_into().expect("six octets")
            }),
            switch: switch.to_owned(),
        }
    });
    HostDefinition {
        name: name.to_owned(),
        interfaces: interfaces.collect(),
    }
}
