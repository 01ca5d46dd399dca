//! What a user of the program reads when the machine, the container or a hardened service does not give what is asked for.

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::common::{Dir, has, said, wccl};

const SMALL: [&str; 8] = ["bench", "-r", "2", "-b", "8", "-e", "8", "allreduce"];

#[test]
fn a_size_beyond_memory_is_one_sentence() {
    let out = wccl().args(["bench", "-r", "2", "--buffers", "host", "-b", "10240G", "-e", "10T"]).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    has(&said(&out), &["wccl: 10T for each of 2 ranks in host memory", "43980465111296 bytes in all", "ask for less"]);
    assert_eq!(said(&out).lines().count(), 1, "{}", said(&out));
    let out = wccl().args(["bench", "-r", "4", "-b", "4194304T", "-e", "4194304T"]).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    has(&said(&out), &["more than 2^63 bytes in all"]);
}

/// A home of which nothing can be made: one warning for all ranks.
#[test]
fn a_cache_that_cannot_be_written_is_said_once() {
    let dir = Dir::new("no-home");
    // Below a file there is no directory, for root neither.
    let home = dir.file("home", "");
    let out = wccl().args(SMALL).env_remove("XDG_CACHE_HOME").env_remove("WCCL_CACHE_DIR").env("HOME", &home).output();
    let out = out.unwrap();
    let text = said(&out);
    assert!(out.status.success(), "{text}");
    assert_eq!(text.matches("compiled plugins are not kept, and every process compiles anew").count(), 1, "{text}");
    has(&text, &[&home.display().to_string(), "set WCCL_CACHE_DIR"]);
}

/// A service whose unit has MemoryDenyWriteExecute=: a filter as systemd sets it where the kernel has no other way.
#[test]
fn executable_memory_that_is_forbidden_is_named() {
    let forbidding = || {
        let mut command = wccl();
        // SAFETY: two system calls between fork and exec, of this process alone.
        unsafe { command.pre_exec(forbid_executable_memory) };
        command
    };
    for cache in ["off", "cache"] {
        let dir = Dir::new("mdwe");
        let cache = if cache == "off" { cache.into() } else { dir.0.join(cache).display().to_string() };
        let out = forbidding().args(SMALL).env("WCCL_CACHE_DIR", &cache).output().unwrap();
        assert!(!out.status.success());
        has(&said(&out), &["its code cannot be used: this process may not make memory executable", "PR_SET_MDWE"]);
    }
}

/// From here on mprotect refuses this process memory that is executable.
fn forbid_executable_memory() -> std::io::Result<()> {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W};
    let step = |code, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    // Of `seccomp_data`: the call's number, and the low half of its third argument.
    const NUMBER: u32 = 0;
    const PROTECTION: u32 = 32;
    let mut steps = [
        step(BPF_LD | BPF_W | BPF_ABS, 0, 0, NUMBER),
        step(BPF_JMP | BPF_JEQ | BPF_K, 0, 3, libc::SYS_mprotect as u32),
        step(BPF_LD | BPF_W | BPF_ABS, 0, 0, PROTECTION),
        step(BPF_JMP | BPF_JSET | BPF_K, 0, 1, libc::PROT_EXEC as u32),
        step(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the filter and its steps live until both calls have returned.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1u64, 0u64, 0u64, 0u64) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    };
    if set { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Only a user other than root has that limit. What else needs a thread says so; nothing panics. Both files are reached by
/// descriptors: another user may not be let into the directory where they lie.
#[test]
fn a_plugin_is_compiled_where_few_threads_can_be_started() {
    let program = env!("CARGO_BIN_EXE_wccl");
    let plugin = std::path::Path::new(program).parent().unwrap().join("../plugins/nccom.wasm");
    let files = [program.as_ref(), plugin.as_path()].map(|path| {
        let file = std::fs::File::open(path).unwrap();
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
        file
    });
    let [program, plugin] = files.each_ref().map(|file| format!("/proc/self/fd/{}", file.as_raw_fd()));
    for most in 1..5 {
        let mut command = match rustix::process::geteuid().is_root() {
            true => {
                let mut setpriv = Command::new("setpriv");
                setpriv.args(["--reuid=65534", "--regid=65534", "--clear-groups", "prlimit"]);
                setpriv
            }
            false => Command::new("prlimit"),
        };
        command.args([&format!("--nproc={most}"), &program, "plugin", "check", &plugin]).current_dir("/");
        let out = command.env("WCCL_CACHE_DIR", "off").output().unwrap();
        let text = said(&out);
        assert!(!text.contains("panicked"), "{most}: {text}");
        assert!(out.status.success() || text.contains("RLIMIT_NPROC"), "{most}: {text}");
    }
}
