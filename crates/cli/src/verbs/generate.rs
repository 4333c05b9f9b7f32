//! `seikan generate`: shell completions and man pages from the definition of the command line, for packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, ValueEnum, ValueHint};
use clap_complete::Shell;

use crate::cli::Cli;

/// What `generate` is told.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  seikan generate man /usr/share/man/man1")]
pub struct Arguments {
    /// What to write
    what: What,
    /// Folder to write to; it is made if it is not there
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    directory: PathBuf,
}

/// What can be written.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum What {
    /// Completions for every shell
    Completions,
    /// Man pages, one for every verb
    Man,
}

/// Writes the files.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let directory = &arguments.directory;
    fs::create_dir_all(directory)
        .and_then(|()| match arguments.what {
            What::Completions => completions(directory),
            What::Man => man(directory),
        })
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn completions(directory: &Path) -> std::io::Result<()> {
    for shell in Shell::value_variants() {
        clap_complete::generate_to(*shell, &mut Cli::command(), "seikan", directory)?;
    }
    Ok(())
}

/// Writes a page for each verb. Those of `seikan-lab` come from that program.
fn man(directory: &Path) -> std::io::Result<()> {
    let mut command = Cli::command();
    for verb in ["demo", "lab"] {
        command = command.mut_subcommand(verb, |verb| verb.hide(true));
    }
    clap_mangen::generate_to(command, directory)
}
