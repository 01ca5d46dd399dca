//! A group whose sockets are parked with the host, while its plan moves from one instance to the next: the same group, with
//! numbers of slots where the sockets were.

use super::Ends;
use super::group::{Bootstrap, hello_lobby};
use super::head::Head;
use super::wire::{Address, Header};
use crate::bytes::{Reader, bad};
use crate::fail::Failure;

/// Slots of the host in place of sockets.
#[derive(Debug)]
pub struct Slots;

impl Ends for Slots {
    type Listener = u32;
    type Conn = u32;
}

/// In place of a slot: there is no such connection.
const NONE: u32 = u32::MAX;

impl<S: Ends> Bootstrap<S> {
    /// The same group over other sockets: `listener` and `conn` exchange one each. Halves of messages stay with their
    /// connections.
    ///
    /// # Errors
    /// The first failure of an exchange; the sockets of both kinds are then closed.
    pub fn exchange<T: Ends>(
        self,
        listener: impl FnOnce(S::Listener) -> Result<T::Listener, Failure>,
        mut conn: impl FnMut(S::Conn) -> Result<T::Conn, Failure>,
    ) -> Result<Bootstrap<T>, Failure> {
        Ok(Bootstrap {
            rank: self.rank,
            nranks: self.nranks,
            cluster_id: self.cluster_id,
            epoch: self.epoch,
            addresses: self.addresses,
            timeout_ms: self.timeout_ms,
            listener: listener(self.listener)?,
            next: self.next.map(&mut conn).transpose()?,
            prev: self.prev.map(&mut conn).transpose()?,
            heard: self.heard,
            send: self.send.into_iter().map(|c| c.map(&mut conn).transpose()).collect::<Result<_, _>>()?,
            recv: self
                .recv
                .into_iter()
                .map(|c| c.map(|(c, header)| Ok((conn(c)?, header))).transpose())
                .collect::<Result<_, Failure>>()?,
            lobby: self.lobby.exchange(conn)?,
        })
    }
}

impl Bootstrap<Slots> {
    /// To the part of a state: slots of listener and ring; each rank's address and slots; the lobby's slots.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut b = Vec::new();
        let slot = |b: &mut Vec<u8>, s: Option<u32>| b.extend_from_slice(&s.unwrap_or(NONE).to_le_bytes());
        let half = |b: &mut Vec<u8>, h: Option<Header>| {
            b.push(u8::from(h.is_some()));
            b.extend_from_slice(&h.map_or([0; Header::BYTES], |h| h.encode()));
        };
        for s in [Some(self.listener), self.next, self.prev] {
            slot(&mut b, s);
        }
        for ((address, send), recv) in self.addresses.iter().zip(&self.send).zip(&self.recv) {
            b.extend_from_slice(&address.0);
            slot(&mut b, *send);
            slot(&mut b, recv.as_ref().map(|r| r.0));
            half(&mut b, recv.as_ref().and_then(|r| r.1));
        }
        for (conn, header) in self.lobby.who() {
            slot(&mut b, Some(*conn));
            half(&mut b, header);
        }
        b
    }

    /// From the part of a state.
    pub(crate) fn decode(r: &mut Reader<'_>, h: Head) -> Result<Bootstrap<Slots>, Failure> {
        let slot = |r: &mut Reader<'_>| r.u32().map(|s| (s != NONE).then_some(s));
        let half = |r: &mut Reader<'_>| match r.take(1)?[0] {
            0 => r.take(Header::BYTES).map(|_| None),
            1 => Header::decode(r.take(Header::BYTES)?).map(Some),
            n => Err(bad(&format!("{n} halves of a message"))),
        };
        let listener = slot(r)?.ok_or_else(|| bad("its bootstrap has no listener"))?;
        let (next, prev) = (slot(r)?, slot(r)?);
        let (mut addresses, mut send, mut recv) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..h.nranks {
            addresses.push(Address::from_slice(r.take(28)?)?);
            send.push(slot(r)?);
            let (conn, header) = (slot(r)?, half(r)?);
            recv.push(conn.map(|c| (c, header)));
        }
        let mut lobby = hello_lobby(h.timeout_ms);
        while r.end().is_err() {
            let conn = slot(r)?.ok_or_else(|| bad("a caller in its lobby has no slot"))?;
            lobby.enter(conn, half(r)?);
        }
        Ok(Bootstrap {
            rank: h.rank,
            nranks: h.nranks,
            cluster_id: h.cluster_id,
            epoch: h.epoch,
            addresses,
            timeout_ms: h.timeout_ms,
            listener,
            lobby,
            next,
            prev,
            // Between two calls there is none.
            heard: None,
            send,
            recv,
        })
    }

    /// One with every kind of socket, for tests.
    #[cfg(test)]
    pub(crate) fn parked_example(h: Head) -> Bootstrap<Slots> {
        use super::wire::MessageKind;
        let half = Some(Header { kind: MessageKind::Data, len: 9 });
        let mut lobby = hello_lobby(h.timeout_ms);
        lobby.enter(70, None);
        lobby.enter(71, Some(Header { kind: MessageKind::Hello, len: 24 }));
        Bootstrap {
            rank: h.rank,
            nranks: h.nranks,
            cluster_id: h.cluster_id,
            epoch: h.epoch,
            addresses: vec![Address([7; 28]); h.nranks],
            timeout_ms: h.timeout_ms,
            listener: 0,
            lobby,
            next: Some(1),
            prev: None,
            heard: None,
            send: (0..h.nranks).map(|p| (p % 2 == 0).then_some(10 + p as u32)).collect(),
            recv: (0..h.nranks).map(|p| (p % 3 == 1).then_some((20 + p as u32, half))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Sockets;
    use super::super::root::{Duty, serve};
    use super::super::std_sockets::{StdConn, StdSockets, loopback};
    use super::super::wire::MessageKind;
    use super::*;
    use crate::bootstrap::group::JoinParams;
    use crate::state::{self, PlanState};
    use std::collections::BTreeMap;

    /// A host's table.
    #[derive(Default)]
    struct Host {
        conns: BTreeMap<u32, StdConn>,
        listener: Option<std::net::TcpListener>,
    }

    /// Parks a group, carries the state over as bytes, and takes the sockets back.
    fn moved(group: Bootstrap<StdSockets>, schema: u32) -> Bootstrap<StdSockets> {
        let mut host = Host::default();
        let head = Head {
            rank: group.rank,
            nranks: group.nranks,
            dev: 0,
            timeout_ms: group.timeout_ms,
            cluster_id: group.cluster_id,
            epoch: group.epoch,
        };
        let mut slots = 1..;
        let parked: Bootstrap<Slots> = group
            .exchange(
                |l| {
                    host.listener = Some(l);
                    Ok(0)
                },
                |c| {
                    let slot = slots.next().unwrap();
                    host.conns.insert(slot, c);
                    Ok(slot)
                },
            )
            .unwrap();
        let record = |r: usize| {
            let mut b = [0; crate::peers::RECORD_BYTES];
            b[..4].copy_from_slice(&(r as u32).to_le_bytes());
            crate::peers::PeerRecord::decode(&b, r).unwrap()
        };
        let records: Vec<_> = (0..head.nranks).map(record).collect();
        let bytes = state::encode(schema, &head, &records, None, Some(&parked));
        let parked = PlanState::decode(schema, &bytes).unwrap().wires.unwrap();
        let back = parked.exchange(|_| Ok(host.listener.take().unwrap()), |c| Ok(host.conns.remove(&c).unwrap()));
        let back = back.unwrap();
        assert!(host.conns.is_empty(), "every socket was taken back");
        back
    }

    #[test]
    fn a_group_moves_in_the_middle_of_everything() {
        for schema in state::READ {
            let n = 3;
            let l = StdSockets.listen(&loopback(), 5000).unwrap();
            let root = StdSockets.local(&l).unwrap();
            let duty = Duty { nranks: n as u32, timeout_ms: 120_000 };
            let serving = std::thread::spawn(move || serve(&StdSockets, &l, duty, 0xC1, 77));
            let joining: Vec<_> = (0..n)
                .map(|rank| {
                    std::thread::spawn(move || {
                        let j = JoinParams {
                            root,
                            interface: loopback(),
                            rank,
                            nranks: n,
                            hash: None,
                            timeout_ms: 120_000,
                        };
                        Bootstrap::join(&StdSockets, &j).unwrap()
                    })
                })
                .collect();
            let mut all: Vec<_> = joining.into_iter().map(|t| t.join().unwrap()).collect();
            serving.join().unwrap().unwrap();
            let s = StdSockets;
            let [a, b, c] = &mut all[..] else { panic!("three ranks") };
            // From rank 1: a message that was received in half. From rank 2: one whose connection nobody has accepted.
            b.send(&s, 0, b"first", "x").unwrap();
            assert_eq!(a.recv(&s, 1, 5, "x").unwrap(), b"first");
            let conn = b.send[0].as_ref().unwrap();
            let whole = [&Header { kind: MessageKind::Data, len: 6 }.encode()[..], b"second"].concat();
            s.send(conn, &whole[..18], 1000).unwrap();
            a.timeout_ms = 100;
            assert!(a.recv(&s, 1, 6, "x").is_err());
            a.timeout_ms = 120_000;
            assert!(a.recv[1].as_ref().unwrap().1.is_some(), "half a message is under way");
            c.send(&s, 0, b"third", "x").unwrap();
            let a = all.remove(0);
            let mut a = moved(a, schema);
            s.send(all[0].send[0].as_ref().unwrap(), &whole[18..], 1000).unwrap();
            assert_eq!(a.recv(&s, 1, 6, "x").unwrap(), b"second");
            assert_eq!(a.recv(&s, 2, 5, "x").unwrap(), b"third");
            // The ring goes on as well.
            let rest: Vec<_> = all
                .into_iter()
                .map(|mut g| std::thread::spawn(move || g.all_gather(&StdSockets, &[g.rank as u8], "y").unwrap()))
                .collect();
            assert_eq!(a.all_gather(&s, &[0], "y").unwrap(), [0, 1, 2]);
            rest.into_iter().for_each(|t| assert_eq!(t.join().unwrap(), [0, 1, 2]));
        }
    }
}
