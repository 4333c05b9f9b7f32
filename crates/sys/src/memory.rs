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

/// Unmaps the code and the constants of this program. Those that are used again are mapped again from the file, which is in
/// the page cache. A start needs much more code than what runs after it: the parser of the configuration, netlink, TLS. It
/// would stay in the resident memory of the process until the kernel needs memory.
pub fn unmap_code() {
    // SAFETY: the callback has the signature that the function wants, and takes no data.
    unsafe { libc::dl_iterate_phdr(Some(unmap_program), std::ptr::null_mut()) };
}

/// Unmaps the segments of one object that are never written. Returns 1: only the first object, the program itself, counts.
unsafe extern "C" fn unmap_program(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    _data: *mut libc::c_void,
) -> libc::c_int {
    // SAFETY: the caller passes a valid object with its program headers.
    let (info, headers) = unsafe {
        let info = &*info;
        let count = usize::from(info.dlpi_phnum);
        (info, std::slice::from_raw_parts(info.dlpi_phdr, count))
    };
    // SAFETY: sysconf has no precondition.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    for header in headers {
        if header.p_type != libc::PT_LOAD || header.p_flags & libc::PF_W != 0 {
            continue;
        }
        // The last page may also have the begin of the next segment, which is written.
        let begin = (info.dlpi_addr as usize + header.p_vaddr as usize).next_multiple_of(page);
        let end = info.dlpi_addr as usize + header.p_vaddr as usize + header.p_memsz as usize;
        let length = (end - end % page).saturating_sub(begin);
        if length > 0 {
            // SAFETY: the range is a private mapping of a file whose pages were never written, relocations included: they
            // are in segments that can be written. Its content is the same when it is mapped again.
            unsafe { libc::madvise(begin as *mut libc::c_void, length, libc::MADV_DONTNEED) };
        }
    }
    1
}

#[cfg(test)]
mod code_tests {
    #[test]
    fn code_leaves_the_process_and_runs_on() {
        // Pages of files (proc_pid_statm(5)).
        let pages = || -> usize {
            let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
            let shared = statm.split(' ').nth(2).expect("shared");
            shared.parse().expect("number")
        };
        let before = pages();
        super::unmap_code();
        let after = pages();
        assert!(after < before, "{before} pages before, {after} after");
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
