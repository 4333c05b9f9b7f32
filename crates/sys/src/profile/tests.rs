use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::testing::skip;

/// Spends time in a function with a telling name.
#[inline(never)]
fn chacha20_test_block(stop: &AtomicBool) -> u32 {
    let mut state = [0x6170_7865u32; 16];
    while !stop.load(Ordering::Relaxed) {
        for word in 0..16 {
            state[word] = state[(word + 1) % 16]
                .wrapping_add(state[word])
                .rotate_left(7);
        }
    }
    black_box(state[0])
}

/// Samples this process for a while with one busy thread; `None` if the kernel refuses.
fn sampled(options: Options, seconds: f64) -> Option<RawProfile> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| chacha20_test_block(&stop));
        let outcome = Profiler::start(Some(std::process::id()), options);
        if let Ok(profiler) = outcome {
            std::thread::sleep(Duration::from_secs_f64(seconds));
            let profile = profiler.stop();
            stop.store(true, Ordering::Relaxed);
            return Some(profile);
        }
        stop.store(true, Ordering::Relaxed);
        skip(&outcome.err().map(|error| error.to_string())?);
        None
    })
}

#[test]
fn a_busy_thread_is_seen_in_its_function() {
    let Some(raw) = sampled(Options::default(), 1.0) else {
        return;
    };
    let functions = raw.functions();
    let leading = functions
        .functions
        .iter()
        .max_by_key(|function| function.program)
        .expect("samples");
    assert!(
        leading.symbol.ends_with("::chacha20_test_block"),
        "{functions:?}"
    );
    assert!(leading.program * 2 > functions.program, "{functions:?}");
}

#[test]
fn threads_alone_are_sampled_where_the_machine_may_not_be() {
    let clock = Clock {
        hz: 999,
        stacks: false,
        user_only: true,
    };
    let stop = AtomicBool::new(false);
    let tid = std::sync::atomic::AtomicU32::new(0);
    let raw = std::thread::scope(|scope| {
        scope.spawn(|| {
            tid.store(nix::unistd::gettid().as_raw() as u32, Ordering::Relaxed);
            chacha20_test_block(&stop)
        });
        while tid.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let main = Some(std::process::id());
        let tasks = [main, Some(tid.load(Ordering::Relaxed))];
        let opened = open(clock, &online().unwrap(), &tasks);
        let raw = opened.map(|(events, rings)| {
            events.iter().for_each(|event| event.enable().unwrap());
            std::thread::sleep(Duration::from_millis(500));
            let profiler = Profiler {
                events,
                rings,
                buffer: Vec::new(),
                stacks: false,
                hz: clock.hz,
                profile: RawProfile::new(main, Scope::ProgramOnly, Vec::new()),
            };
            profiler.stop()
        });
        stop.store(true, Ordering::Relaxed);
        raw
    });
    let raw = match raw {
        Ok(raw) => raw,
        Err(error) => return skip(&error.to_string()),
    };
    let own =
        |location: &Location| location.pid == std::process::id() && location.mode == Mode::User;
    assert!(raw.locations.keys().all(own), "{:?}", raw.locations);
    let functions = raw.functions();
    assert!(!functions.machine && functions.program == functions.samples);
    let first = &functions.functions[0].symbol;
    assert!(first.ends_with("::chacha20_test_block"), "{functions:?}");
}

#[test]
fn samples_above_the_ring_size_count_as_lost() {
    let fast = Options {
        hz: 20_000,
        stacks: true,
    };
    // 256 KiB hold some 5,000 samples with short stacks, two seconds bring tens of thousands.
    let Some(raw) = sampled(fast, 2.0) else {
        return;
    };
    assert!(raw.lost > 0, "{} locations", raw.locations.len());
}

#[test]
fn stacks_lead_to_the_function() {
    let options = Options {
        hz: 199,
        stacks: true,
    };
    let Some(raw) = sampled(options, 0.5) else {
        return;
    };
    assert_eq!(raw.lost, 0);
    let functions = raw.functions();
    let ours = |stack: &Vec<String>| stack.iter().any(|frame| frame.contains("chacha20_test"));
    let found = functions.stacks.iter().any(|(stack, _)| ours(stack));
    assert!(found, "{:?}", functions.stacks);
    assert!(functions.idle + functions.samples >= 50, "{functions:?}");
}

#[test]
fn a_ring_is_drained_around_its_end_many_times() {
    let options = Options {
        hz: 20_000,
        stacks: true,
    };
    let Ok(mut profiler) = Profiler::start(None, options) else {
        skip("the machine cannot be sampled");
        return;
    };
    let stop = AtomicBool::new(false);
    let raw = std::thread::scope(|scope| {
        scope.spawn(|| chacha20_test_block(&stop));
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(20));
            profiler.drain();
        }
        stop.store(true, Ordering::Relaxed);
        profiler.stop()
    });
    let samples: u64 = raw.locations.values().sum();
    // Each takes 48 bytes or more: several times the ring.
    assert!(samples * 48 > 2 * (RING_PAGES as u64) * 4096, "{samples}");
    let kernel_or_user = raw.locations.keys().all(|location| match location.mode {
        Mode::Kernel => location.address >= 1 << 63,
        Mode::User => location.address < 1 << 47,
        Mode::Guest => true,
    });
    assert!(kernel_or_user, "{:?}", raw.locations);
}

#[test]
fn a_process_that_does_not_exist_is_an_error() {
    let mut unseen = Vec::new();
    let outcome = threads(u32::MAX / 2, 2, &mut unseen);
    assert!(matches!(outcome, Err(ProfileError::NoProgram { .. })));
}

#[test]
fn lists_of_processors_are_read() {
    assert_eq!(parse_list("0-2,5"), [0, 1, 2, 5]);
    assert_eq!(parse_list("0"), [0]);
    assert_eq!(parse_list(""), Vec::<u32>::new());
    assert!(parse_list("0-4294967295").len() <= 65_536);
    assert_eq!(parse_list("x-3,9-1,-"), Vec::<u32>::new());
}

#[test]
fn records_of_another_shape_do_no_harm() {
    let mut profile = RawProfile::new(None, Scope::Machine, Vec::new());
    profile.count(&[0xff; 100], false);
    assert_eq!((profile.lost, profile.locations.len()), (1, 0));
}

#[test]
fn a_file_that_is_no_program_has_no_functions() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x");
    let own = std::fs::read("/proc/self/exe").unwrap();
    for length in [0, 4, 16, 63, 64, 200, 4096] {
        std::fs::write(&path, &own[..length]).unwrap();
        let elf = elf::Elf::read(&[&path], &elf::Budget::new());
        assert!(elf.is_none_or(|elf| elf.find(0x1000).is_none()), "{length}");
    }
    // Every byte of the header in turn, with the symbol tables where it says or elsewhere.
    let mut bytes = own[..own.len().min(1 << 20)].to_vec();
    for at in 0..64 {
        let before = std::mem::replace(&mut bytes[at], 0xff);
        std::fs::write(&path, &bytes).unwrap();
        _ = elf::Elf::read(&[&path], &elf::Budget::new());
        bytes[at] = before;
    }
    assert!(elf::Elf::read(&["/dev/zero"], &elf::Budget::new()).is_none());
}
