//! Names on this machine: a local root publishes its address under (id, name), its peers look it up.
//!
//! A published name is an abstract unix socket whose name is a hash of tenant, key and name; a small thread answers each
//! visitor with the 28 bytes. Only processes of the same user are served or believed.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use hw_bridge::credentials;
use hw_bridge::dial::dial;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::SocketAddrUnix;
use sha2::{Digest, Sha256};

use super::{Answer, Trap};
use crate::bindings::neuron::hw::rendezvous::Host;
use crate::limits::{ADDRESS_BYTES, ID_BYTES};
use crate::plugin::HostState;
use crate::status::Status;
use crate::tenant::Counted;

/// Pause between two look-ups of a name that is not there yet.
const PAUSE: Duration = Duration::from_millis(5);

/// A published name; dropping it withdraws it.
#[derive(Debug)]
pub(crate) struct Published {
    stop: OwnedFd,
    thread: Option<std::thread::JoinHandle<()>>,
    _counted: Counted,
}

impl Drop for Published {
    fn drop(&mut self) {
        // Our own event: the write cannot fail in a way that matters.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

fn socket_name(tenant: u64, key: &[u8], name: &str) -> String {
    let mut h = Sha256::new();
    h.update(tenant.to_le_bytes());
    h.update(key);
    h.update(name.as_bytes());
    let hex: String = h.finalize()[..20].iter().map(|b| format!("{b:02x}")).collect();
    format!("wccl-rdv-{hex}")
}

fn same_user(stream: &UnixStream) -> bool {
    credentials::of_peer(stream).is_ok_and(|c| credentials::same_user(&c))
}

fn serve(listener: &UnixListener, stop: &OwnedFd, address: [u8; ADDRESS_BYTES]) {
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        if fds[0].revents().is_empty() {
            continue;
        }
        match listener.accept() {
            Ok((mut visitor, _)) if same_user(&visitor) => {
                // 28 bytes always fit the socket's buffer; a visitor that left does not matter.
                let _ = visitor.write_all(&address);
            }
            Ok(_) => {}
            // Out of descriptors: the visitor asks again.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

impl HostState {
    fn do_publish(&mut self, key: &[u8], name: &str, address: &[u8]) -> Answer<()> {
        let Ok(address) = <[u8; ADDRESS_BYTES]>::try_from(address) else {
            return Err(self.fail(
                Status::INVALID,
                format!("an address has {ADDRESS_BYTES} bytes, the plugin gave {}", address.len()),
            ));
        };
        if key.len() > ID_BYTES || name.len() > ID_BYTES {
            let why = format!("a name is published with a key and text of at most {ID_BYTES} bytes");
            return Err(self.fail(Status::INVALID, why));
        }
        let most = self.tenant.limits.names;
        let Some(counted) = self.tenant.names.take(most) else {
            return Err(self.refuse(Status::RESOURCE, "limits.names", "asked to publish one more name", most));
        };
        let tenant = self.tenant.id;
        let made = (|| {
            let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(socket_name(tenant, key, name))?)?;
            // A visitor that leaves between the wait and the accept must not block the thread.
            listener.set_nonblocking(true)?;
            let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
            let stop_copy = stop.try_clone()?;
            let thread = std::thread::Builder::new()
                .name("wccl-rendezvous".into())
                .spawn(move || serve(&listener, &stop_copy, address))?;
            Ok::<_, std::io::Error>(Published { stop, thread: Some(thread), _counted: counted })
        })();
        match made {
            Ok(p) => {
                self.published.push(p);
                Ok(())
            }
            Err(e) => Err(self.fail(
                Status::FAILURE,
                format!("publishing `{name}` failed: {e}; is another local root of the same group running?"),
            )),
        }
    }

    fn do_lookup(&mut self, key: &[u8], name: &str, ms: u32) -> Answer<Vec<u8>> {
        if key.len() > ID_BYTES || name.len() > ID_BYTES {
            return Err(self.fail(
                Status::INVALID,
                format!("a name is looked up with a key and text of at most {ID_BYTES} bytes"),
            ));
        }
        let mut wait = self.wait_until(self.deadline(ms));
        loop {
            // Without waiting: who has the name may have its backlog full and never accept.
            let at = SocketAddrUnix::new_abstract_name(socket_name(self.tenant.id, key, name).as_bytes());
            let asked = at.and_then(|at| dial(&at, None, Instant::now())).map_err(std::io::Error::from);
            let asked = asked.and_then(|mut s| {
                if !same_user(&s) {
                    return Err(std::io::ErrorKind::PermissionDenied.into());
                }
                s.set_read_timeout(Some(Duration::from_secs(1)))?;
                let mut address = vec![0; ADDRESS_BYTES];
                s.read_exact(&mut address)?;
                Ok(address)
            });
            match asked {
                Ok(address) => return Ok(address),
                Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
                    return Err(self.fail(Status::FAILURE, format!("`{name}` is published by another user's process")));
                }
                Err(_) => {}
            }
            if wait.left().is_none() {
                return Err(self.fail(Status::TIMEOUT, format!("nobody published `{name}` on this machine for {ms} ms; is the first rank of this server running?")));
            }
            let event = self.abort.event();
            let mut fds = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
            let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(PAUSE.subsec_nanos()) };
            if matches!(poll(&mut fds, Some(&pause)), Ok(n) if n > 0) {
                let why = format!("looking `{name}` up was aborted: {}", self.abort.reason());
                return Err(self.fail(Status::CLOSED, why));
            }
        }
    }
}

impl Host for HostState {
    fn publish(&mut self, key: Vec<u8>, name: String, address: Vec<u8>) -> Trap<Answer<()>> {
        Ok(self.do_publish(&key, &name, &address))
    }

    fn lookup(&mut self, key: Vec<u8>, name: String, ms: u32) -> Trap<Answer<Vec<u8>>> {
        Ok(self.do_lookup(&key, &name, ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::abort::AbortToken;
    use crate::limits::Limits;
    use crate::tenant::{Tenant, limited};

    fn tenant(names: usize) -> Arc<Tenant> {
        limited(Limits { names, wall: Duration::from_secs(10), ..Limits::default() })
    }

    fn instance(tenant: &Arc<Tenant>) -> HostState {
        HostState::new(tenant.clone(), None, AbortToken::new().unwrap(), Some(0))
    }

    fn said(s: &mut HostState) -> String {
        s.take_causes().0.join("; ")
    }

    #[test]
    fn names_are_counted_for_the_tenant_until_they_are_withdrawn() {
        let (tenant, key) = (tenant(2), std::process::id().to_le_bytes());
        let (mut one, mut other) = (instance(&tenant), instance(&tenant));
        one.do_publish(&key, "a", &[1; ADDRESS_BYTES]).unwrap();
        other.do_publish(&key, "b", &[2; ADDRESS_BYTES]).unwrap();
        for s in [&mut one, &mut other] {
            assert!(s.do_publish(&key, "c", &[3; ADDRESS_BYTES]).is_err());
            let said = said(s);
            assert!(said.contains("asked to publish one more name; limits.names grants 2"), "{said}");
        }
        assert_eq!(other.do_lookup(&key, "a", 10_000).unwrap(), [1; ADDRESS_BYTES]);
        one.release();
        // What is refused for another reason gives its place back.
        assert!(one.do_publish(&key, "b", &[3; ADDRESS_BYTES]).is_err());
        assert_eq!(tenant.names.alive(), 1);
        one.do_publish(&key, "a", &[3; ADDRESS_BYTES]).unwrap();
        assert_eq!(other.do_lookup(&key, "a", 10_000).unwrap(), [3; ADDRESS_BYTES]);
    }

    #[test]
    fn a_look_up_of_what_nobody_publishes_ends_in_time_or_with_the_abort() {
        let (mut s, key) = (instance(&tenant(1)), std::process::id().to_le_bytes());
        assert!(s.do_lookup(&key, "nobody", 30).is_err());
        let in_time = said(&mut s);
        assert!(in_time.contains("nobody published `nobody` on this machine for 30 ms"), "{in_time}");
        s.abort.abort("the user has changed his mind");
        assert!(s.do_lookup(&key, "nobody", u32::MAX).is_err());
        let aborted = said(&mut s);
        assert!(aborted.contains("looking `nobody` up was aborted: the user has changed his mind"), "{aborted}");
    }
}
