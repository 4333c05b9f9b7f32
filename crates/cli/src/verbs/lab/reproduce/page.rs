//! Every experiment on one page that needs nothing from anywhere else.

use anyhow::Context;
use askama::Template;
use seikan_lab::Experiment;
use seikan_lab::report::palette::style_rules;
use seikan_lab::report::{PAGE_STYLE, Sheet};

use super::Picture;

struct Part<'a> {
    name: &'static str,
    sheet: Sheet,
    pictures: &'a [Picture],
}

#[derive(Template)]
#[template(path = "reproduce.html")]
struct Page<'a> {
    parts: Vec<Part<'a>>,
    plot_style: String,
}

/// Writes it.
pub fn page(experiments: &[(&Experiment, Vec<Picture>)]) -> anyhow::Result<String> {
    let parts = experiments.iter().map(|(experiment, pictures)| Part {
        name: experiment.source.name(),
        sheet: Sheet::from(*experiment),
        pictures,
    });
    let page = Page {
        parts: parts.collect(),
        plot_style: style_rules(),
    };
    page.render().context("cannot write the page")
}
