//! `seikan generate`: writes shell completions and man pages, for packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command, ValueEnum, ValueHint};
use clap_complete::Shell;

/// Options of `generate`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  seikan generate man ./man1")]
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

/// Writes the files from the definition of the command line.
pub fn run(arguments: &Arguments, command: Command) -> anyhow::Result<ExitCode> {
    let directory = &arguments.directory;
    fs::create_dir_all(directory)
        .and_then(|()| match arguments.kind {
            Kind::Completions => completions(directory, command),
            Kind::Man => man(directory, command),
        })
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn completions(directory: &Path, mut command: Command) -> std::io::Result<()> {
    for shell in Shell::value_variants() {
        clap_complete::generate_to(*shell, &mut command, "seikan", directory)?;
    }
    Ok(())
}

/// Writes a page for each verb. Those of `seikan-lab` come from that program.
fn man(directory: &Path, mut command: Command) -> std::io::Result<()> {
    for verb in ["demo", "lab"] {
        command = command.mut_subcommand(verb, |verb| verb.hide(true));
    }
    clap_mangen::generate_to(command, directory)
}
