//! The colours of pictures, on a light page and on a dark one.
//!
//! The attributes of a picture name its light colours. [`style_rules`] replaces them by the dark
//! ones on a dark page, because a rule takes precedence over an attribute. Programs that do not
//! know style sheets show the light colours.

use std::fmt::Write;

/// A colour, as red, green, blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour {
    /// On a light page.
    pub light: u32,
    /// On a dark page.
    pub dark: u32,
}

const fn colour(light: u32, dark: u32) -> Colour {
    Colour { light, dark }
}

/// Text.
pub const INK: Colour = colour(0x1f2328, 0xe6edf3);
/// Text that matters less.
pub const FAINT: Colour = colour(0x59636e, 0x9aa4af);
/// Axes and grids.
pub const LINE: Colour = colour(0xd0d7de, 0x3d444d);
/// The main quantity of a picture; our tunnel among others.
pub const OWN: Colour = colour(0x0f8b8d, 0x2bb5b0);
/// A quantity for comparison.
pub const OTHER: Colour = colour(0x8f9aa6, 0x7d8996);
/// Measurements without a tunnel.
pub const RAW: Colour = colour(0xc8cfd7, 0x4a535e);
/// A second quantity in the same picture.
pub const SECOND: Colour = colour(0x2f6fde, 0x79b8ff);
/// Failures.
pub const BAD: Colour = colour(0xc9341d, 0xff7b62);
/// Colours that distinguish kinds, in addition to [`OWN`], [`SECOND`] and [`OTHER`].
pub const KINDS: [Colour; 5] = [
    colour(0x8250df, 0xb392f0),
    colour(0xc2571b, 0xf0883e),
    colour(0xb08801, 0xe3b341),
    colour(0xcf3a6b, 0xf778ba),
    colour(0x5e7c16, 0xa5c24a),
];

impl Colour {
    /// Returns the light colour as attributes have it: `#0F8B8D`.
    pub fn hex(self) -> String {
        format!("#{:06X}", self.light)
    }
}

/// Style rules for pictures of the class `seikan-plot`.
pub fn style_rules() -> String {
    let mut rules =
        ".seikan-plot text{font-variant-numeric:tabular-nums}@media (prefers-color-scheme:dark){"
            .to_owned();
    let named = [INK, FAINT, LINE, OWN, OTHER, RAW, SECOND, BAD];
    for colour in named.iter().chain(&KINDS) {
        let (light, dark) = (colour.hex(), format!("#{:06x}", colour.dark));
        for property in ["fill", "stroke"] {
            // Writing to memory does not fail.
            let _ = write!(
                rules,
                ".seikan-plot [{property}=\"{light}\"]{{{property}:{dark}}}"
            );
        }
    }
    rules + "}"
}
