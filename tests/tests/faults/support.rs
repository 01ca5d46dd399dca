//! Ranks as processes, what they print, and how they end.

use std::collections::VecDeque;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

pub use crate::common::HANG;

/// Deadlines of ranks, milliseconds, unless a test gives others: later than [`HANG`], so that what ends in time has not waited for
/// one.
const NEVER_MS: &str = "600000";

/// Lets tests with many processes run one after the other: the machine may have two cores.
pub static MANY: Mutex<()> = Mutex::new(());

pub fn alone() -> std::sync::MutexGuard<'static, ()> {
    MANY.lock().unwrap_or_else(|p| p.into_inner())
}

/// Where a group may meet.
pub fn free_root() -> String {
    format!("127.0.0.1:{}", crate::common::free_port())
}

#[derive(Default)]
struct Heard {
    lines: VecDeque<String>,
    part: String,
    open: usize,
}

/// One rank: its process, what it printed on stdout and stderr, as lines.
pub struct Rank {
    pub rank: usize,
    pub child: Child,
    heard: Arc<(Mutex<Heard>, Condvar)>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listen(mut from: impl Read + Send + 'static, heard: Arc<(Mutex<Heard>, Condvar)>) {
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        let mut part = String::new();
        loop {
            let n = from.read(&mut bytes).unwrap_or(0);
            part += &String::from_utf8_lossy(&bytes[..n]);
            let mut h = heard.0.lock().unwrap();
            while let Some(end) = part.find('\n') {
                h.lines.push_back(part[..end].to_string());
                part.drain(..=end);
            }
            if n == 0 {
                h.part += &part;
                h.open -= 1;
            }
            heard.1.notify_all();
            if n == 0 {
                return;
            }
        }
    });
}

impl Rank {
    /// Starts `command` as a rank of the group at `root`.
    pub fn start(mut command: Command, rank: usize, n: usize, root: &str, vars: &[(&str, &str)]) -> Rank {
        let mut child = command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", n.to_string())
            .env("NEURON_RT_ROOT_COMM_ID", root)
            .env("NEURON_CCOM_SOCK_TIMEOUT", NEVER_MS)
            .env("WCCL_TIMEOUT_MS", NEVER_MS)
            .env("CCOM_SOCKET_IFNAME", "lo")
            .env("WCCL_HBM_BYTES", (64u64 << 20).to_string())
            .envs(vars.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let heard = Arc::new((Mutex::new(Heard { open: 2, ..Heard::default() }), Condvar::new()));
        listen(child.stdout.take().unwrap(), heard.clone());
        listen(child.stderr.take().unwrap(), heard.clone());
        Rank { rank, child, heard }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that begins with `start`, and answers it. Lines before it are dropped.
    pub fn line(&self, start: &str) -> String {
        let until = Instant::now() + HANG;
        let (lock, wake) = &*self.heard;
        let mut h = lock.lock().unwrap();
        let mut others = Vec::new();
        loop {
            while let Some(l) = h.lines.pop_front() {
                if l.starts_with(start) {
                    return l;
                }
                others.push(l);
            }
            assert!(h.open > 0, "rank {} ended without `{start}`; it said {others:#?}", self.rank);
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "rank {} hangs: no `{start}` for {HANG:?}; it said {others:#?}", self.rank);
            h = wake.wait_timeout(h, left).unwrap().0;
        }
    }

    /// Waits for the end and answers all that was printed and not yet taken.
    pub fn end(&mut self) -> (ExitStatus, Vec<String>) {
        let until = Instant::now() + HANG;
        let (lock, wake) = &*self.heard;
        let mut h = lock.lock().unwrap();
        while h.open > 0 {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "rank {} hangs: no end for {HANG:?}; it said {:#?}", self.rank, h.lines);
            h = wake.wait_timeout(h, left).unwrap().0;
        }
        let rest = h.lines.drain(..).collect();
        drop(h);
        (self.child.wait().unwrap(), rest)
    }

    /// Waits for its failure: the line `error ...`.
    pub fn error(&mut self) -> String {
        let (status, lines) = self.end();
        let found = lines.iter().find(|l| l.starts_with("error "));
        let e = found.unwrap_or_else(|| panic!("rank {} ended with {status} and no error: {lines:#?}", self.rank));
        assert!(!status.success());
        e.clone()
    }

    /// Waits for its good end.
    pub fn good(&mut self) -> Vec<String> {
        let (status, lines) = self.end();
        assert!(status.success(), "rank {} ended with {status}: {lines:#?}", self.rank);
        lines
    }

    /// Sends a signal by the shell's own command, which needs no C library here.
    pub fn signal(&self, name: &str) {
        let done = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.pid())]).status().unwrap();
        assert!(done.success(), "kill -{name} of rank {}", self.rank);
    }
}

/// The program of a rank.
pub fn fault(script: &str) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_fault"));
    c.arg(script);
    c
}

/// The program of a rank under a shell that runs `before` first: `ulimit`, say.
pub fn fault_after(before: &str, script: &str) -> Command {
    let mut c = Command::new("sh");
    let body = format!("{before} && exec \"$0\" \"$1\"");
    c.args(["-c", &body, env!("CARGO_BIN_EXE_fault"), script]);
    c
}

/// Starts `n` ranks; `script` gives each rank's.
pub fn start<S: AsRef<str>>(n: usize, vars: &[(&str, &str)], script: impl Fn(usize) -> S) -> Vec<Rank> {
    let root = free_root();
    (0..n).map(|r| Rank::start(fault(script(r).as_ref()), r, n, &root, vars)).collect()
}

/// Waits until all have joined.
pub fn ready(ranks: &[Rank]) {
    ranks.iter().for_each(|r| drop(r.line("ready")));
}

/// Asserts that `text` has all the words.
pub fn has(text: &str, words: &[&str]) {
    for w in words {
        assert!(text.contains(w), "`{w}` is not in: {text}");
    }
}

/// Prints how long something took that is promised within a second. That it did not wait for a deadline is asserted by there being
/// none before [`HANG`]; how busy the machine was is not the product's doing.
pub fn soon(what: &str, begun: Instant) {
    println!("{what}: {} ms", begun.elapsed().as_millis());
}
