//! What tenants have used, as Prometheus reads it (text exposition format 0.0.4), and the little HTTP that hands it out.
//!
//! `GET /metrics`, or `HEAD`, and nothing else; one request a connection, each within a deadline. One thread serves some at a
//! time; who says nothing takes a place, and makes room for whoever comes after the last one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::api::Runtime;
use crate::error::Error;
use crate::plane::eras::look;
pub use crate::plane::eras::{FAMILIES, Values};
use hw_bridge::os::lock::lock;
use sandbox::imports::own::Own;
use sandbox::limits::{HTTP_WAIT, MAX_HTTP_HEAD, MAX_HTTP_VISITORS};
use sandbox::tenant::supervisor::Standing;

/// What one tenant has used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// Its name.
    pub tenant: String,
    /// File of its library; empty if none loaded.
    pub plugin: String,
    /// The library's version.
    pub version: String,
    /// The values of [`FAMILIES`], in that order, of all plugins that have served it.
    pub values: Values,
    /// Of these, what was counted while each of them served: file, version, values.
    pub eras: Vec<(String, String, Values)>,
    /// Refusals by the policy's key.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Swaps: committed, refused, rolled back of those committed.
    pub swaps: [u64; 3],
    /// Its plugins that ever stopped.
    pub stopped: Vec<Standing>,
}

impl Usage {
    /// Of a runtime now. Operations of a service's clients are as their memory says.
    pub fn of(runtime: &Runtime) -> Usage {
        let tenant = runtime.tenant();
        let mut eras = lock(&runtime.host().eras);
        let ((plugin, version), values) = look(runtime.host(), &mut eras);
        let (counters, eras) = (&tenant.counters, eras.all());
        Usage {
            tenant: tenant.name.clone(),
            plugin,
            version,
            values,
            eras,
            refusals: counters.refusals(),
            swaps: {
                let s = runtime.swaps();
                // One that goes back commits again.
                [s.committed.saturating_sub(s.rolled_back), s.refused, s.rolled_back]
            },
            stopped: tenant.supervisor.standing(),
        }
    }
}

/// Labels as they stand behind a name: `tenant="red",plugin="nccom.wasm"`.
fn labels(all: &[(&str, &str)]) -> String {
    let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    all.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect::<Vec<_>>().join(",")
}

/// One family: name, type and meaning, then a line for each of its labels and values.
fn family(out: &mut String, head: (&str, &str, &str), lines: impl Iterator<Item = (String, u64)>) {
    let (name, kind, meaning) = head;
    // Writing to a string cannot fail.
    let _ = writeln!(out, "# HELP {name} {meaning}.\n# TYPE {name} {kind}");
    for (labels, value) in lines {
        let _ = writeln!(out, "{name}{{{labels}}} {value}");
    }
}

/// The text of one answer.
pub fn text(all: &[Usage]) -> String {
    let mut out = String::new();
    for (i, head) in FAMILIES.into_iter().enumerate() {
        let line = |u: &Usage, plugin: &str, version: &str, values: &Values| {
            (labels(&[("tenant", &u.tenant), ("plugin", plugin), ("version", version)]), values[i])
        };
        let counter = head.1 == "counter";
        let lines = all.iter().flat_map(|u| match counter {
            true => u.eras.iter().map(|(plugin, version, values)| line(u, plugin, version, values)).collect(),
            false => vec![line(u, &u.plugin, &u.version, &u.values)],
        });
        family(&mut out, head, lines);
    }
    let refusals = all.iter().flat_map(|u| {
        u.refusals.iter().map(|(limit, value)| (labels(&[("tenant", &u.tenant), ("limit", limit)]), *value))
    });
    family(
        &mut out,
        ("wccl_refusals_total", "counter", "Requests of plugins that a limit refused, by the policy's key"),
        refusals,
    );
    let swaps = all.iter().flat_map(|u| {
        let outcomes = ["committed", "refused", "rolled-back"].into_iter().zip(u.swaps);
        outcomes.map(|(outcome, value)| (labels(&[("tenant", &u.tenant), ("outcome", outcome)]), value))
    });
    family(
        &mut out,
        ("wccl_swaps_total", "counter", "Hot swaps, by outcome; those rolled back were committed before"),
        swaps,
    );
    let stopped = |value: fn(&Standing) -> u64| {
        all.iter().flat_map(move |u| {
            u.stopped.iter().map(move |p| {
                let of = [("tenant", &*u.tenant), ("plugin", &*p.name), ("digest", &*p.digest)];
                (labels(&of), value(p))
            })
        })
    };
    family(
        &mut out,
        ("wccl_plugin_restarts_total", "counter", "Instances made in the place of one that had stopped"),
        stopped(|p| p.restarts),
    );
    family(
        &mut out,
        ("wccl_plugin_quarantined", "gauge", "Whether no further instance of the plugin is made"),
        stopped(|p| u64::from(p.quarantined)),
    );
    out
}

/// The answer to what was read of a request so far; `None` wants more.
fn answer(head: &[u8], body: impl FnOnce() -> String) -> Option<String> {
    // What a HEAD is answered is what its GET would be, without the text.
    let say = |status: &str, more: &str, text: &str, with_text: bool| {
        let kind = "text/plain; version=0.0.4; charset=utf-8";
        let len = text.len();
        let text = if with_text { text } else { "" };
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\n{more}Connection: close\r\n\r\n{text}"
        )
    };
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    Some(match request.parse(head) {
        Ok(httparse::Status::Partial) if head.len() < MAX_HTTP_HEAD => return None,
        Ok(httparse::Status::Partial) => {
            say("431 Request Header Fields Too Large", "", "the request is too long\n", true)
        }
        Err(e) => say("400 Bad Request", "", &format!("this is no HTTP request: {e}\n"), true),
        Ok(_) => match (request.method, request.path.map(|p| p.split('?').next().unwrap_or(p))) {
            (Some(how @ ("GET" | "HEAD")), Some("/metrics")) => say("200 OK", "", &body(), how == "GET"),
            (Some(how @ ("GET" | "HEAD")), _) => {
                say("404 Not Found", "", "there is /metrics and nothing else\n", how == "GET")
            }
            _ => say("405 Method Not Allowed", "Allow: GET, HEAD\r\n", "only GET and HEAD are answered\n", true),
        },
    })
}

/// A connection of either kind, not blocking.
trait Connection: Read + Write + AsFd {}
impl<C: Read + Write + AsFd> Connection for C {}

/// Somebody who asks.
struct Visitor {
    connection: Box<dyn Connection>,
    until: Instant,
    /// What was read of the request.
    head: Vec<u8>,
    /// The answer, once there is one, and how much of it went.
    answer: Option<String>,
    sent: usize,
}

impl Visitor {
    /// Goes on as far as the connection lets it; whether all is said.
    fn go_on(&mut self, body: impl Fn() -> String) -> std::io::Result<bool> {
        loop {
            let gone = match &self.answer {
                None => {
                    let mut some = [0; 1024];
                    self.connection.read(&mut some).map(|n| {
                        self.head.extend_from_slice(&some[..n]);
                        self.answer = answer(&self.head, &body);
                        n == 0
                    })
                }
                Some(text) => self.connection.write(&text.as_bytes()[self.sent..]).map(|n| {
                    self.sent += n;
                    n == 0 || self.sent == text.len()
                }),
            };
            match gone {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// The same, with what went wrong in the log; whether it stays.
    fn stays(&mut self, body: impl Fn() -> String) -> bool {
        match self.go_on(body) {
            Ok(done) => !done && Instant::now() < self.until,
            Err(e) => {
                tracing::debug!("metrics were not handed out: {e}");
                false
            }
        }
    }

    fn waits_for(&self) -> PollFlags {
        if self.answer.is_some() { PollFlags::OUT } else { PollFlags::IN }
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn accept(&self) -> std::io::Result<Visitor> {
        let connection: Box<dyn Connection> = match self {
            Listener::Tcp(l) => {
                let (stream, _) = l.accept()?;
                stream.set_nonblocking(true)?;
                Box::new(stream)
            }
            Listener::Unix(l) => {
                let (stream, _) = l.accept()?;
                stream.set_nonblocking(true)?;
                Box::new(stream)
            }
        };
        Ok(Visitor { connection, until: Instant::now() + HTTP_WAIT, head: Vec::new(), answer: None, sent: 0 })
    }
}

/// Answers visitors until `ended` is readable.
fn serve(listener: &Listener, ended: &OwnedFd, body: impl Fn() -> String) {
    let fd = match listener {
        Listener::Tcp(l) => l.as_fd(),
        Listener::Unix(l) => l.as_fd(),
    };
    // The oldest first.
    let mut visitors: Vec<Visitor> = Vec::new();
    loop {
        let left = visitors.first().map(|v| {
            let left = v.until.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let ours = [PollFd::from_borrowed_fd(fd, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        let theirs = visitors.iter().map(|v| PollFd::from_borrowed_fd(v.connection.as_fd(), v.waits_for()));
        let mut fds: Vec<_> = ours.into_iter().chain(theirs).collect();
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return tracing::error!("no more metrics are handed out: {e}"),
        }
        let (comes, ends) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if ends {
            return;
        }
        visitors.retain_mut(|v| v.stays(&body));
        if !comes {
            continue;
        }
        match listener.accept() {
            Ok(mut visitor) => {
                if visitor.stays(&body) {
                    if visitors.len() == MAX_HTTP_VISITORS {
                        visitors.remove(0);
                    }
                    visitors.push(visitor);
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => {
                tracing::debug!("a visitor of the metrics was not let in: {e}");
                // Out of descriptors, say: not at full speed.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Hands metrics out until it is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    stop: OwnedFd,
    thread: Option<std::thread::JoinHandle<()>>,
    address: Option<SocketAddr>,
    /// No plugin may connect to it.
    _own: Option<Own>,
}

impl MetricsServer {
    /// Answers on a TCP address, whoever asks: keep it on the loopback interface or behind a firewall.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn tcp(address: SocketAddr, usage: impl Fn() -> Vec<Usage> + Send + 'static) -> Result<MetricsServer, Error> {
        let io = |source| Error::System { what: format!("opening {address} for metrics"), source };
        let listener = TcpListener::bind(address).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let bound = listener.local_addr().map_err(io)?;
        MetricsServer::start(Listener::Tcp(listener), Some(bound), usage).map_err(io)
    }

    /// Answers on a unix socket at `path`, which must not exist yet; only this user can connect.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn unix(path: &Path, usage: impl Fn() -> Vec<Usage> + Send + 'static) -> Result<MetricsServer, Error> {
        use std::os::unix::fs::PermissionsExt;
        let io = |source| Error::System { what: format!("opening {} for metrics", path.display()), source };
        let listener = UnixListener::bind(path).map_err(io)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        MetricsServer::start(Listener::Unix(listener), None, usage).map_err(io)
    }

    fn start(
        listener: Listener,
        address: Option<SocketAddr>,
        usage: impl Fn() -> Vec<Usage> + Send + 'static,
    ) -> std::io::Result<MetricsServer> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let ended = stop.try_clone()?;
        let serve = move || serve(&listener, &ended, || text(&usage()));
        let thread = std::thread::Builder::new().name("wccl-metrics".into()).spawn(serve)?;
        Ok(MetricsServer { stop, thread: Some(thread), address, _own: address.map(Own::new) })
    }

    /// Where it listens, if by TCP.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        // Our own event: the write cannot fail in a way that matters.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // One that panicked has reported by itself.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    fn usage(tenant: &str) -> Usage {
        Usage {
            tenant: tenant.into(),
            plugin: "a\"b\\c\nd".into(),
            version: "1.2.3.4".into(),
            values: [7; FAMILIES.len()],
            eras: vec![("a\"b\\c\nd".into(), "1.2.3.4".into(), [7; FAMILIES.len()])],
            refusals: [("network.reach", 3)].into(),
            swaps: [4, 5, 6],
            stopped: vec![Standing {
                digest: "d1".into(),
                name: "p.wasm".into(),
                restarts: 2,
                quarantined: true,
                last: String::new(),
            }],
        }
    }

    #[test]
    fn each_family_has_its_words_once_and_a_line_a_tenant() {
        let text = text(&[usage("red"), usage("blue")]);
        for (name, kind, _) in FAMILIES {
            assert_eq!(text.matches(&format!("# TYPE {name} {kind}\n")).count(), 1);
            let line = format!("{name}{{tenant=\"red\",plugin=\"a\\\"b\\\\c\\nd\",version=\"1.2.3.4\"}} 7\n");
            assert!(text.contains(&line), "{text}");
        }
        for line in [
            "wccl_refusals_total{tenant=\"red\",limit=\"network.reach\"} 3\n",
            "wccl_swaps_total{tenant=\"blue\",outcome=\"rolled-back\"} 6\n",
            "wccl_plugin_restarts_total{tenant=\"red\",plugin=\"p.wasm\",digest=\"d1\"} 2\n",
            "wccl_plugin_quarantined{tenant=\"red\",plugin=\"p.wasm\",digest=\"d1\"} 1\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn only_a_get_of_metrics_is_answered_with_them() {
        let ask = |head: &str| answer(head.as_bytes(), || "body".into());
        assert_eq!(ask("GET /metr"), None);
        let ok = ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        assert!(
            ok.starts_with("HTTP/1.1 200 OK\r\n") && ok.ends_with("Content-Length: 4\r\nConnection: close\r\n\r\nbody")
        );
        for (head, says) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("HEAD / HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("\0\0\0\r\n\r\n", "400"),
        ] {
            assert!(ask(head).unwrap().starts_with(&format!("HTTP/1.1 {says}")), "{head}");
        }
        // A HEAD has the headers of the GET, and nothing behind them.
        assert_eq!(ask("HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap(), ok.strip_suffix("body").unwrap());
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(MAX_HTTP_HEAD));
        assert!(ask(&long).unwrap().contains(" 431 "));
    }

    fn get(address: SocketAddr) -> String {
        let mut s = TcpStream::connect(address).unwrap();
        s.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        s.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut said = String::new();
        s.read_to_string(&mut said).unwrap();
        said
    }

    /// If each of those who say nothing had its deadline before the next one's turn came, this would take longer than a visitor
    /// waits.
    #[test]
    fn visitors_get_them_however_many_say_nothing_and_these_do_not_stay() {
        let server = MetricsServer::tcp("127.0.0.1:0".parse().unwrap(), || vec![usage("red")]).unwrap();
        let address = server.address().unwrap();
        let crowd = 3 * MAX_HTTP_VISITORS;
        assert!(HTTP_WAIT * crowd as u32 > Duration::from_secs(40));
        let mut mute: Vec<TcpStream> = (0..crowd)
            .map(|i| {
                let mut s = TcpStream::connect(address).unwrap();
                // Some begin.
                s.write_all(&b"GET /metr"[..9 * (i % 2)]).unwrap();
                s
            })
            .collect();
        for _ in 0..3 {
            let said = get(address);
            assert!(said.contains("wccl_operations_total{tenant=\"red\""), "{said}");
        }
        for s in &mut mute {
            s.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            // A reset if there was something of it left to read.
            let left = s.read(&mut [0]);
            assert!(matches!(&left, Ok(0)) || left.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset));
        }
    }

    /// One that does not read its answer holds up nobody.
    #[test]
    fn an_answer_that_is_not_read_waits_by_itself() {
        let many = || (0..300).map(|i| usage(&format!("tenant-{i}"))).collect();
        let server = MetricsServer::tcp("127.0.0.1:0".parse().unwrap(), many).unwrap();
        let address = server.address().unwrap();
        let mut deaf = TcpStream::connect(address).unwrap();
        deaf.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let said = get(address);
        let (head, text) = said.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}\r\n", text.len())), "{head}");
        drop(deaf);
    }
}
