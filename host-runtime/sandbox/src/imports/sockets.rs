//! Bootstrap sockets. Every call has a deadline, is ended by the instance's abort, and survives signals (EINTR).
//!
//! A connection is the guest's once its host has shown that it knows the group's key, and the other end is believed once it has:
//! `objects::handshake` says how, `objects::gate` how many strangers are heard meanwhile. An instance of no group has no sockets.
//!
//! What a connection may cost is bounded: the kernel's buffers have a fixed size, and as much as one receive may have come early.
//!
//! A wait that the deadline of an operation cuts short, and every one after it, ends with `OVERDUE` and not with a time-out: a
//! guest that tries again until its own, later deadline would never come back.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hw_bridge::os::lock::lock;
use hw_bridge::os::random;
use rustix::event::PollFlags;
use wasmtime::component::Resource;

use crate::accounts::Counted;
use crate::bindings::neuron::hw::sockets::{Host, Netif};
use crate::imports::system::{self, loopback_down};
use crate::imports::{Answer, Trap, own};
use crate::key::GroupKey;
use crate::limits::{ADDRESS_BYTES, SOCKET_BUFFER, byte_list};
use crate::objects::gate::{Gate, Round};
use crate::objects::handshake::{Dialled, Unproven};
use crate::objects::{CommunicatorObject, ConnectionObject, ListenerObject, ParkedSocket};
use crate::policy::{ALL_PORTS, listed};
use crate::status::Status;
use crate::store::{HostState, Waited};

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
/// Host names one tenant looks up at a time.
const MAX_RESOLVING: usize = 4;
/// A wait of at most this many milliseconds is a look: that it finds nothing, or a peer gone, is no failure to report.
const LOOK_MS: u32 = 50;
/// Longest attempt to connect: time for a lost packet to be sent again twice.
const ATTEMPT: Duration = Duration::from_secs(4);
/// The longest pause before a listener is dialled again that left before it had shown that it is of the group.
const MOST_ABSENT: Duration = Duration::from_secs(3);
/// First pause between two attempts to connect or bind; doubles up to the second.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// The original's 28 bytes: family u16, port u16 big-endian, then the address as in the system's own structures.
pub fn encode(addr: &SocketAddr) -> Vec<u8> {
    let mut b = vec![0u8; ADDRESS_BYTES];
    b[2..4].copy_from_slice(&addr.port().to_be_bytes());
    match addr {
        SocketAddr::V4(a) => {
            b[..2].copy_from_slice(&AF_INET.to_le_bytes());
            b[4..8].copy_from_slice(&a.ip().octets());
        }
        SocketAddr::V6(a) => {
            b[..2].copy_from_slice(&AF_INET6.to_le_bytes());
            b[4..8].copy_from_slice(&a.flowinfo().to_be_bytes());
            b[8..24].copy_from_slice(&a.ip().octets());
            b[24..28].copy_from_slice(&a.scope_id().to_le_bytes());
        }
    }
    b
}

/// The address in 28 bytes of a plugin (bootstrap 2).
///
/// # Errors
/// What is wrong with them, as a sentence.
pub fn decode(b: &[u8]) -> Result<SocketAddr, String> {
    if b.len() != ADDRESS_BYTES {
        return Err(format!("a socket address has {ADDRESS_BYTES} bytes, the plugin gave {}", b.len()));
    }
    let port = u16::from_be_bytes([b[2], b[3]]);
    match u16::from_le_bytes([b[0], b[1]]) {
        AF_INET => Ok(SocketAddr::from((Ipv4Addr::new(b[4], b[5], b[6], b[7]), port))),
        AF_INET6 => {
            let mut ip = [0u8; 16];
            ip.copy_from_slice(&b[8..24]);
            let flow = u32::from_be_bytes([b[4], b[5], b[6], b[7]]);
            let scope = u32::from_le_bytes([b[24], b[25], b[26], b[27]]);
            Ok(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, flow, scope)))
        }
        f => Err(format!("a socket address has family {f}; AF_INET (2) and AF_INET6 (10) are supported")),
    }
}

/// What a wait answers when the operation that the call serves has given up: "stuck collective".
pub(super) const OVERDUE: Status = Status::EXEC_HW_ERR_COLLECTIVES;

/// The sentence that belongs to [`OVERDUE`].
pub(super) const HAS_PASSED: &str = "the deadline of the operation has passed";

impl HostState {
    fn late<T>(&mut self, ms: u32, what: impl FnOnce() -> String) -> Answer<T> {
        if self.waited() {
            // A guest that looks again all the same does so at a bearable rate.
            std::thread::sleep(BACKOFF.0);
        }
        if self.overdue() {
            return Err(self.fail(OVERDUE, format!("{}, or less: {HAS_PASSED}", what())));
        }
        if ms <= LOOK_MS {
            return Err(Status::TIMEOUT.into());
        }
        Err(self.fail(Status::TIMEOUT, what()))
    }

    fn gone<T>(&mut self, ms: u32, what: String) -> Answer<T> {
        self.left(Status::CLOSED, ms, what)
    }

    fn left<T>(&mut self, status: Status, ms: u32, what: String) -> Answer<T> {
        // The peer may have ended for the same abort, as a root's task does, and be quicker: what the user did is what is said.
        if self.abort.aborted() {
            return self.ended(&format!("{what}: the communicator"));
        }
        if ms <= LOOK_MS {
            return Err(status.into());
        }
        Err(self.fail(status, what))
    }

    fn ended<T>(&mut self, what: &str) -> Answer<T> {
        if !self.abort.aborted() {
            return Err(self.fail(OVERDUE, format!("{what}: {HAS_PASSED}")));
        }
        let why = format!("{what} was aborted: {}", self.abort.reason());
        Err(self.fail(Status::CLOSED, why))
    }

    /// Counts the socket that a call is to make, before it waits for it.
    fn one_more_socket(&mut self) -> Answer<Counted> {
        let most = self.tenant.limits.sockets;
        let counted = self.tenant.sockets.take(most);
        counted.ok_or_else(|| self.refuse(Status::RESOURCE, "limits.connections", "asked for one more socket", most))
    }

    fn address(&mut self, bytes: &[u8]) -> Answer<SocketAddr> {
        decode(bytes).map_err(|why| self.fail(Status::INVALID, why))
    }

    /// `hint` is what is behind it, if that is known.
    fn socket_error<T>(&mut self, what: String, e: &std::io::Error, hint: Option<&str>) -> Answer<T> {
        let limit = hw_bridge::os::exhausted::limit_behind(e);
        let status = if limit.is_empty() { Status::FAILURE } else { Status::RESOURCE };
        let hint = hint.map_or(String::new(), |hint| format!("; {hint}"));
        Err(self.fail(status, format!("{what} failed: {e}{limit}{hint}")))
    }

    /// By which this instance's group knows its members.
    pub(super) fn group_key(&mut self, what: &str) -> Answer<GroupKey> {
        self.key.ok_or_else(|| {
            let tenant = &self.tenant.name;
            let why = format!(
                "a plugin of tenant {tenant} asked to {what} while it works for no group; only the entries that make an id or join a \
                 group may, and the tasks that they start"
            );
            self.fail(Status::UNINITIALIZED, why)
        })
    }

    fn new_connection(
        &mut self,
        stream: TcpStream,
        dialled: Option<Dialled>,
        counted: Counted,
    ) -> Answer<Resource<ConnectionObject>> {
        self.add(ConnectionObject { stream, early: Vec::new(), dialled, _counted: counted })
    }

    fn do_listen(&mut self, address: &[u8], ms: u32) -> Answer<Resource<ListenerObject>> {
        let counted = self.one_more_socket()?;
        let addr = self.address(address)?;
        let ports = self.grant.network.listening(addr.ip(), addr.port());
        if ports.is_empty() {
            let grants = listed(&self.grant.network.listen);
            return Err(self.refuse(Status::INVALID, "network.listen", &format!("asked to listen on {addr}"), grants));
        }
        self.group_key("listen")?;
        let until = self.deadline(ms);
        let mut pause = BACKOFF.0;
        let socket = loop {
            // std sets SO_REUSEADDR, so a port in TIME_WAIT is no obstacle; one that is in use is waited for.
            match bind(addr, &ports) {
                Ok(l) => break l,
                Err(e) if e.kind() == ErrorKind::AddrInUse => match self.pause(pause, until) {
                    Waited::Ready => pause = (pause * 2).min(BACKOFF.1),
                    Waited::Ended => return self.ended("listening"),
                    Waited::Late => {
                        return self.late(ms, || {
                            format!("{addr} stayed in use; another job listens there, choose another port")
                        });
                    }
                },
                Err(e) => {
                    let down = unreachable_loopback(&addr, &e);
                    return self.socket_error(format!("listening on {addr}"), &e, down);
                }
            }
        };
        // Connections have the listener's buffers from their first packet on.
        if let Err(e) = socket.set_nonblocking(true).and_then(|()| bound_buffers(&socket)) {
            return self.socket_error(format!("listening on {addr}"), &e, None);
        }
        self.add(ListenerObject { socket, gate: Gate::default(), _counted: counted })
    }

    fn do_accept(
        &mut self,
        handle: &Resource<ListenerObject>,
        ms: u32,
    ) -> Trap<Answer<(Resource<ConnectionObject>, Vec<u8>)>> {
        let counted = match self.one_more_socket() {
            Ok(c) => c,
            Err(s) => return Ok(Err(s)),
        };
        let key = match self.group_key("accept connections") {
            Ok(key) => key,
            Err(s) => return Ok(Err(s)),
        };
        let (until, tenant) = (self.deadline(ms), self.tenant.clone());
        loop {
            let ListenerObject { socket, gate, .. } = self.table.get_mut(handle)?;
            let at = || socket.local_addr().map_or_else(|_| "?".into(), |a| a.to_string());
            let (end, full) = match gate.round(socket, &key, &tenant.gates, Instant::now(), set_up) {
                Ok(Round::Member(stream, from)) => {
                    return Ok(self.new_connection(stream, None, counted).map(|c| (c, encode(&from))));
                }
                Ok(Round::Refused(from, why)) => {
                    if tenant.may_log() {
                        tracing::warn!(tenant = %tenant.name, "a connection from {from} to {} was refused: {why}", at());
                    }
                    // However many come, the deadline and the abort are looked at.
                    (Some(Instant::now()), false)
                }
                Ok(Round::Nothing { until, full }) => (until, full),
                Err(e) => return Ok(self.socket_error("accepting a connection".into(), &e, None)),
            };
            // The gate goes by the machine's clock.
            let end = end.map_or(until, |end| self.by_the_calls_clock(end).min(until));
            let ListenerObject { socket, gate, .. } = self.table.get(handle)?;
            match self.wait_any(&gate.awaited(socket, full), PollFlags::IN, end) {
                Waited::Ready => {}
                Waited::Ended => return Ok(self.ended("waiting for an incoming connection")),
                Waited::Late if end < until => {}
                Waited::Late => {
                    let at = socket.local_addr().map_or_else(|_| "?".into(), |a| a.to_string());
                    return Ok(
                        self.late(ms, || format!("Timeout waiting for incoming connection on {at} after {ms} ms"))
                    );
                }
            }
        }
    }

    /// One attempt to connect, ended by the deadline, by [`ATTEMPT`], or by the abort (then `None`).
    fn attempt(&self, addr: &SocketAddr, until: Instant) -> Option<std::io::Result<TcpStream>> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
        let family = if addr.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = match socket_with(family, SocketType::STREAM, flags, None) {
            Ok(fd) => TcpStream::from(fd),
            Err(e) => return Some(Err(e.into())),
        };
        if let Err(e) = bound_buffers(&stream) {
            return Some(Err(e));
        }
        match connect(&stream, addr) {
            Ok(()) => return Some(Ok(stream)),
            // A signal does not end the attempt, it goes on as if the socket had said so.
            Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => {}
            Err(e) => return Some(Err(e.into())),
        }
        match self.wait(&stream, PollFlags::OUT, until.min(self.now() + ATTEMPT)) {
            Waited::Ended => None,
            Waited::Late => Some(Err(ErrorKind::TimedOut.into())),
            Waited::Ready => Some(match stream.take_error() {
                Ok(None) => Ok(stream),
                Ok(Some(e)) | Err(e) => Err(e),
            }),
        }
    }

    fn do_connect(&mut self, address: &[u8], ms: u32) -> Answer<Resource<ConnectionObject>> {
        let counted = self.one_more_socket()?;
        let addr = self.address(address)?;
        if !self.grant.network.may_reach(addr.ip(), addr.port()) {
            let grants = listed(&self.grant.network.reach);
            return Err(self.refuse(Status::INVALID, "network.reach", &format!("asked to connect to {addr}"), grants));
        }
        if own::is_own(addr) {
            let asked = format!("asked to connect to {addr}, where the host itself listens");
            let grants = format!("{}, without the host's own", listed(&self.grant.network.reach));
            return Err(self.refuse(Status::INVALID, "network.reach", &asked, grants));
        }
        let key = self.group_key("connect")?;
        let until = self.deadline(ms);
        let mut pause = BACKOFF.0;
        let mut told = false;
        // What is behind it, even if the other side has gone meanwhile.
        let mut starved = None;
        // Who listens there may be about to go: it is not dialled again and again.
        if !self.absent.is_zero() {
            // Who only looks does dial.
            match self.pause(self.absent.min(Duration::from_millis(u64::from(ms) / 2)), until) {
                Waited::Ready => {}
                Waited::Ended => return self.ended(&format!("connecting to {addr}")),
                Waited::Late => {
                    let what =
                        || format!("{addr} was not dialled again within {ms} ms: who listens there had just left");
                    return self.late(ms, what);
                }
            }
        }
        loop {
            let e = match self.attempt(&addr, until) {
                // A port of the kernel's own range on which nobody listens yet may be given to this very socket.
                Some(Ok(stream)) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                    ErrorKind::ConnectionRefused.into()
                }
                Some(Ok(stream)) => match greet(&stream, &key) {
                    Ok(dialled) => return self.new_connection(stream, Some(dialled), counted),
                    Err(e) => e,
                },
                Some(Err(e)) => e,
                None => return self.ended(&format!("connecting to {addr}")),
            };
            if e.kind() == ErrorKind::ConnectionRefused && self.root == Some(addr) && !self.abort.aborted() {
                let why = format!("nobody listens at {addr} any more, {}", spent(addr));
                return Err(self.fail(Status::FAILURE, why));
            }
            if let Some(down) = unreachable_loopback(&addr, &e) {
                return self.socket_error(format!("connecting to {addr}"), &e, Some(down));
            }
            let again = matches!(
                e.kind(),
                ErrorKind::ConnectionRefused
                    | ErrorKind::ConnectionReset
                    | ErrorKind::ConnectionAborted
                    | ErrorKind::NotConnected
                    | ErrorKind::BrokenPipe
                    | ErrorKind::TimedOut
                    | ErrorKind::Interrupted
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
                    | ErrorKind::AddrNotAvailable
                    | ErrorKind::WouldBlock
            );
            if !again {
                return self.socket_error(format!("connecting to {addr}"), &e, None);
            }
            if !told {
                // A line that nobody hears costs nothing of the rate.
                if tracing::enabled!(tracing::Level::DEBUG) && self.tenant.may_log() {
                    tracing::debug!(tenant = %self.tenant.name, "Connect to {addr} failed - retrying ({e})");
                }
                told = true;
            }
            if e.kind() == ErrorKind::AddrNotAvailable {
                starved = Some(e.to_string());
            }
            match self.pause(pause, until) {
                Waited::Ready => pause = (pause * 2).min(BACKOFF.1),
                Waited::Ended => return self.ended(&format!("connecting to {addr}")),
                Waited::Late => {
                    let hint = if starved.is_some() {
                        "no local port towards it is free, many wait to be used again: widen net.ipv4.ip_local_port_range, \
                         or join less often"
                    } else {
                        "is the rank that listens there running?"
                    };
                    let e = starved.unwrap_or_else(|| e.to_string());
                    return self.late(ms, || format!("Connect to {addr} failed for {ms} ms ({e}); {hint}"));
                }
            }
        }
    }

    /// What may be looked up for who asks for `host`. A name server learns each name that it is asked for, so a plugin chooses none:
    /// it may have the root's, as its program wrote it, and what is granted by name. An address is no name, and nobody is asked.
    fn name_to_look_up(&self, host: &str) -> Option<String> {
        let (ip, scope) = host.split_once('%').map_or((host, None), |(ip, scope)| (ip, Some(scope)));
        let address = match scope {
            None => ip.parse::<IpAddr>().is_ok(),
            // Resolvers differ about scopes that are none.
            Some(scope) => ip.parse::<Ipv6Addr>().is_ok() && scope.parse::<u32>().is_ok(),
        };
        if address || self.root_name.as_deref() == Some(host) {
            return Some(host.into());
        }
        self.grant.network.may_look_up(host)
    }

    /// `look_up` cannot be interrupted, so it runs beside; it is bounded by the resolver's own time-outs.
    fn do_resolve(
        &mut self,
        host: String,
        port: u16,
        ms: u32,
        look_up: impl FnOnce(&str, u16) -> std::io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> Answer<Vec<Vec<u8>>> {
        if host.len() > 253 {
            let why = format!("a host name has at most 253 characters, this one has {}", host.len());
            return Err(self.fail(Status::INVALID, why));
        }
        if self.grant.network.reach.is_empty() {
            let asked = format!("asked to look up host name {host}");
            return Err(self.refuse(Status::INVALID, "network.reach", &asked, "nothing"));
        }
        let Some(name) = self.name_to_look_up(&host) else {
            let grants = listed(&self.grant.network.names);
            return Err(self.refuse(
                Status::INVALID,
                "network.names",
                &format!("asked to look up host name {host}"),
                grants,
            ));
        };
        // A look-up that outlives its asker still holds a thread: only a few at once.
        let Some(counted) = self.tenant.resolving.take(MAX_RESOLVING) else {
            return Err(self.fail(Status::RESOURCE, format!("{MAX_RESOLVING} host names are being looked up already")));
        };
        let until = self.deadline(ms);
        let (answer, answered) = std::sync::mpsc::channel();
        // The far end of a pair is closed, which the wait sees, when the answer is there.
        let started = UnixStream::pair().and_then(|(near, far)| {
            std::thread::Builder::new().name("wccl-resolve".into()).spawn(move || {
                // The asker may have given up.
                let _ = answer.send(look_up(&name, port));
                drop((counted, far));
            })?;
            Ok(near)
        });
        let near = match started {
            Ok(near) => near,
            Err(e) => return self.socket_error("starting a resolver thread".into(), &e, None),
        };
        let what = format!("looking up host name {host}");
        match self.wait(&near, PollFlags::IN, until) {
            Waited::Ready => {}
            Waited::Ended => return self.ended(&what),
            Waited::Late => return self.late(ms, || format!("{what} took longer than {ms} ms")),
        }
        let found = match answered.try_recv() {
            Ok(Ok(found)) => found,
            Ok(Err(e)) => return self.socket_error(what, &e, None),
            Err(_) => return Err(self.fail(Status::FAILURE, format!("{what} ended without an answer"))),
        };
        let within: Vec<_> =
            found.iter().filter(|a| self.grant.network.may_reach(a.ip(), a.port())).map(encode).collect();
        if within.is_empty() && !found.is_empty() {
            let asked = format!("asked for host name {host}, which is {}", listed(&found));
            let grants = listed(&self.grant.network.reach);
            return Err(self.refuse(Status::INVALID, "network.reach", &asked, grants));
        }
        Ok(within)
    }

    /// Has the other end shown who it is, if it was dialled and has not yet: looks, or waits until `until`.
    fn proven(&mut self, handle: &Resource<ConnectionObject>, until: Option<Instant>, ms: u32) -> Trap<Answer<()>> {
        loop {
            let ConnectionObject { stream, dialled, .. } = self.table.get_mut(handle)?;
            let Some(unproven) = dialled else { return Ok(Ok(())) };
            match unproven.hear(&mut &*stream) {
                Ok(true) => {
                    *dialled = None;
                    self.absent = Duration::ZERO;
                }
                Ok(false) => {
                    let Some(until) = until else { return Ok(Ok(())) };
                    let stream = &self.table.get(handle)?.stream;
                    match self.wait(stream, PollFlags::IN, until) {
                        Waited::Ready => {}
                        Waited::Ended => return Ok(self.ended("receiving")),
                        Waited::Late => {
                            let who = peer_name(stream);
                            let what = || {
                                format!(
                                    "Timeout waiting for RX from {who}: it has not taken the connection after {ms} ms"
                                )
                            };
                            return Ok(self.late(ms, what));
                        }
                    }
                }
                Err(why) => {
                    let to = unproven.to;
                    // Nothing more is to be heard of it; it may be closed already.
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                    return Ok(self.unproven(to, why, ms));
                }
            }
        }
    }

    /// The other end is not who was dialled, or has left before it could show that.
    fn unproven<T>(&mut self, to: SocketAddr, why: Unproven, ms: u32) -> Answer<T> {
        if self.root == Some(to) && !self.abort.aborted() {
            return Err(self.fail(Status::FAILURE, format!("who listens at {to} is not of this group, {}", spent(to))));
        }
        if why != Unproven::Closed {
            return Err(self.fail(Status::FAILURE, format!("{to} is not of this group: {why}")));
        }
        let what = format!(
            "RX, connection closed by remote peer {to} before it had shown that it knows the group's key: it has ended, or it is \
             of another group or job (WCCL_JOB_SECRET must be the same for all ranks that meet at host:port)"
        );
        // Longer each time: it may be a root with another secret, which tells its operator of every visit.
        self.absent = (self.absent * 2).clamp(BACKOFF.1, MOST_ABSENT);
        self.left(Status::UNINITIALIZED, ms, what)
    }

    fn do_send(&mut self, handle: &Resource<ConnectionObject>, data: &[u8], ms: u32) -> Trap<Answer<()>> {
        // A root that cannot show who it is gets no more than one message.
        if let Err(s) = self.proven(handle, None, ms)? {
            return Ok(Err(s));
        }
        let until = self.deadline(ms);
        let mut sent = 0;
        while sent < data.len() {
            let mut stream = &self.table.get(handle)?.stream;
            match stream.write(&data[sent..]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => match self.wait(stream, PollFlags::OUT, until) {
                    Waited::Ready => {}
                    Waited::Ended => return Ok(self.ended("sending")),
                    Waited::Late => {
                        let what = || format!("Timeout sending {} bytes after {ms} ms", data.len());
                        return Ok(self.late(ms, what));
                    }
                },
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    let who = peer_name(stream);
                    // One that has left since it was looked at a moment ago.
                    if let Some(unproven) = &self.table.get(handle)?.dialled {
                        let to = unproven.to;
                        return Ok(self.unproven(to, Unproven::Closed, ms));
                    }
                    return Ok(self.gone(ms, format!("TX, connection closed by remote peer {who}: {e}")));
                }
            }
        }
        Ok(Ok(()))
    }

    fn do_recv(&mut self, handle: &Resource<ConnectionObject>, bytes: u32, ms: u32) -> Trap<Answer<Vec<u8>>> {
        let until = self.deadline(ms);
        if let Err(s) = self.proven(handle, Some(until), ms)? {
            return Ok(Err(s));
        }
        let conn = self.table.get_mut(handle)?;
        // What came for an earlier receive that timed out is where this one begins.
        let mut data = std::mem::take(&mut conn.early);
        let mut got = data.len();
        if got > bytes as usize {
            conn.early = data.split_off(bytes as usize);
            return Ok(Ok(data));
        }
        data.resize(bytes as usize, 0);
        while got < data.len() {
            let mut stream = &self.table.get(handle)?.stream;
            match stream.read(&mut data[got..]) {
                Ok(0) => {
                    let who = peer_name(stream);
                    let why = format!("RX, connection closed by remote peer {who} after {got} of {bytes} bytes");
                    return Ok(self.gone(ms, why));
                }
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => match self.wait(stream, PollFlags::IN, until) {
                    Waited::Ready => {}
                    Waited::Ended => return Ok(self.ended("receiving")),
                    Waited::Late => {
                        let who = peer_name(stream);
                        data.truncate(got);
                        // A guest must not have the host keep room for what never came.
                        data.shrink_to_fit();
                        self.table.get_mut(handle)?.early = data;
                        return Ok(self.late(ms, || {
                            format!("Timeout waiting for RX from {who}: {got} of {bytes} bytes after {ms} ms")
                        }));
                    }
                },
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    let who = peer_name(stream);
                    return Ok(self.gone(ms, format!("RX, connection closed by remote peer {who}: {e}")));
                }
            }
        }
        Ok(Ok(data))
    }
}

/// The kernel's buffers of a socket have this size from now on, and do not grow with what comes.
pub fn bound_buffers(socket: impl AsFd) -> std::io::Result<()> {
    use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
    set_socket_recv_buffer_size(&socket, SOCKET_BUFFER)?;
    Ok(set_socket_send_buffer_size(&socket, SOCKET_BUFFER)?)
}

/// Prepares a connection for its waits and its small messages.
fn set_up(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    bound_buffers(stream)
}

/// Says first what the other end is to check, which the empty buffer takes.
fn greet(stream: &TcpStream, key: &GroupKey) -> std::io::Result<Dialled> {
    stream.set_nodelay(true)?;
    let (dialled, hello) = Dialled::new(key, random::bytes()?, stream.peer_addr()?);
    match (&mut &*stream).write(&hello)? {
        n if n == hello.len() => Ok(dialled),
        _ => Err(ErrorKind::BrokenPipe.into()),
    }
}

/// Why a root that an id names does not answer: it listened before there was the id.
fn spent(root: SocketAddr) -> String {
    let here = if root.ip().is_loopback() {
        "; a loopback address is reached on the machine that made the id only"
    } else {
        ""
    };
    format!(
        "so the id is spent: its group has been made or given up, or the process that made it has ended; an id serves one group, \
         once: make a new one with unique_id{here}"
    )
}

/// What is behind an error with a loopback address, if loopback is down.
fn unreachable_loopback(addr: &SocketAddr, e: &std::io::Error) -> Option<&'static str> {
    let unreachable =
        matches!(e.kind(), ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable | ErrorKind::AddrNotAvailable);
    // Of interfaces that cannot be listed nothing is said.
    (unreachable && addr.ip().is_loopback()).then(|| loopback_down(&system::addresses().ok()?)).flatten()
}

/// Listens on the address, with one of the ports where it says 0: the kernel's choice if all are granted, else the first free
/// one from a place that differs from call to call, so that those who come together do not try the same ones.
pub fn bind(mut addr: SocketAddr, ports: &[(u16, u16)]) -> std::io::Result<TcpListener> {
    if addr.port() != 0 || ports.contains(&ALL_PORTS) {
        return TcpListener::bind(addr);
    }
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)).wrapping_mul(257);
    let mut last = ErrorKind::AddrInUse.into();
    for (first, end) in ports {
        let n = u32::from(*end - *first) + 1;
        for i in 0..n {
            addr.set_port(first + (begin.wrapping_add(i) % n) as u16);
            match TcpListener::bind(addr) {
                Ok(l) => return Ok(l),
                Err(e) if e.kind() == ErrorKind::AddrInUse => last = e,
                Err(e) => return Err(e),
            }
        }
    }
    Err(last)
}

/// A socket's object, and its place among what is parked.
trait Socket: Sized + Send + 'static {
    const WHAT: &'static str;
    fn park(self) -> ParkedSocket;
    /// The object, or what it is instead.
    #[allow(clippy::result_large_err)]
    fn unpark(parked: ParkedSocket) -> Result<Self, ParkedSocket>;
}

impl Socket for ConnectionObject {
    const WHAT: &'static str = "connection";

    fn park(self) -> ParkedSocket {
        ParkedSocket::Connection(self)
    }

    fn unpark(parked: ParkedSocket) -> Result<Self, ParkedSocket> {
        if let ParkedSocket::Connection(c) = parked { Ok(c) } else { Err(parked) }
    }
}

impl Socket for ListenerObject {
    const WHAT: &'static str = "listener";

    fn park(self) -> ParkedSocket {
        ParkedSocket::Listener(self)
    }

    fn unpark(parked: ParkedSocket) -> Result<Self, ParkedSocket> {
        if let ParkedSocket::Listener(l) = parked { Ok(l) } else { Err(parked) }
    }
}

impl HostState {
    fn do_park<T: Socket>(
        &mut self,
        comm: &Resource<CommunicatorObject>,
        slot: u32,
        handle: Resource<T>,
    ) -> Trap<Answer<()>> {
        let comm = self.comm(comm)?;
        // Given away by the guest: whatever happens, it is not the instance's any more.
        let socket =
            self.remove(handle).ok_or_else(|| wasmtime::format_err!("a handle that was given is not there"))?;
        let mut parked = lock(&comm.parked);
        if parked.contains_key(&slot) {
            return Ok(Err(self.fail(Status::INVALID, format!("slot {slot} of communicator {} is taken", comm.id))));
        }
        parked.insert(slot, socket.park());
        Ok(Ok(()))
    }

    fn do_unpark<T: Socket>(&mut self, comm: &Resource<CommunicatorObject>, slot: u32) -> Trap<Answer<Resource<T>>> {
        let comm = self.comm(comm)?;
        let mut parked = lock(&comm.parked);
        let found = match parked.remove(&slot).map(T::unpark) {
            Some(Ok(socket)) => socket,
            other => {
                // One of the other kind stays.
                parked.extend(other.and_then(Result::err).map(|p| (slot, p)));
                let why = format!("slot {slot} of communicator {} holds no {}", comm.id, T::WHAT);
                return Ok(Err(self.fail(Status::INVALID_HANDLE, why)));
            }
        };
        Ok(self.add(found))
    }
}

fn peer_name(stream: &TcpStream) -> String {
    stream.peer_addr().map_or_else(|_| "(gone)".into(), |a| a.to_string())
}

fn limit(function: &str) -> u64 {
    byte_list("neuron:hw/sockets", function).unwrap_or(0)
}

impl Host for HostState {
    fn interfaces(&mut self) -> Trap<Vec<Netif>> {
        // Those that it may not listen on are of no use to it.
        let there = match system::addresses() {
            Ok(there) => there,
            Err(e) => {
                let (tenant, why) = (&self.tenant, format!("the interfaces of this machine cannot be listed: {e}"));
                if tenant.may_log() {
                    tracing::warn!(tenant = %tenant.name, "{why}");
                }
                self.note(why);
                return Ok(Vec::new());
            }
        };
        if let Some(down) = loopback_down(&there) {
            self.note(down.into());
        }
        let mut all = interfaces(there);
        let some = !all.is_empty();
        all.retain(|i| decode(&i.address).is_ok_and(|a| self.grant.network.may_listen(a.ip(), 0)));
        if some && all.is_empty() {
            let grants = listed(&self.grant.network.listen);
            let why = self.tenant.refuse("network.listen", "asked for an interface to listen on", grants);
            self.note(why);
        }
        Ok(all)
    }

    fn resolve(&mut self, host: String, port: u16, ms: u32) -> Trap<Answer<Vec<Vec<u8>>>> {
        Ok(self.do_resolve(host, port, ms, |host, port| Ok((host, port).to_socket_addrs()?.collect())))
    }

    fn listen(&mut self, address: Vec<u8>, ms: u32) -> Trap<Answer<Resource<ListenerObject>>> {
        Ok(self.do_listen(&address, ms))
    }

    fn local_address(&mut self, listener: Resource<ListenerObject>) -> Trap<Vec<u8>> {
        Ok(encode(&self.table.get(&listener)?.socket.local_addr()?))
    }

    fn accept(
        &mut self,
        listener: Resource<ListenerObject>,
        ms: u32,
    ) -> Trap<Answer<(Resource<ConnectionObject>, Vec<u8>)>> {
        self.do_accept(&listener, ms)
    }

    fn connect(&mut self, address: Vec<u8>, ms: u32) -> Trap<Answer<Resource<ConnectionObject>>> {
        Ok(self.do_connect(&address, ms))
    }

    fn send(&mut self, connection: Resource<ConnectionObject>, data: Vec<u8>, ms: u32) -> Trap<Answer<()>> {
        if data.len() as u64 > limit("send") {
            let why = format!("one send has at most {} bytes, the plugin gave {}", limit("send"), data.len());
            return Ok(Err(self.fail(Status::INVALID, why)));
        }
        self.do_send(&connection, &data, ms)
    }

    fn recv(&mut self, connection: Resource<ConnectionObject>, bytes: u32, ms: u32) -> Trap<Answer<Vec<u8>>> {
        if u64::from(bytes) > limit("recv") {
            let why = format!("one receive has at most {} bytes, the plugin asked for {bytes}", limit("recv"));
            return Ok(Err(self.fail(Status::INVALID, why)));
        }
        self.do_recv(&connection, bytes, ms)
    }

    fn park(
        &mut self,
        comm: Resource<CommunicatorObject>,
        slot: u32,
        connection: Resource<ConnectionObject>,
    ) -> Trap<Answer<()>> {
        self.do_park(&comm, slot, connection)
    }

    fn unpark(&mut self, comm: Resource<CommunicatorObject>, slot: u32) -> Trap<Answer<Resource<ConnectionObject>>> {
        self.do_unpark(&comm, slot)
    }

    fn park_listener(
        &mut self,
        comm: Resource<CommunicatorObject>,
        slot: u32,
        listener: Resource<ListenerObject>,
    ) -> Trap<Answer<()>> {
        self.do_park(&comm, slot, listener)
    }

    fn unpark_listener(
        &mut self,
        comm: Resource<CommunicatorObject>,
        slot: u32,
    ) -> Trap<Answer<Resource<ListenerObject>>> {
        self.do_unpark(&comm, slot)
    }
}

/// Interfaces that carry an address, from the kernel's own tables; loopback only if it is up.
fn interfaces(there: Vec<system::Address>) -> Vec<Netif> {
    let mut found: Vec<Netif> = Vec::new();
    let mut add = |name: &str, ip: IpAddr, scope: u32| {
        let addr = match ip {
            IpAddr::V4(v4) => SocketAddr::from((v4, 0)),
            IpAddr::V6(v6) => SocketAddr::V6(SocketAddrV6::new(v6, 0, 0, scope)),
        };
        let link_local = match ip {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        found.push(Netif { name: name.into(), address: encode(&addr), loopback: ip.is_loopback(), link_local });
    };
    for a in there.iter().filter(|a| a.runs || !a.ip.is_loopback()) {
        add(&a.name, a.ip, a.scope);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::abort::AbortToken;
    use crate::bindings::neuron::hw::objects::HostCommunicator;
    use crate::limits::{GATE_PLACES, Limits, TENANT_GATE_PLACES};
    use crate::objects::handshake::NONCE;
    use crate::tenant::{limited, networked};

    /// An instance's state, with a communicator and a limit of sockets.
    fn instance(sockets: usize) -> (HostState, Resource<CommunicatorObject>) {
        let tenant = limited(Limits { sockets, ..Limits::default() });
        let mut s = HostState::new(tenant, None, AbortToken::new().unwrap(), Some(0));
        (s.key, s.seat) = (Some(crate::key::GroupKey::some()), Some((0, 2)));
        let comm = s.create(0, 2).unwrap().unwrap();
        (s, comm)
    }

    /// Another handle of it: calls take theirs.
    fn borrow<T: 'static>(handle: &Resource<T>) -> Resource<T> {
        Resource::new_borrow(handle.rep())
    }

    fn pair(s: &mut HostState) -> (Resource<ConnectionObject>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let counted = s.one_more_socket().unwrap();
        let near = listener.accept().unwrap().0;
        set_up(&near).unwrap();
        (s.new_connection(near, None, counted).unwrap(), far)
    }

    /// An instance of the `group`th group.
    fn member(group: u8) -> HostState {
        let tenant = limited(Limits { sockets: 200, wall: Duration::from_secs(60), ..Limits::default() });
        let mut s = HostState::new(tenant, None, AbortToken::new().unwrap(), Some(0));
        s.key = Some(GroupKey::of_id(&[group; 32], 0));
        s
    }

    /// A listener of an instance, and where it is.
    fn listener(s: &mut HostState) -> (Resource<ListenerObject>, SocketAddr) {
        let listener = s.do_listen(&encode(&"127.0.0.1:0".parse().unwrap()), 100).unwrap();
        let at = decode(&s.local_address(borrow(&listener)).unwrap()).unwrap();
        (listener, at)
    }

    fn said(s: &mut HostState) -> String {
        s.take_causes().0.join("; ")
    }

    /// Longer than anything here takes.
    const LONG: u32 = 50_000;

    fn accepted(s: &mut HostState, at: &Resource<ListenerObject>) -> Resource<ConnectionObject> {
        s.do_accept(at, LONG).unwrap().unwrap().0
    }

    fn dialled(s: &mut HostState, at: SocketAddr) -> Resource<ConnectionObject> {
        s.do_connect(&encode(&at), LONG).unwrap()
    }

    /// Two ends hear one another.
    fn talk(a: (&mut HostState, &Resource<ConnectionObject>), b: (&mut HostState, &Resource<ConnectionObject>)) {
        a.0.do_send(a.1, b"question", LONG).unwrap().unwrap();
        assert_eq!(b.0.do_recv(b.1, 8, LONG).unwrap().unwrap(), b"question");
        b.0.do_send(b.1, b"answer", LONG).unwrap().unwrap();
        assert_eq!(a.0.do_recv(a.1, 6, LONG).unwrap().unwrap(), b"answer");
    }

    /// What a host of the group says first when it dials `at`.
    fn hello(s: &HostState, at: SocketAddr, nonce: u8) -> Vec<u8> {
        Dialled::new(&s.key.unwrap(), [nonce; NONCE], at).1.to_vec()
    }

    #[test]
    fn members_of_a_group_hear_one_another_among_strangers() {
        let (mut root, mut rank, mut other) = (member(1), member(1), member(2));
        let (l, at) = listener(&mut root);
        // Mute ones, foreign bytes (those of the guests' own protocol), and another group.
        let mute: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(at).unwrap()).collect();
        let mut foreign = TcpStream::connect(at).unwrap();
        foreign.write_all(b"ilya\0\0\0\0\x02\0\0\0\x02\0\x12\x34\x7f\0\0\x01\0\0\0\0\0\0\0\0").unwrap();
        let lost = dialled(&mut other, at);
        // Nobody waits for the other one's accept.
        let far = dialled(&mut rank, at);
        rank.do_send(&far, b"hello", LONG).unwrap().unwrap();
        let near = accepted(&mut root, &l);
        assert_eq!(root.do_recv(&near, 5, LONG).unwrap().unwrap(), b"hello");
        talk((&mut rank, &far), (&mut root, &near));
        foreign.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        assert_eq!(foreign.read(&mut [0]).unwrap_or(0), 0, "who is no member is closed");
        assert!(matches!(other.do_recv(&lost, 1, LONG).unwrap(), Err(s) if Status::from(&s) == Status::UNINITIALIZED));
        let why = said(&mut other);
        assert!(why.contains("before it had shown that it knows the group's key"), "{why}");
        drop(mute);
    }

    #[test]
    fn a_hello_that_was_recorded_is_refused() {
        let mut root = member(1);
        let (l, at) = listener(&mut root);
        let recorded = hello(&root, at, 7);
        let mut first = TcpStream::connect(at).unwrap();
        first.write_all(&recorded).unwrap();
        accepted(&mut root, &l);
        let mut again = TcpStream::connect(at).unwrap();
        again.write_all(&recorded).unwrap();
        // Elsewhere too, where nobody has heard it.
        let mut third = member(1);
        let (elsewhere, there) = listener(&mut third);
        let mut moved = TcpStream::connect(there).unwrap();
        moved.write_all(&recorded).unwrap();
        assert!(root.do_accept(&l, 300).unwrap().is_err() && third.do_accept(&elsewhere, 300).unwrap().is_err());
        for mut s in [again, moved] {
            s.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            assert_eq!(s.read(&mut [0]).unwrap_or(0), 0, "it is closed");
        }
    }

    /// More strangers than a gate has places, who say nothing: the oldest make room.
    #[test]
    fn a_full_gate_lets_members_in() {
        let (mut root, mut rank) = (member(1), member(1));
        let (l, at) = listener(&mut root);
        let mute: Vec<TcpStream> = (0..GATE_PLACES + 20).map(|_| TcpStream::connect(at).unwrap()).collect();
        let far = dialled(&mut rank, at);
        let near = accepted(&mut root, &l);
        talk((&mut rank, &far), (&mut root, &near));
        assert!(root.tenant.gates.alive() < GATE_PLACES, "one of them has the listener's own place");
        root.release();
        assert_eq!(root.tenant.gates.alive(), 0);
        drop(mute);
    }

    /// A guest hears nothing of one that does not know the key, however the connection went from hand to hand.
    #[test]
    fn the_answer_is_checked_before_the_first_byte_also_by_a_successor() {
        let strange = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = strange.local_addr().unwrap();
        for right in [false, true] {
            let (mut old, comm) = instance(4);
            let conn = dialled(&mut old, at);
            let mut far = strange.accept().unwrap().0;
            let mut said_first = [0; crate::objects::handshake::HELLO];
            far.read_exact(&mut said_first).unwrap();
            let (mut visitor, mut heard) = (crate::objects::handshake::Dialling::new(), Default::default());
            let proof = visitor.hear(&mut &said_first[..], &old.key.unwrap(), at, &mut heard).unwrap().unwrap();
            // Half of it has come when the old one looks.
            far.write_all(&proof[..16]).unwrap();
            assert!(old.do_recv(&conn, 4, 300).unwrap().is_err());
            old.park(borrow(&comm), 7, conn).unwrap().unwrap();
            let core = old.comm(&comm).unwrap();
            let mut new = HostState::new(old.tenant.clone(), None, AbortToken::new().unwrap(), Some(0));
            let comm = new.add(CommunicatorObject(core)).unwrap();
            old.release();
            far.write_all(if right { &proof[16..] } else { &[0; 16] }).unwrap();
            far.write_all(b"data").unwrap();
            let conn = new.unpark(borrow(&comm), 7).unwrap().unwrap();
            let got = new.do_recv(&conn, 4, LONG).unwrap();
            if right {
                assert_eq!(got.unwrap(), b"data");
                continue;
            }
            // Nor later.
            assert!(got.is_err() && new.do_recv(&conn, 4, LONG).unwrap().is_err());
            let why = said(&mut new);
            assert!(why.contains(&format!("{at} is not of this group: it does not know the group's key")), "{why}");
        }
    }

    #[test]
    fn an_id_whose_root_is_gone_is_spent_and_another_place_is_waited_for() {
        use rustix::net::{AddressFamily, SocketType, bind, socket};
        let mut rank = member(1);
        // A port that nobody gets, and on which nobody listens.
        let taken = TcpListener::from(socket(AddressFamily::INET, SocketType::STREAM, None).unwrap());
        bind(&taken, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let at = taken.local_addr().unwrap();
        // Of a group that meets at a place it was told: the root may come yet.
        assert!(rank.do_connect(&encode(&at), 100).is_err());
        let waited = said(&mut rank);
        assert!(waited.contains("failed for 100 ms") && !waited.contains("spent"), "{waited}");
        rank.root = Some(at);
        assert!(rank.do_connect(&encode(&at), u32::MAX).is_err());
        let gone = said(&mut rank);
        for part in ["nobody listens at 127.0.0.1:", "the id is spent", "make a new one with unique_id"] {
            assert!(gone.contains(part), "{gone}");
        }
        // Somebody else got the port: another group, a stranger that closes, one that says something.
        let mut other = member(2);
        let (l, at) = listener(&mut other);
        rank.root = Some(at);
        let conn = dialled(&mut rank, at);
        assert!(other.do_accept(&l, 200).unwrap().is_err());
        assert!(rank.do_recv(&conn, 1, u32::MAX).unwrap().is_err());
        let strange = TcpListener::bind("127.0.0.1:0").unwrap();
        rank.root = strange.local_addr().ok();
        let conn = dialled(&mut rank, strange.local_addr().unwrap());
        let mut far = strange.accept().unwrap().0;
        far.write_all(&[7; 40]).unwrap();
        assert!(rank.do_recv(&conn, 1, u32::MAX).unwrap().is_err());
        let taken = rank.take_causes().0;
        assert_eq!(taken.len(), 2, "{taken:?}");
        for why in taken {
            assert!(why.contains("is not of this group, so the id is spent"), "{why}");
        }
    }

    #[test]
    fn without_a_group_there_are_no_sockets() {
        let mut s = member(1);
        let (l, at) = listener(&mut s);
        s.key = None;
        assert!(s.do_listen(&encode(&at), 0).is_err());
        assert!(s.do_connect(&encode(&at), 0).is_err());
        assert!(s.do_accept(&l, 0).unwrap().is_err());
        let said = said(&mut s);
        for what in ["listen", "connect", "accept connections"] {
            assert!(said.contains(&format!("asked to {what} while it works for no group")), "{said}");
        }
    }

    /// A root's task is ended by the same abort, and may be quicker: the user reads what the user did.
    #[test]
    fn a_peer_that_ends_for_an_abort_is_no_other_reason() {
        let (mut s, _comm) = instance(4);
        let (conn, peer) = pair(&mut s);
        s.abort.abort("the user has changed his mind");
        drop(peer);
        for ms in [0, 10_000] {
            assert!(s.do_recv(&conn, 1, ms).unwrap().is_err());
            let said = s.take_causes().0.join("; ");
            assert!(said.contains("was aborted: the user has changed his mind"), "{said}");
        }
    }

    /// However much the other end sends, and whoever accepted or dialled.
    #[test]
    fn a_connection_holds_so_many_bytes_and_no_more() {
        let (mut root, mut rank) = (member(1), member(1));
        let (l, at) = listener(&mut root);
        let far = dialled(&mut rank, at);
        let near = accepted(&mut root, &l);
        for (s, conn) in [(&root, &near), (&rank, &far)] {
            use rustix::net::sockopt::{socket_recv_buffer_size, socket_send_buffer_size};
            let stream = &s.table.get(conn).unwrap().stream;
            let (recv, send) = (socket_recv_buffer_size(stream).unwrap(), socket_send_buffer_size(stream).unwrap());
            // The kernel's own doubling.
            assert!(recv <= 2 * SOCKET_BUFFER && send <= 2 * SOCKET_BUFFER, "{recv}, {send}");
        }
        // A message of the longest kind is taken at once; without end it is not.
        let message = vec![1; limit("send") as usize];
        rank.do_send(&far, &message, LONG).unwrap().unwrap();
        let mut more = 0;
        while rank.do_send(&far, &message, 100).unwrap().is_ok() {
            more += 1;
            assert!(more < 8, "{more} messages more");
        }
    }

    #[test]
    fn a_parked_connection_goes_to_the_next_instance_with_what_came_early() {
        let (mut old, comm) = instance(4);
        let (conn, mut far) = pair(&mut old);
        far.write_all(b"half").unwrap();
        // Four of eight bytes came in time.
        assert!(old.recv(borrow(&conn), 8, 500).unwrap().is_err());
        old.park(borrow(&comm), 7, conn).unwrap().unwrap();
        // The successor has a table of its own, and a handle of the same communicator.
        let core = old.comm(&comm).unwrap();
        let mut new = HostState::new(old.tenant.clone(), None, AbortToken::new().unwrap(), Some(0));
        let comm = new.add(CommunicatorObject(core)).unwrap();
        old.release();
        far.write_all(b"rest").unwrap();
        let conn = new.unpark(borrow(&comm), 7).unwrap().unwrap();
        assert_eq!(new.recv(borrow(&conn), 8, 5000).unwrap().unwrap(), b"halfrest");
        assert!(new.unpark(borrow(&comm), 7).unwrap().is_err());
        let (causes, _) = new.take_causes();
        assert!(causes.iter().any(|c| c.contains("slot 7") && c.contains("holds no connection")), "{causes:?}");
    }

    #[test]
    fn slots_hold_one_socket_of_one_kind() {
        let (mut s, comm) = instance(4);
        let park = |s: &mut HostState, slot| {
            let (conn, far) = pair(s);
            (s.park(borrow(&comm), slot, conn).unwrap(), far)
        };
        let kept = [park(&mut s, 0), park(&mut s, u32::MAX)];
        assert!(kept.iter().all(|k| k.0.is_ok()));
        let (refused, mut far) = park(&mut s, 0);
        assert!(refused.is_err());
        assert_eq!(far.read(&mut [0]).unwrap(), 0, "what is refused is closed");
        assert!(s.unpark_listener(borrow(&comm), 0).unwrap().is_err());
        s.unpark(borrow(&comm), 0).unwrap().unwrap();
        let said = s.take_causes().0.join("; ");
        for part in ["slot 0 of communicator", "is taken", "holds no listener"] {
            assert!(said.contains(part), "{said}");
        }
    }

    #[test]
    fn sockets_are_counted_for_the_tenant_wherever_they_are() {
        let (mut s, comm) = instance(3);
        let any = encode(&"127.0.0.1:0".parse().unwrap());
        let mut other = HostState::new(s.tenant.clone(), None, AbortToken::new().unwrap(), Some(0));
        other.key = s.key;
        let full = |s: &mut HostState, refused: bool| {
            let said = s.take_causes().0.join("; ");
            assert!(refused && said.contains("asked for one more socket; limits.connections grants 3"), "{said}");
        };
        let refused = |s: &mut HostState| {
            let listens = s.do_listen(&any, 100).is_err();
            full(s, listens);
        };
        // One in each instance, and one between two.
        let (conn, _far) = pair(&mut s);
        s.park(borrow(&comm), 0, conn).unwrap().unwrap();
        let listener = s.do_listen(&any, 100).unwrap();
        s.park_listener(borrow(&comm), 1, listener).unwrap().unwrap();
        let others = other.do_listen(&any, 100).unwrap();
        refused(&mut s);
        refused(&mut other);
        // What is refused for another reason gives its place back, as do a closed socket, and an instance that ends.
        other.remove(others).unwrap();
        assert!(other.do_listen(&[0; 3], 100).is_err());
        let others = other.do_listen(&any, 100).unwrap();
        let accepts = other.do_accept(&others, 0).unwrap().is_err();
        full(&mut other, accepts);
        let there = other.local_address(borrow(&others)).unwrap();
        let connects = other.do_connect(&there, 1000).is_err();
        full(&mut other, connects);
        other.release();
        let listener = s.unpark_listener(borrow(&comm), 1).unwrap().unwrap();
        s.remove(listener).unwrap();
        assert_eq!(s.tenant.sockets.alive(), 1);
        s.unpark(borrow(&comm), 0).unwrap().unwrap();
        assert_eq!(s.tenant.sockets.alive(), 1);
        s.release();
        assert_eq!(s.tenant.sockets.alive(), 0);
    }

    #[test]
    fn what_nobody_takes_is_closed_with_the_communicator() {
        let (mut s, comm) = instance(4);
        let (conn, mut far) = pair(&mut s);
        let listener = s.do_listen(&encode(&"127.0.0.1:0".parse().unwrap()), 100).unwrap();
        let at = decode(&s.local_address(borrow(&listener)).unwrap()).unwrap();
        s.park(borrow(&comm), 0, conn).unwrap().unwrap();
        s.park_listener(borrow(&comm), 1, listener).unwrap().unwrap();
        far.set_nonblocking(true).unwrap();
        assert_eq!(far.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        far.set_nonblocking(false).unwrap();
        s.release();
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
        assert!(TcpStream::connect(at).is_err());
    }

    #[test]
    fn a_look_up_ends_with_the_abort() {
        let (mut s, _comm) = instance(1);
        let (abort, (release, held)) = (s.abort.clone(), std::sync::mpsc::channel::<()>());
        // Like a name server that does not answer.
        let never = move |_: &str, _| {
            abort.abort("the user has changed his mind");
            let _ = held.recv();
            Ok(Vec::new())
        };
        assert!(s.do_resolve("a".into(), 1, u32::MAX, never).is_err());
        let said = s.take_causes().0.join("; ");
        assert!(said.contains("looking up host name a was aborted: the user has changed his mind"), "{said}");
        assert_eq!(s.tenant.resolving.alive(), 1, "its thread still counts");
        drop(release);
        let found = |_: &str, port| Ok(vec![SocketAddr::from(([10, 0, 0, 1], port))]);
        let (mut s, _comm) = instance(1);
        assert_eq!(s.do_resolve("a".into(), 7, 10_000, found).unwrap(), [encode(&"10.0.0.1:7".parse().unwrap())]);
    }

    /// What a plugin asks a name server for it tells that one.
    #[test]
    fn a_policy_of_addresses_lets_no_name_be_asked_for() {
        let tenant = networked("reach = [\"127.0.0.0/8:*\"]");
        let mut s = HostState::new(tenant.clone(), None, AbortToken::new().unwrap(), Some(0));
        let asked = Arc::new(std::sync::Mutex::new(Vec::new()));
        let mut ask = |host: &str| {
            let asked = asked.clone();
            s.do_resolve(host.into(), 80, 10_000, move |host, port| {
                lock(&asked).push(host.to_string());
                Ok(vec![SocketAddr::from(([127, 0, 0, 1], port))])
            })
        };
        assert!(ask("secret-bits.example").is_err());
        assert!(ask("localhost").is_err());
        assert!(ask("127.0.0.1").is_ok() && ask("::ffff:127.0.0.1").is_ok());
        assert_eq!(*lock(&asked), ["127.0.0.1", "::ffff:127.0.0.1"]);
        let said = s.take_causes().0.join("; ");
        assert!(
            said.contains("tenant red asked to look up host name secret-bits.example; network.names grants nothing"),
            "{said}"
        );
        assert_eq!(tenant.counters.refusals()["network.names"], 2);
    }

    #[test]
    fn the_roots_name_and_granted_ones_are_asked_for_and_no_others() {
        let tenant = networked("reach = [\"127.0.0.0/8:*\"]\nnames = [\"host.example\", \"*.nodes.example\"]");
        let mut s = HostState::new(tenant.clone(), None, AbortToken::new().unwrap(), Some(0));
        s.root_name = Some("Root.test".into());
        let asked = Arc::new(std::sync::Mutex::new(Vec::new()));
        for (host, goes_out) in [
            ("Root.test", Some("Root.test")),
            // Case would tell something.
            ("root.test", None),
            ("Root.test.", None),
            ("HOST.example", Some("host.example")),
            ("a7.nodes.example", Some("a7.nodes.example")),
            ("nodes.example", None),
            ("127.1", None),
            ("fe80::1%bits.example", None),
            ("::1%1", Some("::1%1")),
        ] {
            let to = asked.clone();
            let found = s.do_resolve(host.into(), 80, 10_000, move |host, port| {
                lock(&to).push(host.to_string());
                Ok(vec![SocketAddr::from(([127, 0, 0, 1], port))])
            });
            assert_eq!((found.is_ok(), lock(&asked).pop().as_deref()), (goes_out.is_some(), goes_out), "{host}");
        }
    }

    /// Look-ups that outlive their askers hold threads: a tenant has a few, whichever of its instances asks.
    #[test]
    fn a_tenant_looks_few_names_up_at_a_time() {
        let (mut s, _comm) = instance(1);
        let mut other = HostState::new(s.tenant.clone(), None, AbortToken::new().unwrap(), Some(0));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(std::sync::Mutex::new(held));
        let mute = || {
            let held = held.clone();
            move |_: &str, _| {
                let _ = lock(&held).recv();
                Ok(Vec::new())
            }
        };
        for _ in 0..MAX_RESOLVING {
            assert!(s.do_resolve("a".into(), 1, 60, mute()).is_err());
        }
        let said = s.take_causes().0.join("; ");
        assert!(said.contains("looking up host name a took longer than 60 ms"), "{said}");
        assert!(other.do_resolve("a".into(), 1, 60, mute()).is_err());
        let said = other.take_causes().0.join("; ");
        assert!(said.contains("4 host names are being looked up already"), "{said}");
        drop(release);
        let until = Instant::now() + Duration::from_secs(10);
        while s.tenant.resolving.alive() > 0 {
            assert!(Instant::now() < until, "look-ups that have ended still count");
            std::thread::yield_now();
        }
        other.do_resolve("a".into(), 1, 10_000, |_, _| Ok(Vec::new())).unwrap();
    }

    #[test]
    fn addresses_round_trip_in_28_bytes() {
        for text in ["127.0.0.1:5", "10.1.2.3:65535", "[::1]:9", "[fe80::1%3]:77"] {
            let addr: SocketAddr = text.parse().unwrap();
            let b = encode(&addr);
            assert_eq!(b.len(), 28);
            assert_eq!(u16::from_be_bytes([b[2], b[3]]), addr.port());
            assert_eq!(decode(&b).unwrap(), addr);
        }
        assert!(decode(&[0; 27]).unwrap_err().contains("27"));
        assert!(decode(&[0; 28]).unwrap_err().contains("family 0"));
    }

    #[test]
    fn the_loopback_interface_is_listed() {
        assert!(interfaces(system::addresses().unwrap()).iter().any(|i| i.loopback && i.name == "lo"));
    }

    /// Strangers at one listener of a tenant take places from those at another, of another instance too: all together are bounded.
    #[test]
    fn strangers_are_counted_for_the_tenant_at_all_its_listeners() {
        let (mut one, mut other) = (member(1), member(1));
        other.tenant = one.tenant.clone();
        let ((l, at), (m, there)) = (listener(&mut one), listener(&mut other));
        let (gates, free) = (&one.tenant.clone().gates, 3);
        let _elsewhere: Vec<Counted> = (free..TENANT_GATE_PLACES).map(|_| gates.count()).collect();
        // More than the places that are left, and fewer than one gate has.
        let mute = |at| (0..GATE_PLACES / 2).map(|_| TcpStream::connect(at).unwrap()).collect::<Vec<_>>();
        let _mute = (mute(at), mute(there));
        let begun = Instant::now();
        // The oldest makes room for the next one: between the two a place may be free.
        let fill = |s: &mut HostState, l: &Resource<ListenerObject>| loop {
            assert!(s.do_accept(l, 20).unwrap().is_err());
            if gates.alive() >= TENANT_GATE_PLACES {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{} places are taken", gates.alive());
        };
        fill(&mut one, &l);
        // One is let in, to the place that each listener has.
        assert!(other.do_accept(&m, 20).unwrap().is_err());
        assert_eq!(gates.alive(), TENANT_GATE_PLACES);
        one.release();
        assert_eq!(gates.alive(), TENANT_GATE_PLACES - free, "the other one has taken a place that was not left");
        fill(&mut other, &m);
        assert_eq!(gates.alive(), TENANT_GATE_PLACES);
    }
}
