//! Sends bytes to a port inside a tunnel for some seconds: `send FILE HOST:PORT SECONDS`.

use seikan::{Config, Tunnel};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [file, server, seconds] = &words[..] else {
        return Err("usage: send FILE HOST:PORT SECONDS".into());
    };
    let tunnel = Tunnel::connect(Config::from_file(file)?).await?;
    let mut stream = tunnel.tcp_connect(server.as_str()).await?;
    let chunk = vec![0; 256 << 10];
    let end = Instant::now() + Duration::from_secs(seconds.parse()?);
    while Instant::now() < end {
        stream.write_all(&chunk).await?;
    }
    drop(stream);
    tunnel.close().await;
    Ok(())
}
