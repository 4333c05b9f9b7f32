//! Comparison of a page's output with the actual output.

/// Returns whether the output fits the shown lines. Figures, keys and addresses may differ, and `now`
/// fits `3 s ago`. A line `...` stands for any lines, and `...` at the end of a line for any words.
pub fn fits(shown: &str, printed: &str) -> bool {
    let shown: Vec<&str> = lines(shown).collect();
    let printed: Vec<&str> = lines(printed).collect();
    fits_from(&shown, &printed)
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
}

fn fits_from(shown: &[&str], printed: &[&str]) -> bool {
    match (shown.split_first(), printed.split_first()) {
        (None, None) => true,
        (Some((&"...", rest)), _) => {
            (0..=printed.len()).any(|skipped| fits_from(rest, &printed[skipped..]))
        }
        (Some((line, shown)), Some((other, printed))) => {
            line_fits(line, other) && fits_from(shown, printed)
        }
        _ => false,
    }
}

fn line_fits(shown: &str, printed: &str) -> bool {
    let mut shown = shapes(shown);
    let mut printed = shapes(printed);
    if shown.last().is_some_and(|word| word == "...") {
        shown.pop();
        printed.truncate(shown.len());
    }
    shown.len() == printed.len()
        && shown
            .iter()
            .zip(&printed)
            .all(|(shown, printed)| match shown.split_once("...") {
                Some((begin, end)) => printed.starts_with(begin) && printed.ends_with(end),
                None => shown == printed,
            })
}

/// Returns the forms of a line's words. An age of some seconds becomes `now`.
fn shapes(line: &str) -> Vec<String> {
    let mut shapes: Vec<String> = Vec::new();
    for word in line.split_whitespace().map(shape) {
        if word == "ago" && shapes.ends_with(&["#".to_owned(), "s".to_owned()]) {
            shapes.truncate(shapes.len() - 2);
            shapes.push("now".to_owned());
        } else {
            shapes.push(word);
        }
    }
    shapes
}

/// Returns the form of a word: figures become `#`, units one of their kind, keys and addresses a
/// placeholder.
fn shape(word: &str) -> String {
    let core = word.trim_matches([',', ';', ':', '.', '(', ')']);
    let is_key = core.len() == 44 && core.ends_with('=');
    let is_address = core.matches(':').count() >= 2
        && core
            .chars()
            .all(|c| c.is_ascii_hexdigit() || ":/.[]".contains(c));
    let unit = match core {
        "B" | "KiB" | "MiB" | "GiB" => Some("B"),
        "us" | "ms" | "s" | "seconds" | "second" | "min" => Some("s"),
        _ => None,
    };
    if is_key {
        return word.replace(core, "KEY");
    }
    if is_address {
        return word.replace(core, "ADDRESS");
    }
    if let Some(unit) = unit {
        return word.replace(core, unit);
    }
    for secret in ["skt_", "skr_", "sha256:"] {
        if word.starts_with(secret) {
            return secret.to_owned();
        }
    }
    let mut shape = String::new();
    let mut rest = word.chars().peekable();
    while let Some(c) = rest.next() {
        if !c.is_ascii_digit() {
            shape.push(c);
            continue;
        }
        shape.push('#');
        while rest
            .next_if(|c| c.is_ascii_digit() || *c == '.' || *c == ',')
            .is_some()
        {}
    }
    shape
}

/// Returns a text with shortened secrets, as a page shows them.
pub fn without_secrets(text: &str) -> String {
    let mut shown = String::new();
    for line in text.lines() {
        let words = line.split(' ').map(|word| {
            let secret = ["skt_", "skr_", "sha256:"]
                .into_iter()
                .find(|s| word.starts_with(s));
            secret.map_or_else(|| word.to_owned(), |secret| format!("{secret}..."))
        });
        shown += words.collect::<Vec<_>>().join(" ").trim_end();
        shown.push('\n');
    }
    shown
}

/// Fills each `...` of a block from another host's output: `NAME=...` gets the last line that is
/// one word, such as a key; a word that ends in `...` becomes the last printed word with the same
/// start. Returns the line without a match.
pub fn fill<'a>(script: &'a str, printed: &str) -> Result<String, &'a str> {
    let mut filled = String::new();
    for line in script.lines() {
        let assigned = line.split_once("=...").map(|(name, _)| name);
        let is_name = |name: &&str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if let Some(name) = assigned.filter(is_name) {
            let is_word = |line: &&str| line.split_whitespace().count() == 1;
            let value = printed.lines().rfind(is_word).ok_or(line)?;
            filled += &format!("{name}='{}'\n", value.trim());
            continue;
        }
        for (index, word) in line.split(' ').enumerate() {
            let begin = word.strip_suffix("...").filter(|begin| !begin.is_empty());
            let whole = match begin {
                Some(begin) => {
                    let is_whole =
                        |whole: &&str| whole.starts_with(begin) && !whole.ends_with("...");
                    printed.split_whitespace().rfind(is_whole).ok_or(line)?
                }
                None => word,
            };
            if index > 0 {
                filled.push(' ');
            }
            filled += whole;
        }
        filled.push('\n');
    }
    Ok(filled)
}

#[test]
fn figures_and_keys_may_differ_and_words_may_not() {
    assert!(fits("a 1.5 ms\n...\nb\n", "a 20 us\nx\ny\nb\n"));
    assert!(fits("...\nb 2", "b 3"));
    assert!(fits("a, ...\n", "a, b c\n"));
    assert!(!fits("a 1\n", "b 1\n"));
    assert!(!fits("a\n", "a\nb\n"));
    assert!(fits("now b\n", "2 s ago b\n"));
    assert!(!fits("now\n", "2 s\n"));
    assert!(fits("at fd00::1/64", "at fd3a:1::99/64"));
    assert!(fits("--token skt_...", "--token skt_abc"));
    assert!(fits("--pin sha256:...", "--pin sha256:abc"));
}

#[test]
fn blanks_are_filled_from_another_host() {
    assert_eq!(
        fill("A=...  # key\nb\n", "x y\nkey\nz z\n"),
        Ok("A='key'\nb\n".to_owned())
    );
    assert_eq!(
        fill("join --token skt_...\n", "y\n  join --token skt_1\n"),
        Ok("join --token skt_1\n".to_owned())
    );
    assert_eq!(fill("join x...\n", "y\n"), Err("join x..."));
}
