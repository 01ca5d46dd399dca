//! Where the host itself listens: no plugin connects there, whatever its policy grants.
//!
//! The one list of a process: who asks may be any tenant's plugin, and every one of them shares the host's addresses.

use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;

use hw_bridge::os::lock::lock;

static ALL: Mutex<Vec<SocketAddr>> = Mutex::new(Vec::new());

/// An address of the host's, until it is dropped.
#[derive(Debug)]
pub struct Own(SocketAddr);

impl Own {
    /// Notes it.
    pub fn new(address: SocketAddr) -> Own {
        lock(&ALL).push(address);
        Own(address)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let mut all = lock(&ALL);
        // Several may have the same.
        if let Some(i) = all.iter().position(|a| *a == self.0) {
            all.swap_remove(i);
        }
    }
}

/// Whether who connects to `to` comes to the host.
pub fn is_own(to: SocketAddr) -> bool {
    // Where this machine's addresses cannot be listed, none is known to be another's.
    let listed = |ip| crate::imports::system::addresses().map_or(true, |all| all.iter().any(|own| own.ip == ip));
    let here = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified() || listed(ip);
    let ip = to.ip().to_canonical();
    let same_port = |a: &&SocketAddr| a.port() == to.port();
    let own: Vec<IpAddr> = lock(&ALL).iter().filter(same_port).map(|a| a.ip().to_canonical()).collect();
    // One that listens everywhere is at every address of this machine; who connects to none of them comes to the loopback.
    own.iter().any(|a| *a == ip || ip.is_unspecified() || a.is_unspecified() && here(ip))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_the_hosts_in_whichever_form_it_is_written() {
        let is = |text: &str| is_own(text.parse().unwrap());
        // Ports that the tests of this crate do not get from the system.
        let one = Own::new("127.0.0.1:7".parse().unwrap());
        for own in ["127.0.0.1:7", "[::ffff:127.0.0.1]:7", "0.0.0.0:7", "[::]:7"] {
            assert!(is(own), "{own}");
        }
        assert!(!is("127.0.0.1:8") && !is("127.0.0.2:7") && !is("203.0.113.1:7"));
        drop(one);
        assert!(!is("127.0.0.1:7"));
        let _everywhere = Own::new("[::]:7".parse().unwrap());
        assert!(is("127.0.0.1:7") && is("127.9.9.9:7") && is("[::1]:7") && !is("203.0.113.1:7"));
        for own in crate::imports::system::addresses().unwrap() {
            assert!(is_own(SocketAddr::new(own.ip, 7)), "{own:?}");
        }
    }
}
