//! Joining a mesh: the request to its coordinator, and the configuration of the new member.

use crate::client::{Client, ClientError};
use seikan_config::{CoordinatorUrl, PrivateKey, encode_key};
use seikan_proto::mesh::{Credential, JoinRequest, Joined, Pin};
use std::time::Duration;
use tokio::time::sleep;
use zeroize::Zeroizing;

/// Maximum attempts if the coordinator does not answer. It recognises a repeated request.
const ATTEMPTS: u32 = 3;
/// Interval between two attempts.
const PAUSE: Duration = Duration::from_millis(500);

/// Registers this host with the coordinator.
///
/// # Errors
/// Those of [`Client::join`].
pub async fn register(client: &Client, request: &JoinRequest) -> Result<Joined, ClientError> {
    let mut attempt = 1;
    loop {
        match client.join(request).await {
            Err(ClientError::Unreachable { .. }) if attempt < ATTEMPTS => {
                attempt += 1;
                sleep(PAUSE).await;
            }
            other => return other,
        }
    }
}

/// A new member.
#[derive(Debug)]
pub struct Member<'a> {
    /// Its private key.
    pub key: &'a PrivateKey,
    /// The coordinator.
    pub coordinator: &'a CoordinatorUrl,
    /// Pin of the coordinator's certificate.
    pub pin: Option<Pin>,
    /// Its credential at the coordinator.
    pub credential: &'a Credential,
    /// The coordinator's answer.
    pub joined: &'a Joined,
    /// The UDP port to listen on; `None`: any.
    pub port: Option<u16>,
}

impl Member<'_> {
    /// Returns its configuration as TOML.
    pub fn to_toml(&self) -> Zeroizing<String> {
        // Large enough for all: growing would leave copies of the secrets in freed memory.
        let mut text = Zeroizing::new(String::with_capacity(
            4096 + 64 * self.joined.addresses.len(),
        ));
        text.push_str("# Written by `seikan join`. Holds secrets of this host: do not share it.\n");
        let mut line = |key: &str, value: &str| {
            for part in [key, " = \"", value, "\"\n"] {
                text.push_str(part);
            }
        };
        line("private-key", &encode_key(self.key.as_bytes()));
        line("coordinator", &self.coordinator.to_string());
        if let Some(pin) = self.pin {
            line("coordinator-pin", &pin.to_string());
        }
        line("credential", &self.credential.reveal());
        let addresses = self.joined.addresses.iter();
        let addresses: Vec<String> = addresses.map(|address| format!("\"{address}\"")).collect();
        text.push_str(&format!("address = [{}]\n", addresses.join(", ")));
        if let Some(port) = self.port {
            text.push_str(&format!("listen-port = {port}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_config::{Overrides, Source, Syntax, parse, parse_private_key};

    #[test]
    fn the_configuration_of_a_member_is_one_that_is_read() {
        // RFC 7748, section 6.1: Alice's private key.
        let key = parse_private_key("dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=");
        let credential = format!("skc_{}", "A".repeat(32));
        let pin = Pin::of_certificate(b"a certificate");
        let text = Member {
            key: &key.expect("a key"),
            coordinator: &"https://192.0.2.1:7443".parse().expect("a URL"),
            pin: Some(pin),
            credential: &credential.parse().expect("a credential"),
            joined: &Joined {
                addresses: vec!["100.80.0.1/12".parse().expect("an address")],
            },
            port: Some(7),
        }
        .to_toml();
        let source = Source {
            file: "seikan0.toml".into(),
            syntax: Syntax::Toml,
            text,
        };
        let parsed = parse(&source, &Overrides::default(), &|_| {
            Err(std::io::ErrorKind::NotFound.into())
        });
        assert!(parsed.diagnostics.is_empty(), "{}", parsed.diagnostics);
        let config = parsed.config.expect("a configuration");
        assert_eq!(config.listen_port, Some(7));
        let mesh = config.mesh.expect("a mesh");
        assert_eq!(mesh.coordinator.to_string(), "https://192.0.2.1:7443");
        assert_eq!(mesh.pin, Some(pin));
        assert_eq!(*mesh.credential.reveal(), credential);
    }
}
