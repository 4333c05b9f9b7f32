//! `seikan-lab generate`: shell completions and man pages from the definition of the command line, for packages.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, ValueEnum, ValueHint};
use clap_complete::Shell;

use super::Cli;

/// Options of `generate`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  seikan-lab generate man /usr/share/man/man1")]
pub struct Arguments {
    /// Kind of files to write
    kind: Kind,
    /// Folder to write to; created if it does not exist
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    directory: PathBuf,
}

/// Kinds of files.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    /// Completions for every shell
    Completions,
    /// Man pages, one for every verb
    Man,
}

/// Writes the files.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let directory = &arguments.directory;
    fs::create_dir_all(directory)
        .and_then(|()| match arguments.kind {
            Kind::Completions => completions(directory),
            Kind::Man => man(directory),
        })
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn completions(directory: &Path) -> std::io::Result<()> {
    for shell in Shell::value_variants() {
        clap_complete::generate_to(*shell, &mut Cli::command(), "seikan-lab", directory)?;
    }
    Ok(())
}

/// Writes a page for each verb, and that of `seikan demo`.
fn man(directory: &Path) -> std::io::Result<()> {
    let mut command = Cli::command();
    if let Some(demo) = command.find_subcommand_mut("demo") {
        let demo = demo.clone().hide(false).display_name("seikan-demo");
        clap_mangen::Man::new(demo).render(&mut File::create(directory.join("seikan-demo.1"))?)?;
    }
    clap_mangen::generate_to(command, directory)
}
