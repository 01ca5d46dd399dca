//! Control sockets: who is found at them, who is not, and what becomes of those of processes that were killed.

use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::common::config;
use crate::common::ranks::start;
use hw_bridge::os::dial::dial;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use wccl::{Runtime, swap};

/// An abstract socket, which any user of the machine can bind under any name, and whose backlog is full.
#[test]
fn who_squats_the_name_of_a_control_socket_stands_in_nobodys_way() {
    let tenant = format!("squatted.{}", std::process::id());
    let runtime = Runtime::open(wccl::RuntimeConfig { tenant: tenant.clone(), ..config() }).unwrap();
    // As one of process 1, which lives.
    let name = SocketAddrUnix::new_abstract_name(format!("wccl-control-{tenant}-1-0").as_bytes()).unwrap();
    let squatter = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&squatter, &name).unwrap();
    rustix::net::listen(&squatter, 0).unwrap();
    let waiting: Vec<_> = std::iter::from_fn(|| dial(&name, None, Instant::now()).ok()).take(100).collect();
    assert!(waiting.len() < 100, "the backlog has an end");
    let all = swap::status(&tenant).unwrap();
    assert_eq!(all.iter().map(|s| s.pid).collect::<Vec<_>>(), [std::process::id()]);
    drop(runtime);
    let e = swap::status(&tenant).unwrap_err().to_string();
    assert!(e.contains("no runtime of that name is open"), "{e}");
}

/// A place for control sockets of a test's own.
struct Session(PathBuf);

impl Session {
    fn new(name: &str) -> Session {
        let at = std::env::temp_dir().join(format!("wccl-session-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&at);
        std::fs::create_dir(&at).unwrap();
        Session(at)
    }

    /// The processes that have sockets in it; none of these is bound but not listening.
    fn pids(&self) -> HashSet<u32> {
        let name = |e: std::io::Result<std::fs::DirEntry>| e.unwrap().file_name().into_string().unwrap();
        let pid = |name: String| {
            assert!(!name.starts_with('+'), "{name}");
            name.split('-').nth(1).unwrap().parse().unwrap()
        };
        std::fs::read_dir(self.0.join("wccl")).unwrap().map(name).map(pid).collect()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A leftover in the temporary folder is harmless.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn ranks(session: &Path, n: usize) -> Vec<crate::common::ranks::Rank> {
    let ranks = start("loop", n, &[("XDG_RUNTIME_DIR", session.to_str().unwrap())]);
    ranks.iter().for_each(|r| assert_eq!(r.line(), "ready"));
    ranks
}

/// They leave a file, and the next process that opens removes it.
#[test]
fn sockets_of_killed_processes_do_not_gather() {
    let session = Session::new("killed");
    for _ in 0..2 {
        let mut all = ranks(&session.0, 2);
        let alive: HashSet<u32> = all.iter().map(|r| r.child.id()).collect();
        assert_eq!(session.pids(), alive);
        all.iter_mut().for_each(|r| r.kill());
        assert_eq!(session.pids(), alive, "a killed process removes nothing");
    }
}

/// Without a directory of its own a program runs, and cannot be swapped: the place that others can enter is not used.
#[test]
fn a_directory_that_others_can_enter_has_no_sockets() {
    let session = Session::new("open");
    let at = session.0.join("wccl");
    std::fs::create_dir(&at).unwrap();
    std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o777)).unwrap();
    let all = ranks(&session.0, 1);
    assert_eq!(session.pids(), HashSet::new());
    drop(all);
}
