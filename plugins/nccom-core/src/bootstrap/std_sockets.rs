//! The system's sockets behind [`Sockets`], for native tests.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::wire::Address;
use super::{Ends, LOOK_MS, Sockets};
use crate::fail::{Code, Failure};

#[derive(Debug)]
pub(crate) struct StdSockets;

/// The system's sockets, of which something fails.
#[derive(Debug, Default)]
pub(crate) struct Failing {
    /// A send gets half of its bytes out and then no further.
    pub cut: std::cell::Cell<bool>,
    /// No connection can be made, which is known at once; how often one was tried.
    pub dialled: std::cell::Cell<u32>,
    /// The deadline of the operation has passed, as it does for the host's: what has come can be received, and nothing is
    /// waited for.
    pub overdue: Arc<AtomicBool>,
    /// How many receives have begun.
    pub receives: Arc<AtomicUsize>,
}

impl Ends for Failing {
    type Listener = TcpListener;
    type Conn = StdConn;
}

impl Sockets for Failing {
    fn listen(&self, at: &Address, ms: u32) -> Result<TcpListener, Failure> {
        StdSockets.listen(at, ms)
    }
    fn local(&self, l: &TcpListener) -> Result<Address, Failure> {
        StdSockets.local(l)
    }
    fn accept(&self, l: &TcpListener, ms: u32) -> Result<StdConn, Failure> {
        StdSockets.accept(l, ms)
    }
    fn connect(&self, _: &Address, _: u32) -> Result<StdConn, Failure> {
        self.dialled.set(self.dialled.get() + 1);
        Err(Failure::new(Code::Other(4), "no sockets left"))
    }
    fn send(&self, c: &StdConn, data: &[u8], ms: u32) -> Result<(), Failure> {
        let most = if self.cut.get() { data.len() / 2 } else { data.len() };
        StdSockets.send(c, &data[..most], ms)?;
        if most < data.len() { Err(Failure::new(Code::Timeout, "the buffers are full")) } else { Ok(()) }
    }
    fn recv(&self, c: &StdConn, bytes: usize, ms: u32) -> Result<Vec<u8>, Failure> {
        self.receives.fetch_add(1, Ordering::AcqRel);
        let until = self.now_ms() + u64::from(ms);
        loop {
            let overdue = self.overdue.load(Ordering::Acquire);
            match StdSockets.recv(c, bytes, ms.min(LOOK_MS)) {
                Err(e) if e.code == Code::Timeout && overdue => return Err(Failure::new(Code::Overdue, "")),
                Err(e) if e.code == Code::Timeout && self.now_ms() < until => {}
                answer => return answer,
            }
        }
    }
    fn now_ms(&self) -> u64 {
        StdSockets.now_ms()
    }
}

/// A connection, and what came before its reader had all it wanted.
#[derive(Debug)]
pub(crate) struct StdConn(pub TcpStream, std::cell::RefCell<Vec<u8>>);

pub(crate) fn loopback() -> Address {
    let mut b = [0; 28];
    b[0] = 2;
    b[4..8].copy_from_slice(&[127, 0, 0, 1]);
    Address(b)
}

fn system(a: &Address) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(a.0[4], a.0[5], a.0[6], a.0[7]), a.port()))
}

fn fail(e: &std::io::Error) -> Failure {
    let late = matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    Failure::new(if late { Code::Timeout } else { Code::Closed }, e.to_string())
}

impl Ends for StdSockets {
    type Listener = TcpListener;
    type Conn = StdConn;
}

impl Sockets for StdSockets {
    fn listen(&self, at: &Address, _: u32) -> Result<TcpListener, Failure> {
        let l = TcpListener::bind(system(at)).map_err(|e| fail(&e))?;
        l.set_nonblocking(true).map_err(|e| fail(&e))?;
        Ok(l)
    }

    fn local(&self, l: &TcpListener) -> Result<Address, Failure> {
        Ok(loopback().with_port(l.local_addr().map_err(|e| fail(&e))?.port()))
    }

    fn accept(&self, l: &TcpListener, ms: u32) -> Result<StdConn, Failure> {
        let until = Instant::now() + Duration::from_millis(u64::from(ms));
        loop {
            match l.accept() {
                Ok((s, _)) => {
                    s.set_nonblocking(false).map_err(|e| fail(&e))?;
                    return Ok(StdConn(s, Default::default()));
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(e) => return Err(fail(&e)),
            }
        }
    }

    fn connect(&self, to: &Address, ms: u32) -> Result<StdConn, Failure> {
        let until = Instant::now() + Duration::from_millis(u64::from(ms));
        loop {
            match TcpStream::connect(system(to)) {
                Ok(s) => return Ok(StdConn(s, Default::default())),
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Err(e) => return Err(Failure::new(Code::Timeout, e.to_string())),
            }
        }
    }

    fn send(&self, c: &StdConn, data: &[u8], ms: u32) -> Result<(), Failure> {
        let mut c = &c.0;
        c.set_write_timeout(Some(Duration::from_millis(u64::from(ms)))).map_err(|e| fail(&e))?;
        c.write_all(data).map_err(|e| fail(&e))
    }

    fn recv(&self, c: &StdConn, bytes: usize, ms: u32) -> Result<Vec<u8>, Failure> {
        let (mut stream, mut got) = (&c.0, c.1.borrow_mut());
        // std takes no time-out of zero for "do not wait".
        stream.set_read_timeout(Some(Duration::from_millis(u64::from(ms.max(1))))).map_err(|e| fail(&e))?;
        while got.len() < bytes {
            let mut b = vec![0; bytes - got.len()];
            match stream.read(&mut b).map_err(|e| fail(&e))? {
                0 => return Err(Failure::new(Code::Closed, "closed")),
                n => got.extend_from_slice(&b[..n]),
            }
        }
        Ok(std::mem::take(&mut *got))
    }

    fn now_ms(&self) -> u64 {
        use std::sync::OnceLock;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_millis() as u64
    }
}
