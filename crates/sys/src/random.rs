//! Random bytes from the kernel's generator, for keys and indices.

use std::io;

use nix::errno::Errno;

/// Fills `bytes` with getrandom(2), which waits at early boot until the generator is seeded.
///
/// # Errors
/// Those of getrandom(2) except EINTR: in practice only ENOSYS under a seccomp filter.
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        // SAFETY: pointer and length describe `rest`, exclusively borrowed for the call.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match Errno::result(got) {
            // A signal may shorten a request over 256 bytes.
            Ok(got) => filled += got as usize,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fills_to_the_last_byte() {
        // After 64 tries a byte is still zero with probability 2^-512.
        let mut seen = vec![0u8; 4096];
        for _ in 0..64 {
            let mut bytes = vec![0u8; 4096];
            fill(&mut bytes).expect("getrandom");
            seen.iter_mut()
                .zip(&bytes)
                .for_each(|(seen, byte)| *seen |= byte);
        }
        assert!(seen.iter().all(|byte| *byte != 0));
    }
}
