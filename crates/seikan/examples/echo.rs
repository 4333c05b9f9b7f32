//! Joins a mesh and serves TCP and UDP echo on port 7 there: `echo URL PIN TOKEN NAME FILE`.

use seikan::{Join, Tunnel};
use tokio::io::{copy, split};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [url, pin, token, name, file] = &words[..] else {
        return Err("usage: echo URL PIN TOKEN NAME FILE".into());
    };
    let tunnel = Tunnel::join(Join::new(url, token, name, file).pin(pin)).await?;
    let datagrams = tunnel.udp_bind(7).await?;
    tokio::spawn(async move {
        let mut buf = [0; 2048];
        while let Ok((length, from)) = datagrams.recv_from(&mut buf).await {
            let _ = datagrams.send_to(&buf[..length], from).await;
        }
    });
    let mut listener = tunnel.tcp_listen(7).await?;
    println!("{name} listens");
    loop {
        let (mut from, mut to) = split(listener.accept().await?);
        tokio::spawn(async move {
            let _ = copy(&mut from, &mut to).await;
        });
    }
}
