//! The gate of a listener: who has connected stays in it until it has shown that it knows the group's key.
//!
//! All are heard together, so that one that says nothing, or says it slowly, costs the others nothing. There are a few places; in
//! a full gate the oldest makes room, once it has had the time that a hello takes which is on its way. Those that find no place
//! wait in the kernel's queue.
//!
//! A place costs a descriptor. Each listener has one; the others are taken from the tenant's.

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::accounts::{Counted, Quota};
use crate::key::GroupKey;
use crate::limits::{GATE_PLACES, TENANT_GATE_PLACES};
use crate::objects::handshake::{Dialling, Heard, Unproven};

/// How long one may take to show what it knows.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long the oldest stays at least in a full gate.
const GRACE: Duration = Duration::from_millis(250);

/// One who has connected.
#[derive(Debug)]
struct Visitor {
    stream: TcpStream,
    from: SocketAddr,
    said: Dialling,
    since: Instant,
    /// None for the place that every listener has.
    place: Option<Counted>,
}

/// Who has connected to a listener and shown nothing yet, and who came before.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// The oldest first.
    visitors: Vec<Visitor>,
    heard: Heard,
}

/// What a round found.
#[derive(Debug)]
pub(crate) enum Round {
    /// One of the group, which has been answered.
    Member(TcpStream, SocketAddr),
    /// One that was sent away, and why.
    Refused(SocketAddr, String),
    /// Nothing. There is nothing to do before one of them says more, or `until`, or another one comes if there is room.
    Nothing { until: Option<Instant>, full: bool },
}

impl Gate {
    /// Looks after those who are there and lets in those who come, until there is something to report. `set_up` prepares a
    /// connection; `places` are those of the tenant.
    ///
    /// # Errors
    /// What accepting says, but for connections that have ended before.
    pub(crate) fn round(
        &mut self,
        listener: &TcpListener,
        key: &GroupKey,
        places: &Quota,
        now: Instant,
        set_up: impl Fn(&TcpStream) -> std::io::Result<()>,
    ) -> std::io::Result<Round> {
        for _ in 0..GATE_PLACES {
            if let Some(found) = self.hear(key, now) {
                return Ok(found);
            }
            let place = match self.place(places) {
                Some(place) => place,
                None => return Ok(self.make_room(now)),
            };
            match listener.accept() {
                Ok((stream, from)) => {
                    // One that cannot be set up has ended.
                    if set_up(&stream).is_ok() {
                        let said = Dialling::new();
                        self.visitors.push(Visitor { stream, from, said, since: now, place });
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    let until = self.visitors.first().map(|oldest| oldest.since + PATIENCE);
                    return Ok(Round::Nothing { until, full: false });
                }
                // The connection was gone before it was accepted, or a signal came: look again.
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) => return Err(e),
            }
        }
        // However many come, whoever waits looks at its deadline.
        Ok(Round::Nothing { until: Some(now), full: false })
    }

    /// Hears everybody; the first of whom there is something to report.
    fn hear(&mut self, key: &GroupKey, now: Instant) -> Option<Round> {
        let mut i = 0;
        while let Some(v) = self.visitors.get_mut(i) {
            let here = v.stream.local_addr().map_err(|_| Unproven::Closed);
            let said = here.and_then(|here| v.said.hear(&mut &v.stream, key, here, &mut self.heard));
            let late = now.saturating_duration_since(v.since) >= PATIENCE;
            match said {
                Ok(None) if !late => {
                    i += 1;
                    continue;
                }
                Ok(None) => {
                    let v = self.visitors.remove(i);
                    return Some(Round::Refused(v.from, format!("it has not shown within {PATIENCE:?} who it is")));
                }
                Ok(Some(answer)) => {
                    let v = self.visitors.remove(i);
                    // The socket's buffer is empty. One that does not take it is gone.
                    if matches!((&v.stream).write(&answer), Ok(n) if n == answer.len()) {
                        return Some(Round::Member(v.stream, v.from));
                    }
                }
                // Nobody has to say why it leaves.
                Err(Unproven::Closed) => drop(self.visitors.remove(i)),
                Err(why) => {
                    let v = self.visitors.remove(i);
                    return Some(Round::Refused(v.from, why.to_string()));
                }
            }
        }
        None
    }

    /// A place for one more: the listener's own, or one of the tenant's.
    fn place(&self, places: &Quota) -> Option<Option<Counted>> {
        if self.visitors.iter().all(|v| v.place.is_some()) {
            return Some(None);
        }
        (self.visitors.len() < GATE_PLACES).then(|| places.take(TENANT_GATE_PLACES)).flatten().map(Some)
    }

    /// Sends the oldest away, or says when it may be.
    fn make_room(&mut self, now: Instant) -> Round {
        match self.visitors.first().map(|oldest| oldest.since + GRACE) {
            Some(until) if now < until => Round::Nothing { until: Some(until), full: true },
            _ => {
                let oldest = self.visitors.remove(0);
                Round::Refused(oldest.from, "it had not shown who it is when others came and no place was left".into())
            }
        }
    }

    /// What to wait for: the listener, unless there is no room, and whoever is there.
    pub(crate) fn awaited<'a>(&'a self, listener: &'a TcpListener, full: bool) -> Vec<BorrowedFd<'a>> {
        let listener = (!full).then(|| listener.as_fd());
        listener.into_iter().chain(self.visitors.iter().map(|v| v.stream.as_fd())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    use crate::objects::handshake::{Dialled, NONCE};

    /// A listener, its gate, and a clock that the test has.
    struct Place {
        listener: TcpListener,
        gate: Gate,
        places: Quota,
        begun: Instant,
    }

    impl Place {
        fn new() -> Place {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            Place { listener, gate: Gate::default(), places: Quota::default(), begun: Instant::now() }
        }

        /// One that has connected, and said this.
        fn says(&self, bytes: &[u8]) -> TcpStream {
            let mut s = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
            s.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            s.write_all(bytes).unwrap();
            s
        }

        fn hello(&self) -> Vec<u8> {
            Dialled::new(&GroupKey::some(), [1; NONCE], self.listener.local_addr().unwrap()).1.to_vec()
        }

        /// What a round finds `ms` after the beginning.
        fn at(&mut self, ms: u64) -> Round {
            let now = self.begun + Duration::from_millis(ms);
            let set_up = |s: &TcpStream| s.set_nonblocking(true);
            self.gate.round(&self.listener, &GroupKey::some(), &self.places, now, set_up).unwrap()
        }

        /// Rounds until as many are in the gate.
        fn fill(&mut self, ms: u64, visitors: usize) {
            while self.gate.visitors.len() < visitors {
                let found = self.at(ms);
                assert!(matches!(found, Round::Nothing { .. }), "{found:?}");
            }
        }
    }

    #[test]
    fn one_that_says_it_slowly_is_heard_and_one_that_says_nothing_is_sent_away() {
        let mut p = Place::new();
        let hello = p.hello();
        let (mut slow, mut mute) = (p.says(&hello[..40]), p.says(b""));
        p.fill(0, 2);
        slow.write_all(&hello[40..]).unwrap();
        let member = loop {
            match p.at(2_999) {
                Round::Nothing { .. } => std::thread::yield_now(),
                other => break other,
            }
        };
        assert!(matches!(&member, Round::Member(_, from) if *from == slow.local_addr().unwrap()), "{member:?}");
        slow.read_exact(&mut [0; 32]).unwrap();
        let Round::Refused(from, why) = p.at(3_000) else { panic!("it is still there") };
        assert!(from == mute.local_addr().unwrap() && why.contains("has not shown within 3s"), "{why}");
        assert_eq!(mute.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn in_a_full_gate_the_oldest_makes_room_once_a_hello_would_have_come() {
        let mut p = Place::new();
        let mute: Vec<TcpStream> = (0..=GATE_PLACES).map(|_| p.says(b"")).collect();
        p.fill(0, GATE_PLACES);
        // One of them has the listener's own place.
        assert_eq!(p.places.alive(), GATE_PLACES - 1);
        let Round::Nothing { until: Some(until), full: true } = p.at(249) else { panic!("nobody makes room yet") };
        assert_eq!(until, p.begun + GRACE);
        let Round::Refused(from, why) = p.at(250) else { panic!("the oldest makes room") };
        assert!(mute.iter().any(|m| m.local_addr().unwrap() == from) && why.contains("no place was left"), "{why}");
        drop(p.gate);
        assert_eq!(p.places.alive(), 0);
    }

    /// Where other listeners have taken all places of the tenant, one is left for each.
    #[test]
    fn every_listener_has_a_place_of_its_own() {
        let mut p = Place::new();
        let _others: Vec<Counted> = (0..TENANT_GATE_PLACES).map(|_| p.places.count()).collect();
        let _mute = p.says(b"");
        p.fill(0, 1);
        let (hello, mut sent_away) = (p.hello(), 0);
        let _member = p.says(&hello);
        loop {
            match p.at(250) {
                Round::Member(..) => break,
                Round::Refused(..) => sent_away += 1,
                Round::Nothing { .. } => std::thread::yield_now(),
            }
        }
        assert_eq!(sent_away, 1);
    }
}
