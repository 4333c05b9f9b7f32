//! The verb `generate`: writes shell completions and man pages, for packages.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command, ValueEnum, ValueHint};
use clap_complete::Shell;
use clap_mangen::Man;

/// Options of `generate`.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Kind of files to write
    kind: Kind,
    /// Directory to write to; it is made if it is missing
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    directory: PathBuf,
}

/// Kinds of generated files.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    /// Completions for all shells
    Completions,
    /// Man pages, one for every command
    Man,
}

/// Writes the files from the definition of a program's command line. Neither hidden commands nor
/// the commands in `others`, whose pages another program writes, get a page.
///
/// # Errors
/// A file cannot be written.
pub fn run(
    arguments: &Arguments,
    program: &str,
    mut command: Command,
    others: &[&str],
) -> anyhow::Result<ExitCode> {
    let directory = &arguments.directory;
    let write = || -> io::Result<()> {
        fs::create_dir_all(directory)?;
        match arguments.kind {
            Kind::Completions => {
                for shell in Shell::value_variants() {
                    clap_complete::generate_to(*shell, &mut command, program, directory)?;
                }
                Ok(())
            }
            Kind::Man => {
                for other in others {
                    command = command.mut_subcommand(other, |other| other.hide(true));
                }
                // Sets the names of the pages.
                command.build();
                write_pages(directory, &command)
            }
        }
    };
    write().with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages of a command and of its subcommands.
fn write_pages(directory: &Path, command: &Command) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    fs::write(directory.join(format!("{name}.1")), page(command)?)?;
    let subcommands = command.get_subcommands();
    subcommands
        .filter(|subcommand| !subcommand.is_hide_set() && subcommand.get_name() != "help")
        .try_for_each(|subcommand| write_pages(directory, subcommand))
}

/// Returns the page of a command. Its synopsis is the usage that `--help` shows: the synopsis by
/// clap_mangen names all options, but not their values.
fn page(command: &Command) -> io::Result<String> {
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    let page = String::from_utf8_lossy(&page);
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").replace('-', "\\-");
    let mut lines = page.lines();
    let mut written = String::new();
    while let Some(line) = lines.next() {
        written += line;
        written.push('\n');
        if line == ".SH SYNOPSIS" {
            lines.next();
            for usage in usage.trim().lines() {
                written += &format!("{}\n.br\n", usage.trim());
            }
        }
    }
    Ok(written)
}
