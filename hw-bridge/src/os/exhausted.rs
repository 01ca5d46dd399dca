//! What this process has run out of: which limit is behind an error of the system, its value, and how to raise it.
//!
//! Memory here is memfds and their mappings: no file of /dev/shm is made, and nothing is locked, so neither the size of
//! /dev/shm nor RLIMIT_MEMLOCK matters. What matters: descriptors (RLIMIT_NOFILE), address space (RLIMIT_AS), the size of a
//! file (RLIMIT_FSIZE, which the kernel also holds against a memfd), threads (RLIMIT_NPROC, pids.max), memory itself.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::os::control_group::{Groups, Limited};

const ENOMEM: i32 = 12;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const EAGAIN: i32 = 11;

fn value(v: Option<u64>) -> String {
    v.map_or_else(|| "unlimited".into(), |v| v.to_string())
}

/// The words that follow an error of the system if a limit is behind it: `; NAME is VALUE: how to raise it`. Empty for any
/// other error.
pub fn limit_behind(e: &std::io::Error) -> String {
    match e.raw_os_error() {
        Some(EMFILE) => format!("; {}", descriptors()),
        Some(ENFILE) => "; the whole machine is out of file descriptors: raise fs.file-max".into(),
        Some(ENOMEM) => format!("; {}", address_space()),
        Some(EFBIG) => format!("; {}", file_size()),
        Some(ENOSPC) => {
            "; no memory is left: the machine's is used up, or the container's limit (memory.max) is reached".into()
        }
        _ => String::new(),
    }
}

/// The same for a thread that could not be started.
pub fn limit_of_threads(e: &std::io::Error) -> String {
    match e.raw_os_error() {
        Some(EAGAIN) => {
            let own = value(getrlimit(Resource::Nproc).current);
            let mut text = format!("; RLIMIT_NPROC (threads and processes of this user) is {own}");
            if let Some(pids) = Groups::own().least(Limited::Pids) {
                text += &format!(", the container's pids.max is {}", pids.value);
            }
            if let Some(bytes) = getrlimit(Resource::As).current {
                text += &format!(", RLIMIT_AS is {bytes} bytes");
            }
            text + ": raise the one that is reached (ulimit -u, --pids-limit, ulimit -v)"
        }
        _ => limit_behind(e),
    }
}

fn group_value(what: Limited) -> String {
    let groups = Groups::own();
    match groups.least(what) {
        Some(l) => l.value.to_string(),
        None if groups.know(what) => value(None),
        None => "not known here".into(),
    }
}

/// What this process may use of the machine: the name of what, and how much, with the limit that says so.
pub fn limits() -> [(&'static str, String); 4] {
    let (memory, swap) = machine_memory();
    let nofile = getrlimit(Resource::Nofile);
    let of = |resource| value(getrlimit(resource).current);
    [
        (
            "shared memory",
            format!(
                "memory of the machine: {memory} bytes and {swap} of swap; the container's memory.max is {}; a file at most \
                 (RLIMIT_FSIZE) {}; not of /dev/shm, not locked",
                group_value(Limited::Memory),
                of(Resource::Fsize)
            ),
        ),
        ("address space", format!("{} (RLIMIT_AS)", of(Resource::As))),
        (
            "file descriptors",
            format!("{} (RLIMIT_NOFILE), hard limit {}", value(nofile.current), value(nofile.maximum)),
        ),
        (
            "threads and processes",
            format!(
                "{} of this user (RLIMIT_NPROC), the container's pids.max is {}",
                of(Resource::Nproc),
                group_value(Limited::Pids)
            ),
        ),
    ]
}

/// Bytes of memory that processes of this machine, or of this container, could still be given, and which number says so.
pub fn memory_left() -> Option<(u64, String)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let free = parse_available(&text)?;
    Some(match Groups::own().least(Limited::Memory) {
        Some(l) if l.value < free => (l.value, format!("{} allows", l.file.display())),
        _ => (free, "are left on this machine".into()),
    })
}

/// From the text of /proc/meminfo, whose unit is KiB: what could be given without swapping, and what swap space is free.
fn parse_available(text: &str) -> Option<u64> {
    let field = |name: &str| -> Option<u64> {
        text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')?.trim().strip_suffix(" kB")?.parse().ok())
    };
    Some((field("MemAvailable")?.saturating_add(field("SwapFree").unwrap_or(0))).saturating_mul(1024))
}

/// Bytes of the machine's memory and of its swap space.
fn machine_memory() -> (u64, u64) {
    let info = rustix::system::sysinfo();
    let unit = u64::from(info.mem_unit);
    (info.totalram as u64 * unit, info.totalswap as u64 * unit)
}

fn descriptors() -> String {
    let l = getrlimit(Resource::Nofile);
    format!(
        "RLIMIT_NOFILE is {} (hard limit {}) and {} descriptors are open: raise it (ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of a container)",
        value(l.current),
        value(l.maximum),
        open_descriptors().map_or_else(|| "all".into(), |n| n.to_string())
    )
}

fn address_space() -> String {
    match getrlimit(Resource::As).current {
        Some(bytes) => format!(
            "RLIMIT_AS (address space) is {bytes} bytes: raise it (ulimit -v), or ask for less device memory (WCCL_HBM_BYTES)"
        ),
        None => {
            "no memory is left, or the process has more mappings than vm.max_map_count allows; ask for less device \
                 memory (WCCL_HBM_BYTES)"
                .into()
        }
    }
}

fn file_size() -> String {
    let own = value(getrlimit(Resource::Fsize).current);
    format!(
        "RLIMIT_FSIZE is {own} bytes, and shared memory counts as a file: raise it (ulimit -f), or ask for less device \
         memory (WCCL_HBM_BYTES)"
    )
}

/// Whether this process may turn memory that it has written into code, as a compiler must.
///
/// # Errors
/// A sentence about what forbids it.
pub fn may_make_code() -> Result<(), String> {
    // Without memory there is nothing to learn.
    let Ok(page) = memmap2::MmapMut::map_anon(4096) else { return Ok(()) };
    page.make_exec().map(drop).map_err(|e| {
        format!(
            "this process may not make memory executable ({e}): PR_SET_MDWE, MemoryDenyWriteExecute= of systemd, SELinux \
             (execmem) or another policy forbids it; plugins are compiled to machine code on this machine, so allow it here"
        )
    })
}

/// Whether a memfd may have `bytes`. Asked before it is sized, because the kernel does not only refuse: it sends SIGXFSZ,
/// which ends the process.
pub fn file_of(bytes: u64) -> Result<(), std::io::Error> {
    match getrlimit(Resource::Fsize).current {
        Some(most) if bytes > most => Err(std::io::Error::from_raw_os_error(EFBIG)),
        _ => Ok(()),
    }
}

/// Descriptors open now; `None` if the kernel's list of them cannot be read.
pub fn open_descriptors() -> Option<u64> {
    // The directory that is being read is one of them.
    std::fs::read_dir("/proc/self/fd").ok().map(|d| (d.count() as u64).saturating_sub(1))
}

/// Raises the soft limit of descriptors to the hard one, as far as the kernel lets it; answers what it is then, `None` for no
/// limit. Doing it again changes nothing.
pub fn raise_descriptors() -> Option<u64> {
    let l = getrlimit(Resource::Nofile);
    if l.current != l.maximum {
        match setrlimit(Resource::Nofile, Rlimit { current: l.maximum, maximum: l.maximum }) {
            Ok(()) => return l.maximum,
            Err(e) => tracing::debug!("the soft limit of descriptors stays {}: {e}", value(l.current)),
        }
    }
    l.current
}

/// Whether `need` more descriptors can be opened; else the sentence that says so, without its subject.
pub fn room_for(need: u64) -> Result<(), String> {
    let (Some(open), Some(most)) = (open_descriptors(), raise_descriptors()) else { return Ok(()) };
    if open.saturating_add(need) <= most {
        return Ok(());
    }
    let hard = value(getrlimit(Resource::Nofile).maximum);
    let wanted = open.saturating_add(need).next_power_of_two();
    Err(format!(
        "needs {need} file descriptors, {open} are open, and RLIMIT_NOFILE allows {most} (hard limit {hard}): raise the hard \
         limit to {wanted} (ulimit -Hn {wanted}, LimitNOFILE={wanted} of systemd, --ulimit nofile={wanted} of a container)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_named_with_its_value() {
        let behind = |n| limit_behind(&std::io::Error::from_raw_os_error(n));
        let own = value(getrlimit(Resource::Nofile).current);
        assert!(behind(EMFILE).contains(&format!("RLIMIT_NOFILE is {own} (hard limit")), "{}", behind(EMFILE));
        assert!(behind(ENFILE).contains("fs.file-max"));
        assert!(behind(ENOMEM).contains("WCCL_HBM_BYTES"));
        assert!(behind(EFBIG).contains("RLIMIT_FSIZE"));
        assert!(behind(ENOSPC).contains("memory.max"));
        assert_eq!(behind(EAGAIN), "");
        let threads = limit_of_threads(&std::io::Error::from_raw_os_error(EAGAIN));
        let own = value(getrlimit(Resource::Nproc).current);
        assert!(threads.contains(&format!("RLIMIT_NPROC (threads and processes of this user) is {own}")), "{threads}");
        assert!(limit_of_threads(&std::io::Error::from_raw_os_error(ENOMEM)).contains("WCCL_HBM_BYTES"));
    }

    #[test]
    fn what_memory_is_left_is_read() {
        let text = "MemTotal:       16384000 kB\nMemAvailable:    8000 kB\nSwapTotal: 5 kB\nSwapFree:  2000 kB\n";
        assert_eq!(parse_available(text), Some(10_000 * 1024));
        assert_eq!(parse_available("MemTotal: 5 kB\n"), None);
        assert!(memory_left().is_some_and(|(bytes, _)| bytes > 0));
    }

    #[test]
    fn a_need_beyond_the_limit_is_one_sentence_with_need_limit_and_remedy() {
        assert_eq!(room_for(1), Ok(()));
        let Some(most) = raise_descriptors() else { return };
        assert_eq!(getrlimit(Resource::Nofile).current, Some(most));
        let e = room_for(most).unwrap_err();
        assert!(e.starts_with(&format!("needs {most} file descriptors")), "{e}");
        assert!(e.contains(&format!("RLIMIT_NOFILE allows {most}")) && e.contains("ulimit -Hn"), "{e}");
    }
}
