//! Names on this machine: a local root publishes its address under (id, name), its peers look it up.
//!
//! A published name is an abstract unix socket. What it is called nobody can know who does not have the group's key, so nobody
//! can be there first; a small thread answers each visitor with the 28 bytes and a proof, by the same key, that they are what
//! was published. Only processes of the same user are served or believed, and of those only members of the group.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use hw_bridge::os::credentials;
use hw_bridge::os::dial::dial;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::SocketAddrUnix;
use sha2::Sha256;

use crate::bindings::neuron::hw::rendezvous::Host;
use crate::imports::{Answer, Trap};
use crate::key::GroupKey;
use crate::limits::{ADDRESS_BYTES, ID_BYTES};
use crate::objects::published::Published;
use crate::status::Status;
use crate::store::{HostState, Waited};

/// Bytes of an answer: the address, and the proof that it was published.
const ANSWER: usize = ADDRESS_BYTES + 32;
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two look-ups of a name that is not there yet.
const PAUSE: Duration = Duration::from_millis(5);

/// What is looked up: the plugin's key and name, in the name space of the group.
struct Name<'a> {
    group: GroupKey,
    key: &'a [u8],
    name: &'a str,
}

impl Name<'_> {
    fn tag(&self, label: &str) -> Hmac<Sha256> {
        let mut mac = self.group.tag(label);
        // Each behind its length: no two pairs read alike.
        for part in [self.key, self.name.as_bytes()] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    fn socket(&self) -> String {
        let hex: String = self.tag("name").finalize().into_bytes()[..20].iter().map(|b| format!("{b:02x}")).collect();
        format!("wccl-rdv-{hex}")
    }

    fn proof(&self, address: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.tag("published");
        mac.update(address);
        mac
    }

    /// What visitors read.
    fn answer(&self, address: &[u8; ADDRESS_BYTES]) -> [u8; ANSWER] {
        let mut answer = [0; ANSWER];
        answer[..ADDRESS_BYTES].copy_from_slice(address);
        answer[ADDRESS_BYTES..].copy_from_slice(&self.proof(address).finalize().into_bytes());
        answer
    }

    /// The address in what a visitor has read, if a member of the group has written it.
    fn proven(&self, answer: &[u8; ANSWER]) -> Option<Vec<u8>> {
        let (address, proof) = answer.split_at(ADDRESS_BYTES);
        self.proof(address).verify_slice(proof).ok().map(|()| address.to_vec())
    }
}

fn same_user(stream: &UnixStream) -> bool {
    credentials::of_peer(stream).is_ok_and(|c| credentials::same_user(&c))
}

fn serve(listener: &UnixListener, stop: &OwnedFd, answer: &[u8; ANSWER]) {
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
                // It always fits the socket's buffer; a visitor that left does not matter.
                let _ = visitor.write_all(answer);
            }
            Ok(_) => {}
            // Out of descriptors: the visitor asks again.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

impl HostState {
    /// A plugin that is only looked at meets nobody.
    fn may_meet(&mut self) -> Answer<()> {
        if self.grant.examined {
            return Err(self.fail(Status::INVALID, "a plugin that is only looked at publishes and looks up no names"));
        }
        Ok(())
    }

    fn do_publish(&mut self, key: &[u8], name: &str, address: &[u8]) -> Answer<()> {
        self.may_meet()?;
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
        let name = Name { group: self.group_key("publish a name")?, key, name };
        let most = self.tenant.limits.names;
        let Some(counted) = self.tenant.names.take(most) else {
            return Err(self.refuse(Status::RESOURCE, "limits.names", "asked to publish one more name", most));
        };
        let answer = name.answer(&address);
        let made = (|| {
            let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name.socket())?)?;
            // A visitor that leaves between the wait and the accept must not block the thread.
            listener.set_nonblocking(true)?;
            let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
            let stop_copy = stop.try_clone()?;
            let thread = std::thread::Builder::new()
                .name("wccl-rendezvous".into())
                .spawn(move || serve(&listener, &stop_copy, &answer))?;
            Ok::<_, std::io::Error>(Published { stop, thread: Some(thread), _counted: counted })
        })();
        match made {
            Ok(p) => {
                self.published.push(p);
                Ok(())
            }
            Err(e) => Err(self.fail(
                Status::FAILURE,
                format!("publishing `{}` failed: {e}; is another local root of the same group running?", name.name),
            )),
        }
    }

    /// Reads a whole answer by `until`, or to the abort: who has the name may say it byte by byte.
    fn hear(&self, mut stream: &UnixStream, until: Instant) -> std::io::Result<[u8; ANSWER]> {
        stream.set_nonblocking(true)?;
        let (mut answer, mut got) = ([0; ANSWER], 0);
        while got < ANSWER {
            match stream.read(&mut answer[got..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => match self.wait(stream, PollFlags::IN, until) {
                    Waited::Ready => {}
                    Waited::Late | Waited::Ended => return Err(ErrorKind::TimedOut.into()),
                },
                Err(e) => return Err(e),
            }
        }
        Ok(answer)
    }

    fn do_lookup(&mut self, key: &[u8], name: &str, ms: u32) -> Answer<Vec<u8>> {
        self.may_meet()?;
        if key.len() > ID_BYTES || name.len() > ID_BYTES {
            return Err(self.fail(
                Status::INVALID,
                format!("a name is looked up with a key and text of at most {ID_BYTES} bytes"),
            ));
        }
        let mut wait = self.wait_until(self.deadline(ms));
        let name = Name { group: self.group_key("look a name up")?, key, name };
        let at = SocketAddrUnix::new_abstract_name(name.socket().as_bytes());
        let name_of = name.name;
        let mut impostor = false;
        loop {
            let left = wait.left().unwrap_or_default();
            // Without waiting: who has the name may have its backlog full and never accept.
            let asked = at.clone().and_then(|at| dial(&at, None, Instant::now())).map_err(std::io::Error::from);
            let asked = asked.and_then(|s| {
                if !same_user(&s) {
                    return Err(ErrorKind::PermissionDenied.into());
                }
                self.hear(&s, self.now() + left.clamp(PAUSE, PATIENCE))
            });
            match asked.map(|answer| name.proven(&answer)) {
                Ok(Some(address)) => return Ok(address),
                // It may give the name up.
                Ok(None) => impostor = true,
                Err(e) if e.kind() == ErrorKind::PermissionDenied => {
                    return Err(
                        self.fail(Status::FAILURE, format!("`{name_of}` is published by another user's process"))
                    );
                }
                Err(_) => {}
            }
            if wait.left().is_none() {
                let other = if impostor { "; who answers by that name does not know the group's key" } else { "" };
                return Err(self.fail(Status::TIMEOUT, format!("nobody published `{name_of}` on this machine for {ms} ms{other}; is the first rank of this server running?")));
            }
            let event = self.abort.event();
            let mut fds = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
            let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(PAUSE.subsec_nanos()) };
            if matches!(poll(&mut fds, Some(&pause)), Ok(n) if n > 0) {
                let why = format!("looking `{name_of}` up was aborted: {}", self.abort.reason());
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
    use hw_bridge::os::credentials::as_user;

    fn tenant(names: usize) -> Arc<Tenant> {
        limited(Limits { names, wall: Duration::from_secs(10), ..Limits::default() })
    }

    fn instance(tenant: &Arc<Tenant>) -> HostState {
        let mut s = HostState::new(tenant.clone(), None, AbortToken::new().unwrap(), Some(0));
        // Another group's for each process: names are the machine's.
        s.key = Some(group(0));
        s
    }

    fn group(n: u8) -> GroupKey {
        let mut secret = [n; 32];
        secret[..4].copy_from_slice(&std::process::id().to_le_bytes());
        GroupKey::of_id(&secret, 0)
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

    #[test]
    fn a_name_is_the_groups() {
        let tenant = tenant(4);
        let (mut one, mut other, mut none) = (instance(&tenant), instance(&tenant), instance(&tenant));
        other.key = Some(group(1));
        none.key = None;
        one.do_publish(b"key", "shared", &[1; ADDRESS_BYTES]).unwrap();
        // The same words of another group are another name.
        other.do_publish(b"key", "shared", &[2; ADDRESS_BYTES]).unwrap();
        assert_eq!(one.do_lookup(b"key", "shared", 10_000).unwrap(), [1; ADDRESS_BYTES]);
        assert_eq!(other.do_lookup(b"key", "shared", 10_000).unwrap(), [2; ADDRESS_BYTES]);
        // So are the same letters, otherwise cut.
        assert!(one.do_lookup(b"keys", "hared", 0).is_err());
        assert!(none.do_publish(b"key", "a", &[1; ADDRESS_BYTES]).is_err());
        assert!(none.do_lookup(b"key", "shared", 10_000).is_err());
        let said = said(&mut none);
        for what in [
            "asked to publish a name while it works for no group",
            "asked to look a name up while it works for no group",
        ] {
            assert!(said.contains(what), "{said}");
        }
    }

    /// Where the name could be guessed before there was a key, and where somebody has seen it since: nobody is led there.
    #[test]
    fn who_squats_a_name_gets_nobody() {
        let (mut s, key) = (instance(&tenant(4)), std::process::id().to_le_bytes());
        let squat = |name: &str| UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        // A plain hash of what a plugin knows.
        let mut h = <Sha256 as sha2::Digest>::new();
        for part in [&s.tenant.id.to_le_bytes()[..], &key, b"local-root-0"] {
            sha2::Digest::update(&mut h, part);
        }
        let hex: String = sha2::Digest::finalize(h)[..20].iter().map(|b| format!("{b:02x}")).collect();
        let _guessed = squat(&format!("wccl-rdv-{hex}"));
        assert!(s.do_lookup(&key, "local-root-0", 20).is_err());
        let nobody = said(&mut s);
        assert!(nobody.contains("nobody published `local-root-0`") && !nobody.contains("does not know"), "{nobody}");
        s.do_publish(&key, "local-root-0", &[1; ADDRESS_BYTES]).unwrap();
        assert_eq!(s.do_lookup(&key, "local-root-0", 10_000).unwrap(), [1; ADDRESS_BYTES]);
        // One that has seen it, and takes it when it is free.
        let seen = Name { group: s.key.unwrap(), key: &key, name: "local-root-0" }.socket();
        s.release();
        let squatter = squat(&seen);
        std::thread::spawn(move || {
            for visitor in squatter.incoming() {
                // One that has left does not matter.
                let _ = visitor.unwrap().write_all(&[9; ANSWER]);
            }
        });
        let begun = Instant::now();
        loop {
            assert!(s.do_lookup(&key, "local-root-0", 20).is_err());
            // The squatter's thread may not have come to it.
            let said = said(&mut s);
            if said.contains("who answers by that name does not know the group's key") {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{said}");
        }
    }

    /// Who has seen a name, takes it and says its answer byte by byte holds a look-up to its deadline and its abort, no longer.
    #[test]
    fn who_trickles_an_answer_is_left_in_time_or_with_the_abort() {
        let mut s = instance(&tenant(1));
        let seen = Name { group: s.key.unwrap(), key: b"key", name: "trickled" }.socket();
        let squatter = UnixListener::bind_addr(&SocketAddr::from_abstract_name(seen).unwrap()).unwrap();
        let (bytes, heard) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for visitor in squatter.incoming() {
                let (mut visitor, bytes) = (visitor.unwrap(), bytes.clone());
                // Half a minute in all: far more than a look-up has, with each byte soon after the one before.
                std::thread::spawn(move || {
                    for n in 1..=ANSWER {
                        // A visitor has left, or the test has ended.
                        if visitor.write_all(&[9]).is_err() || bytes.send(n).is_err() {
                            return;
                        }
                        std::thread::sleep(Duration::from_millis(500));
                    }
                });
            }
        });
        assert!(s.do_lookup(b"key", "trickled", 600).is_err());
        let (in_time, told) = (said(&mut s), heard.try_iter().max().unwrap_or(0));
        assert!(in_time.contains("nobody published `trickled` on this machine for 600 ms"), "{in_time}");
        assert!(told < ANSWER, "{told} bytes of {ANSWER}");
        let abort = s.abort.clone();
        let aborts = std::thread::spawn(move || {
            let first = heard.recv_timeout(Duration::from_secs(60));
            abort.abort("the user has changed his mind");
            first.map(|_| heard)
        });
        assert!(s.do_lookup(b"key", "trickled", u32::MAX).is_err());
        let heard = aborts.join().unwrap().expect("somebody calls on the squatter");
        let aborted = said(&mut s);
        assert!(aborted.contains("looking `trickled` up was aborted: the user has changed his mind"), "{aborted}");
        let told = heard.try_iter().max().unwrap_or(0);
        assert!(told < ANSWER, "{told} bytes of {ANSWER}");
    }

    /// Nobody of another user reads an address, and whom another user answers is led nowhere.
    #[test]
    fn another_user_is_neither_served_nor_believed() {
        use rustix::process::geteuid;
        let mut s = instance(&tenant(4));
        let name = |name| Name { group: group(0), key: b"key", name };
        let at = |name: &str| SocketAddr::from_abstract_name(name).unwrap();
        s.do_publish(b"key", "published", &[1; ADDRESS_BYTES]).unwrap();
        let visit = || {
            let mut visitor = UnixStream::connect_addr(&at(&name("published").socket())).unwrap();
            visitor.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let mut heard = Vec::new();
            visitor.read_to_end(&mut heard).unwrap();
            (heard, visitor)
        };
        let (heard, visitor) = visit();
        assert!(name("published").proven(heard.as_slice().try_into().unwrap()).is_some());
        if !geteuid().is_root() {
            // Only root can be somebody else; what both sides ask is asked about one who would be.
            let mine = credentials::of_peer(&visitor).unwrap();
            assert!(same_user(&visitor));
            assert!(!credentials::same_user(&credentials::Credentials { uid: mine.uid + 1, ..mine }));
            return;
        }
        let squatter = as_user(65_533, || {
            assert_eq!(visit().0, []);
            UnixListener::bind_addr(&at(&name("squatted").socket())).unwrap()
        })
        .unwrap();
        assert!(s.do_lookup(b"key", "squatted", 60_000).is_err());
        let said = said(&mut s);
        assert!(said.contains("`squatted` is published by another user's process"), "{said}");
        drop(squatter);
    }
}
