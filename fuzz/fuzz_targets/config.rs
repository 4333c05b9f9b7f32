//! Any text as a configuration in both syntaxes: an accepted one survives writing and reading.
use seikan_config::{Overrides, Source, Syntax, parse};

/// One input.
pub fn run(bytes: &[u8]) {
    let Some((first, Ok(text))) = bytes
        .split_first()
        .map(|(f, rest)| (f, std::str::from_utf8(rest)))
    else {
        return;
    };
    let read = |text: &str, syntax| {
        let source = Source {
            syntax,
            text: text.to_owned().into(),
            file: "wg0.conf".into(),
        };
        parse(&source, &Overrides::default(), &|_| {
            Err(std::io::ErrorKind::NotFound.into())
        })
    };
    let syntax = if first & 1 == 0 {
        Syntax::Ini
    } else {
        Syntax::Toml
    };
    let Ok((config, _)) = read(text, syntax).into_result() else {
        return;
    };
    let again = read(&config.to_toml(), Syntax::Toml).into_result();
    let (again, _) = again.unwrap_or_else(|error| panic!("the written TOML is refused: {error}"));
    assert!(*again.to_toml() == *config.to_toml(), "TOML changed it");
    if let Ok(ini) = config.to_ini() {
        let again = read(&ini, Syntax::Ini).into_result();
        let (mut again, _) =
            again.unwrap_or_else(|error| panic!("the written INI is refused: {error}"));
        // wg-quick's syntax has no key for the protocol.
        again.protocol = config.protocol;
        assert!(*again.to_toml() == *config.to_toml(), "INI changed it");
    }
}
