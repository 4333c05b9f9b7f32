//! The package for OpenWrt: the configuration in its guide becomes one that `seikan check` accepts.
//! Here a few lines of shell stand in for OpenWrt's own library; `make openwrt-check` has that.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Stands in for /lib/functions.sh of OpenWrt, as its documentation describes the functions, and
/// for `uci export`. A UCI file is shell for it: `config`, `option` and `list` are functions.
const FUNCTIONS: &str = r#"
sections=
config() {
    CONFIG_SECTION=${2:-unnamed$((count += 1))}
    sections="$sections $CONFIG_SECTION"
    eval "${CONFIG_SECTION}_TYPE=\$1"
    config_cb "$1" "$CONFIG_SECTION"
}
option() { eval "${CONFIG_SECTION}_$1=\$2"; option_cb "$1" "$2"; }
list() {
    local n
    eval "n=\$((\${${CONFIG_SECTION}_$1_COUNT:-0} + 1))"
    eval "${CONFIG_SECTION}_$1_COUNT=\$n ${CONFIG_SECTION}_$1_ITEM$n=\$2"
    list_cb "$1" "$2"
}
config_load() { count=0; . "$IPKG_INSTROOT/etc/config/$1"; config_cb; }
config_get() { eval "$1=\${${2}_$3:-\${4:-}}"; }
config_foreach() {
    local each type call=$1 wanted=$2
    shift 2
    for each in $sections; do
        eval "type=\$${each}_TYPE"
        [ "$type" != "$wanted" ] || "$call" "$each" "$@"
    done
}
config_list_foreach() {
    local n=1 value
    while eval "[ $n -le \${${1}_${2}_COUNT:-0} ]"; do
        eval "value=\$${1}_${2}_ITEM$n"
        "$3" "$value"
        n=$((n + 1))
    done
}
uci() { sh -n "$IPKG_INSTROOT/etc/config/$2"; }
"#;

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the output of the converter for a tunnel of a UCI file.
fn convert(uci: &str, tunnel: &str) -> Output {
    let root = tempfile::tempdir().expect("a folder");
    fs::create_dir_all(root.path().join("lib")).expect("lib");
    fs::create_dir_all(root.path().join("etc/config")).expect("etc");
    fs::write(root.path().join("lib/functions.sh"), FUNCTIONS).expect("written");
    fs::write(root.path().join("etc/config/seikan"), uci).expect("written");
    let script = project().join("packaging/openwrt/files/uci-to-toml");
    let mut shell = Command::new("sh");
    shell.arg(script).arg(tunnel);
    shell.env("IPKG_INSTROOT", root.path());
    shell.output().expect("a shell")
}

/// Returns the converted configuration of a tunnel.
fn toml(uci: &str, tunnel: &str) -> String {
    let output = convert(uci, tunnel);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// `seikan check` accepts the text without a warning.
fn check(text: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let key = folder.path().join("office.key");
    let file = folder.path().join("office.toml");
    let text = text.replace("/etc/seikan/office.key", key.to_str().expect("UTF-8"));
    for (path, text) in [(&key, KEY), (&file, text.as_str())] {
        fs::write(path, text).expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("rights");
    }
    let mut check = Command::new(env!("CARGO_BIN_EXE_seikan"));
    let output = check.arg("check").arg(&file).output().expect("start");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{errors}{text}");
    assert!(!said.contains("warning"), "{said}{errors}{text}");
}

/// A key for tests only.
const KEY: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=\n";

#[test]
fn the_configuration_in_the_guide_is_accepted() {
    let guide = fs::read_to_string(project().join("docs/guides/openwrt.md")).expect("the guide");
    let block = guide.split("```uci\n").nth(1).expect("a block of UCI");
    let text = toml(block.split("```").next().expect("its end"), "office");
    check(&text);
    let expected = r#"protocol = "wireguard"
listen-port = 51820
address = ["10.80.0.1/24", "fd80::1/64"]
private-key-file = "/etc/seikan/office.key"

[[peer]]
name = "branch"
public-key = "8kfUEz8qhR7BQ5TjDIo3G07Wy+gE18QueE0wzU1MNSE="
endpoint = "branch.example.com:51820"
persistent-keepalive = 25
allowed-ips = ["10.80.0.2/32", "192.168.20.0/24"]
"#;
    assert_eq!(text, expected);
}

#[test]
fn a_gateway_is_accepted() {
    let uci = "
config tunnel office
    option listen_port 51820
    option offload 0
    list address 10.77.0.1/24
config peer
    option public_key 8kfUEz8qhR7BQ5TjDIo3G07Wy+gE18QueE0wzU1MNSE=
    option allowed_ips 10.77.0.2/32
config gateway
    option interface br-lan
    list answer_for 10.77.0.0/24
config device
    option name plc
    option mac 02:00:00:00:00:10
    list lan 192.168.1.10
    list overlay 10.77.0.10
    list allow_from '10.77.0.0/24 tcp/502'
    list allow_from 'any icmp'
config remote
    option overlay 10.77.0.2
    option lan 192.168.1.202
";
    let text = toml(uci, "office");
    check(&text);
    assert!(text.contains("offload = false\n"), "{text}");
    let rules = r#"allow-from = ["10.77.0.0/24 tcp/502", "any icmp"]"#;
    assert!(text.contains(rules), "{text}");
}

#[test]
fn a_tunnel_has_its_own_enabled_peers() {
    let peer = "option public_key 8kfUEz8qhR7BQ5TjDIo3G07Wy+gE18QueE0wzU1MNSE=";
    let uci = format!(
        "config tunnel office\nconfig tunnel lab\nconfig peer\n{peer}\noption tunnel lab\n\
         config peer\n{peer}\noption tunnel office\noption enabled 0\n"
    );
    assert_eq!(toml(&uci, "office").matches("[[peer]]").count(), 0);
    assert_eq!(toml(&uci, "lab").matches("[[peer]]").count(), 1);
}

#[test]
fn quotes_stay_within_their_value() {
    let uci = "config tunnel office\nlist post_up 'logger \"a \\ b\"'\n";
    let text = toml(uci, "office");
    let line = r#"post-up = ["logger \"a \\ b\""]"#;
    assert!(text.contains(line), "{text}");
}

/// Returns the error about a configuration that is refused, of which nothing may be applied.
fn refused(uci: &str) -> String {
    let output = convert(uci, "office");
    assert!(!output.status.success(), "{uci}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

/// Returns the error about a device of a gateway with this line.
fn refused_device(line: &str) -> String {
    refused(&format!(
        "config tunnel office\nconfig gateway\noption interface br-lan\nconfig device\noption name plc\n{line}\n"
    ))
}

#[test]
fn a_line_break_in_a_value_is_refused() {
    let error = refused("config tunnel office\noption metrics '127.0.0.1:1\nsave-config = true'\n");
    assert!(error.contains("control character"), "{error}");
    let error = refused_device("list allow_from 'any\n\"]'");
    assert!(error.contains("control character"), "{error}");
}

/// If the misspelt rule were ignored, everybody could reach the device.
#[test]
fn a_misspelt_rule_is_refused() {
    for line in ["list alow_from any", "option tunel office"] {
        let error = refused_device(line);
        let name = line.split(' ').nth(1).expect("a name");
        let expected = format!("device 'plc' has the unknown option `{name}`");
        assert!(error.contains(&expected), "{error}");
        assert!(error.contains(" allow_from "), "{error}");
    }
}

/// Neither UCI nor the converter's list keeps an empty rule, so the converter refuses it.
#[test]
fn an_empty_rule_is_refused() {
    for line in [
        "list allow_from ''",
        "option allow_from ''",
        "option allow_from \"\" # nobody",
        "list allow_from any\nlist allow_from ''",
    ] {
        let error = refused_device(line);
        assert!(error.contains("has no value"), "{error}");
    }
    let hidden = refused_device("list 'allow_from' $EMPTY");
    assert!(hidden.contains("has an empty value"), "{hidden}");
}

#[test]
fn a_section_of_an_unknown_type_is_refused() {
    let error = refused("config tunnel office\nconfig gatway\n");
    assert!(error.contains("unknown type `gatway`"), "{error}");
    assert!(
        error.contains("tunnel peer gateway device remote"),
        "{error}"
    );
}

/// The fault does not stop another tunnel.
#[test]
fn a_fault_of_another_tunnel_is_left_to_it() {
    let uci = "config tunnel office\nconfig tunnel lab\noption mtuu 1\nconfig peer\noption tunnel lab\noption nam x\n";
    toml(uci, "office");
    assert!(!convert(uci, "lab").status.success());
}

#[test]
fn a_value_of_another_kind_is_refused() {
    for (line, expected) in [
        ("option offload maybe", "`offload` is neither yes nor no"),
        ("option enabled flase", "`enabled` is neither yes nor no"),
        ("option mtu 1400x", "`mtu` is not a whole number"),
        ("option listen_port 051820", "`listen_port` is not a whole"),
        (
            "option mtu '1400, table = 1'",
            "`mtu` is not a whole number",
        ),
        ("option log loud", "`log` is none of error"),
        ("list mtu 1400", "write `option mtu`"),
        ("option save_config 1", "unknown option `save_config`"),
    ] {
        let error = refused(&format!("config tunnel office\n{line}\n"));
        assert!(error.contains(expected), "{line}: {error}");
    }
}

#[test]
fn yes_and_no_have_the_spellings_of_uci() {
    for (words, value) in [
        (["1", "on", "true", "yes", "enabled"], "offload = true\n"),
        (["0", "off", "false", "no", "disabled"], "offload = false\n"),
    ] {
        for word in words {
            let text = toml(
                &format!("config tunnel office\noption offload {word}\n"),
                "office",
            );
            assert!(text.contains(value), "{text}");
        }
    }
}

#[test]
fn a_tunnel_of_a_file_has_no_other_keys() {
    let uci = "config tunnel office\noption file /etc/seikan/mesh.toml\noption log debug\n";
    assert_eq!(toml(uci, "office"), "");
    let error = refused(&format!("{uci}option mtu 1400\n"));
    assert!(error.contains("`mtu` belongs in the file"), "{error}");
}

/// The test fails if a release adds a key that the converter lacks. Only `save-config` has no
/// option: it would write to memory.
#[test]
fn every_key_is_an_option() {
    let page = project().join("docs/reference/configuration.md");
    let page = fs::read_to_string(page).expect("the reference");
    let script = project().join("packaging/openwrt/files/uci-to-toml");
    let script = fs::read_to_string(script).expect("the script");
    let options: Vec<&str> = script
        .split(|char: char| !char.is_ascii_lowercase() && char != '_')
        .collect();
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let columns = rows.filter_map(|row| row.split(" | ").nth(1));
    let keys = columns.flat_map(|column| column.split('`').skip(1).step_by(2));
    let is_key = |text: &&str| {
        text.chars()
            .all(|char| char.is_ascii_lowercase() || char == '-')
    };
    let keys: Vec<String> = keys
        .filter(is_key)
        .map(|key| key.replace('-', "_"))
        .collect();
    assert!(keys.len() > 40, "{keys:?}");
    let missing: Vec<&String> = keys
        .iter()
        .filter(|key| !options.contains(&key.as_str()) && *key != "save_config")
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}
