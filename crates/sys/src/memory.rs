//! Memory of this process.

/// Blocks of this size and above are mapped by themselves.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 256 << 10;

/// Makes the allocator of the C library return every large block to the kernel as soon as it is freed. Otherwise glibc keeps
/// blocks of the size of those that were freed before (`M_MMAP_THRESHOLD`, mallopt(3)), and clears them by writing when they
/// are used again. musl maps large blocks always.
pub fn return_large_blocks() {
    // SAFETY: mallopt takes the lock of the allocator; it only changes its parameters.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    fn resident_pages() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
        let resident = statm.split(' ').nth(1).expect("resident");
        resident.parse().expect("number")
    }

    #[test]
    fn freed_blocks_leave_the_process() {
        return_large_blocks();
        let before = resident_pages();
        for _ in 0..4 {
            let blocks: Vec<Vec<u8>> = (0..8).map(|_| vec![1; 4 << 20]).collect();
            assert!(resident_pages() > before + 8 * 1024 - 100);
            drop(std::hint::black_box(blocks));
        }
        assert!(resident_pages() < before + 1024);
    }
}
