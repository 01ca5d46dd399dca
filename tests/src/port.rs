//! Ports of the loopback interface.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// A port that nobody else gets before this process ends, for whoever listens there with SO_REUSEADDR, as the runtime does: a
/// socket that does not listen stays bound to it, and with that flag on both it is in no listener's way.
///
/// # Panics
/// If the system has no port or no descriptor left.
pub fn free() -> u16 {
    static HELD: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
    let held = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    // Without the flag the kernel chooses a port that no other socket has.
    bind(&held, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    sockopt::set_socket_reuseaddr(&held, true).unwrap();
    let at = std::net::SocketAddr::try_from(getsockname(&held).unwrap()).unwrap();
    HELD.lock().unwrap_or_else(|p| p.into_inner()).push(held);
    at.port()
}

/// Whether this process listens on a port of an IPv4 address, as the kernel tells.
///
/// # Panics
/// Without /proc.
pub fn is_ours(port: u16) -> bool {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|fd| std::fs::read_link(fd.path()));
    let sockets: HashSet<String> = links.flatten().map(|to| to.to_string_lossy().into_owned()).collect();
    std::fs::read_to_string("/proc/self/net/tcp").unwrap().lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, "0A", _, _, _, _, _, inode, ..] = words[..] else { return false };
        local.ends_with(&format!(":{port:04X}")) && sockets.contains(&format!("socket:[{inode}]"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_port_is_free_for_a_listener_and_for_nobody_else() {
        let ports: HashSet<u16> = (0..100).map(|_| free()).collect();
        assert_eq!(ports.len(), 100);
        let port = free();
        assert!(!is_ours(port), "it is bound and not listened on");
        for _ in 0..2 {
            let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
            assert!(is_ours(port));
            drop(listener);
            assert!(!is_ours(port));
        }
    }
}
