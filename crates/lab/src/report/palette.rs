//! The colours of pictures, on a light page and on a dark one.
//!
//! A picture names the light ones in its attributes. [`style_rules`] replace them where the page is dark: a rule beats an
//! attribute. Programs that know no style sheets show the light picture.

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
pub const INK: Colour = colour(0x1f_23_28, 0xe6_ed_f3);
/// Text that matters less.
pub const FAINT: Colour = colour(0x59_63_6e, 0x9a_a4_af);
/// Axes and grids.
pub const LINE: Colour = colour(0xd0_d7_de, 0x3d_44_4d);
/// What a picture is about; our tunnel among others.
pub const OWN: Colour = colour(0x0f_8b_8d, 0x2b_b5_b0);
/// What stands beside it.
pub const OTHER: Colour = colour(0x8f_9a_a6, 0x7d_89_96);
/// The yardstick.
pub const RAW: Colour = colour(0xc8_cf_d7, 0x4a_53_5e);
/// A second quantity in the same picture.
pub const SECOND: Colour = colour(0x2f_6f_de, 0x79_b8_ff);
/// What went wrong.
pub const BAD: Colour = colour(0xc9_34_1d, 0xff_7b_62);
/// Kinds that have to be told apart, beside [`OWN`], [`SECOND`] and [`OTHER`].
pub const KINDS: [Colour; 5] = [
    colour(0x82_50_df, 0xb3_92_f0),
    colour(0xc2_57_1b, 0xf0_88_3e),
    colour(0xb0_88_01, 0xe3_b3_41),
    colour(0xcf_3a_6b, 0xf7_78_ba),
    colour(0x5e_7c_16, 0xa5_c2_4a),
];

impl Colour {
    /// The light one, as attributes have it: `#0F8B8D`.
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
