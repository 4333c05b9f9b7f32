//! Fetches a page from a web server inside a tunnel: `fetch FILE HOST:PORT`.

use seikan::{Config, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(file), Some(server)) = (words.next(), words.next()) else {
        return Err("usage: fetch FILE HOST:PORT".into());
    };
    // As for `seikan up FILE --userspace`.
    let tunnel = Tunnel::connect(Config::from_file(file)?).await?;
    let mut stream = tunnel.tcp_connect(server.as_str()).await?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    print!("{answer}");
    tunnel.close().await;
    Ok(())
}
