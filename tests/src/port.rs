//! Ports of the loopback interface.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// A port that nobody else gets before this process ends, for whoever listens there with SO_REUSEADDR, as the runtime does: a
/// socket that does not listen stays bound to it, and with that flag on both it is in no listener's way.
///
/// # Panics
/// If the system has no port or no descriptor left.
pub fn free() -> u16 {
    hold(0).unwrap()
}

/// The same, of these ports.
///
/// # Panics
/// If all are taken.
pub fn free_of(ports: RangeInclusive<u16>) -> u16 {
    // Test programs that run side by side do not begin at one place.
    let (first, many) = (*ports.start(), usize::from(ports.end() - ports.start()) + 1);
    let begin = std::process::id() as usize * 61 % many;
    let all = (0..many).map(|i| first + ((begin + i) % many) as u16);
    all.into_iter().find_map(|port| hold(port).ok()).unwrap_or_else(|| panic!("no port of {ports:?} is free"))
}

/// Holds a port, or any one for 0, until this process ends.
fn hold(port: u16) -> rustix::io::Result<u16> {
    static HELD: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
    let held = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Without the flag it is one that no other socket has.
    bind(&held, &std::net::SocketAddr::from(([127, 0, 0, 1], port)))?;
    sockopt::set_socket_reuseaddr(&held, true)?;
    let at = std::net::SocketAddr::try_from(getsockname(&held)?)?;
    HELD.lock().unwrap_or_else(|p| p.into_inner()).push(held);
    Ok(at.port())
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
        let (one, other) = (free_of(20_000..=32_000), free_of(20_000..=32_000));
        assert!(one != other && (20_000..=32_000).contains(&one), "{one} {other}");
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
