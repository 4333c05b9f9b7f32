//! A recording of a real tunnel under load, drawn.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{World, in_world, stderr};

/// Runs `work` while a TCP connection sends through the tunnel at full speed.
fn under_load<T>(world: &World, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        let (left, right) = (&world.left.namespace, &world.right.namespace);
        let listener = right.run(|| TcpListener::bind("10.80.0.2:9000").expect("bind"));
        let listener = listener.expect("namespace");
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().expect("accept");
            let mut buffer = vec![0; 1 << 16];
            while stream.read(&mut buffer).is_ok_and(|length| length > 0) {}
        });
        scope.spawn(move || {
            let sent = left.run(|| {
                let mut stream = TcpStream::connect("10.80.0.2:9000").expect("connect");
                let patience = Some(Duration::from_secs(5));
                stream.set_write_timeout(patience).expect("timeout");
                while !stop.load(Ordering::Relaxed) && stream.write_all(&[7; 1 << 16]).is_ok() {}
            });
            sent.expect("namespace");
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn report(world: &World, words: &[&str]) -> Vec<String> {
    let words = [&["report"], words].concat();
    let output = world.run(&world.left, &words);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_recorded_tunnel_is_drawn_and_the_page_needs_nothing_else() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let folder = world.folder.path();
        let file = folder.join("slow.parquet");
        let file = file.to_str().expect("UTF-8");
        let iface = &world.left.interface;
        let words = [
            "doctor",
            "--iface",
            iface,
            "--seconds",
            "5",
            "--record",
            file,
        ];
        let output = under_load(world, || world.run(&world.left, &words));
        assert!(output.status.success(), "{}", stderr(&output));

        let page_file = folder.join("slow.html");
        assert_eq!(report(world, &[file]), [page_file.display().to_string()]);
        let page = std::fs::read_to_string(&page_file).expect("page");
        // Functions depend on the machine; the rest does not.
        for section in [
            "findings",
            "path",
            "pictures",
            "timeline",
            "sequence",
            "distribution",
            "softirq",
            "absent",
        ] {
            assert!(page.contains(&format!("id=\"{section}\"")), "{section}");
        }
        assert!(page.contains(iface.as_str()));
        for reference in ["src=", "href=\"http", "url(", "@import", "<script", "<link"] {
            assert!(!page.contains(reference), "{reference}");
        }

        let pictures = folder.join("pictures");
        let directory = pictures.to_str().expect("UTF-8");
        let written = report(world, &[file, "--svg", directory]);
        assert!(
            written.contains(&format!("{directory}/timeline.svg")),
            "{written:?}"
        );
        for name in &written {
            let svg = std::fs::read_to_string(Path::new(name)).expect("picture");
            assert!(
                svg.starts_with("<svg ") && svg.ends_with("</svg>\n"),
                "{name}"
            );
        }

        // Drawn by seikan-lab, beside the program.
        let output = world.run(&world.left, &["report", file, "--png", directory]);
        if stderr(&output).contains("no font") {
            eprintln!("SKIPPED: no font");
            return;
        }
        assert!(output.status.success(), "{}", stderr(&output));
        let png = std::fs::read(pictures.join("timeline.png")).expect("picture");
        // PNG specification, section 5.2.
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"));
    });
}

#[test]
fn other_files_than_recordings_are_refused() {
    in_world([""; 2], |world| {
        let file = world.folder.path().join("no.parquet");
        std::fs::write(&file, "hello").expect("write");
        let file = file.to_str().expect("UTF-8");
        let output = world.run(&world.left, &["report", file]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(file), "{}", stderr(&output));
        assert!(!world.folder.path().join("no.html").exists());
    });
}
