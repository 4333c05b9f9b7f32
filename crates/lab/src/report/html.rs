//! A sheet as one HTML page that needs nothing from anywhere else.

use askama::Template;

use crate::error::{LabError, Result};
use crate::report::{Kind, Sheet, svg};

/// The style sheet of pages.
pub const PAGE_STYLE: &str = include_str!("../../templates/page.css");

#[derive(Template)]
#[template(path = "sheet.html")]
struct Page<'a> {
    sheet: &'a Sheet,
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

/// Draws the sheet.
///
/// # Errors
/// [`LabError::Render`].
pub fn html(sheet: &Sheet) -> Result<String> {
    with_plot(sheet, svg(sheet)?)
}

/// Draws the sheet with another picture than its bars.
pub(super) fn with_plot(sheet: &Sheet, plot: String) -> Result<String> {
    let page = Page { sheet, plot };
    page.render().map_err(|e| LabError::Render(e.to_string()))
}
