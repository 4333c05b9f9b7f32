//! A self-contained page with every experiment.

use anyhow::Context;
use askama::Template;
use seikan_lab::Experiment;
use seikan_lab::report::Report;
use seikan_ui::PAGE_STYLE;
use seikan_ui::palette::style_rules;

use super::Picture;

struct Part<'a> {
    name: String,
    report: Report,
    pictures: &'a [Picture],
}

#[derive(Template)]
#[template(path = "reproduce.html")]
struct Page<'a> {
    parts: Vec<Part<'a>>,
    plot_style: String,
}

/// Returns the page.
pub fn page(experiments: &[(&Experiment, Vec<Picture>)]) -> anyhow::Result<String> {
    let parts = experiments.iter().map(|(experiment, pictures)| Part {
        name: experiment.source.to_string(),
        report: Report::from(*experiment),
        pictures,
    });
    let page = Page {
        parts: parts.collect(),
        plot_style: style_rules(),
    };
    page.render().context("cannot write the page")
}
