//! `seikan-lab png`, hidden: draws a picture of `seikan report --png`, in light colours on white.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use resvg::tiny_skia::{Color, Pixmap, Transform};
use resvg::usvg::fontdb::{Database, Family, Query};
use resvg::usvg::{Options, Tree};

/// Scale of the pixels, for high-resolution screens.
const ZOOM: f32 = 2.0;
/// Font families by preference.
const FAMILIES: [&str; 6] = [
    "DejaVu Sans",
    "Noto Sans",
    "Liberation Sans",
    "Ubuntu",
    "Cantarell",
    "Arial",
];

/// Draws the SVG picture of standard input as PNG, to standard output.
pub fn run() -> anyhow::Result<ExitCode> {
    let mut svg = String::new();
    let read = io::stdin().read_to_string(&mut svg);
    read.context("cannot read a picture from standard input")?;
    let png = Renderer::new()?.png(&svg)?;
    io::stdout().write_all(&png).context("cannot write PNG")?;
    Ok(ExitCode::SUCCESS)
}

/// Draws pictures with this machine's fonts.
struct Renderer {
    options: Options<'static>,
}

impl Renderer {
    /// Loads the fonts.
    fn new() -> anyhow::Result<Self> {
        let mut options = Options::default();
        let fonts = options.fontdb_mut();
        fonts.load_system_fonts();
        let family = family(fonts).context(
            "cannot write PNG: this machine has no font to write with. Install one, such as Debian's package \
             fonts-dejavu-core, or take --svg",
        )?;
        fonts.set_sans_serif_family(&family);
        options.font_family = family;
        Ok(Renderer { options })
    }

    /// Returns a picture as a PNG file.
    fn png(&self, svg: &str) -> anyhow::Result<Vec<u8>> {
        let tree = Tree::from_str(svg, &self.options).context("cannot draw a picture")?;
        let size = tree.size().to_int_size();
        let zoomed = size.scale_by(ZOOM).context("a picture is too large")?;
        let Some(mut pixels) = Pixmap::new(zoomed.width(), zoomed.height()) else {
            bail!("a picture is too large");
        };
        pixels.fill(Color::WHITE);
        let zoom = Transform::from_scale(ZOOM, ZOOM);
        resvg::render(&tree, zoom, &mut pixels.as_mut());
        pixels.encode_png().context("cannot write PNG")
    }
}

/// Returns a sans-serif family, or any other.
fn family(fonts: &Database) -> Option<String> {
    let has = |name: &&&str| {
        let families = &[Family::Name(name)];
        let query = Query {
            families,
            ..Query::default()
        };
        fonts.query(&query).is_some()
    };
    let any = || {
        let face = fonts.faces().next()?;
        Some(face.families.first()?.0.clone())
    };
    let known = FAMILIES.iter().find(has);
    known.map(|name| (*name).to_owned()).or_else(any)
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_ui::palette::INK;
    use seikan_ui::svg::{Anchor, Svg, standalone};

    #[test]
    fn without_a_font_there_is_none_to_choose() {
        assert_eq!(family(&Database::new()), None);
    }

    #[test]
    fn words_are_drawn_in_dark_on_white() {
        let Ok(renderer) = Renderer::new() else {
            eprintln!("SKIPPED: no font");
            return;
        };
        let draw = |text: &str| {
            let mut svg = Svg::default();
            svg.text((10.0, 30.0), Anchor::Start, INK, text);
            let png = renderer
                .png(&standalone(&svg.finish(40.0, "words"), "", ""))
                .expect("PNG");
            Pixmap::decode_png(&png).expect("PNG")
        };
        let (empty, words) = (draw(""), draw("MMMMMM"));
        assert_eq!((words.width(), words.height()), (1800, 80));
        let dark = |pixels: &Pixmap| pixels.pixels().iter().filter(|p| p.red() < 128).count();
        assert_eq!(dark(&empty), 0);
        assert!(dark(&words) > 500, "{}", dark(&words));
    }
}
