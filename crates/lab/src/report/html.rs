//! A report as one HTML page that needs nothing from anywhere else.

use askama::Template;
use seikan_ui::PAGE_STYLE;

use crate::error::{LabError, Result};
use crate::report::{Kind, Report, svg};

#[derive(Template)]
#[template(path = "sheet.html")]
struct Page<'a> {
    report: &'a Report,
    plot: String,
}

impl Page<'_> {
    fn class(&self, kind: &Kind) -> &'static str {
        match kind {
            Kind::Own => "own",
            Kind::Raw => "raw",
            Kind::Other => "other",
        }
    }
}

/// Draws the report.
///
/// # Errors
/// [`LabError::Render`].
pub fn html(report: &Report) -> Result<String> {
    with_plot(report, svg(report))
}

/// Draws the report with another picture than its bars.
pub(super) fn with_plot(report: &Report, plot: String) -> Result<String> {
    let page = Page { report, plot };
    page.render().map_err(|e| LabError::Render(e.to_string()))
}
