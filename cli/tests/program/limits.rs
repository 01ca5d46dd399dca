//! What a user of the program reads when the machine, the container or a hardened service does not give what is asked for.

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

/// A service whose unit has MemoryDenyWriteExecute=.
#[test]
fn executable_memory_that_is_forbidden_is_named() {
    const PR_SET_MDWE: i32 = 65;
    let forbidding = || {
        let mut command = wccl();
        // SAFETY: one system call between fork and exec, of this process alone.
        unsafe {
            command.pre_exec(|| match libc::prctl(PR_SET_MDWE, 1u64, 0u64, 0u64, 0u64) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        command
    };
    if forbidding().arg("--version").output().is_err() {
        println!("skipped: this kernel (before 6.3) cannot forbid it");
        return;
    }
    for cache in ["off", "cache"] {
        let dir = Dir::new("mdwe");
        let cache = if cache == "off" { cache.into() } else { dir.0.join(cache).display().to_string() };
        let out = forbidding().args(SMALL).env("WCCL_CACHE_DIR", &cache).output().unwrap();
        assert!(!out.status.success());
        has(&said(&out), &["its code cannot be used: this process may not make memory executable", "PR_SET_MDWE"]);
    }
}

/// Only a user other than root has that limit. What else needs a thread says so; nothing panics.
#[test]
fn a_plugin_is_compiled_where_few_threads_can_be_started() {
    let program = env!("CARGO_BIN_EXE_wccl");
    let plugin = std::path::Path::new(program).parent().unwrap().join("../plugins/nccom.wasm");
    let other = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let dry = Command::new("setpriv").args(other).args(["test", "-x", program, "-a", "-r"]).arg(&plugin).status();
    if !dry.is_ok_and(|s| s.success()) {
        println!(
            "skipped: cannot become another user here (needs root and util-linux), or that one cannot run {program}"
        );
        return;
    }
    for most in 1..5 {
        let limit = format!("--nproc={most}");
        let mut command = Command::new("setpriv");
        command.args(other).args(["prlimit", &limit, program, "plugin", "check"]).arg(&plugin);
        let out = command.env("WCCL_CACHE_DIR", "off").output().unwrap();
        let text = said(&out);
        assert!(!text.contains("panicked"), "{most}: {text}");
        assert!(out.status.success() || text.contains("RLIMIT_NPROC"), "{most}: {text}");
    }
}
