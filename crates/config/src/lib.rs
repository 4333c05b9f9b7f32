//! Configuration of one interface: one schema, two syntaxes.
//!
//! Stages of reading a file:
//! 1. [`locate`] turns a path or an interface name into a path;
//! 2. `ini` or `toml` splits the text into sections and entries with their lines;
//! 3. `read` converts each value by the table of keys in `sections`;
//! 4. `check` and `gateway` check the whole: keys used twice, overlapping prefixes, MTU, missing keys;
//! 5. the result is a [`Config`], and all [`Diagnostic`]s, not only the first.
//!
//! [`Config::to_ini`] and [`Config::to_toml`] convert a configuration back to text.
#![forbid(unsafe_code)]

mod check;
mod diagnostic;
mod endpoint;
mod gateway;
mod ini;
mod key;
mod load;
mod lookup;
mod overrides;
mod read;
mod report;
mod schema;
mod sections;
mod source;
mod text;
mod toml;
mod types;
mod values;
mod write;

pub use diagnostic::{Diagnostic, Diagnostics, Severity};
pub use endpoint::{CoordinatorUrl, Endpoint, EndpointError, Host, NotACoordinator};
pub use key::{
    KEY_BASE64_LEN, KEY_LEN, KeyError, PresharedKey, PrivateKey, PublicKey, encode_key,
    parse_preshared_key, parse_private_key, parse_public_key,
};
pub use load::{ConfigError, Parsed, interface_name, load, locate, parse};
pub use overrides::Overrides;
pub use source::{ReadKey, Source, Syntax};
pub use types::{
    BitRate, CipherPreference, Config, GatewayMode, GatewaySettings, Hooks, InterfaceName,
    InterfaceNameError, MeshSettings, Mode, PeerConfig, Protocol, Repair, Table, Trust,
    UnknownValue,
};
pub use write::NotInIni;
