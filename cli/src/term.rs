//! Terminal output: colours only on a terminal, and a progress line on stderr once something takes long.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long something runs before a progress line appears.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the line changes.
const REFRESH: Duration = Duration::from_millis(500);

/// Whether the user has not turned colours off (no-color.org).
pub fn colours_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Colours of stdout.
#[derive(Debug, Clone, Copy)]
pub struct Paint(bool);

impl Paint {
    /// For stdout as it is.
    pub fn stdout() -> Paint {
        Paint(std::io::stdout().is_terminal() && colours_wanted())
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }

    /// A heading.
    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    /// What is as it should be.
    pub fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    /// What is not.
    pub fn bad(self, text: &str) -> String {
        self.with("1;31", text)
    }

    /// What matters less.
    pub fn dim(self, text: &str) -> String {
        self.with("2", text)
    }
}

#[derive(Debug)]
struct Line {
    phase: String,
    since: Instant,
    shown: bool,
}

/// One line on stderr that says what is going on, shown only on a terminal and only after two seconds of one phase.
#[derive(Debug)]
pub struct ProgressLine {
    line: Arc<Mutex<Line>>,
    stop: Option<(Sender<()>, JoinHandle<()>)>,
}

fn lock(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    line.lock().unwrap_or_else(|p| p.into_inner())
}

fn clear(line: &mut Line) {
    if std::mem::take(&mut line.shown) {
        eprint!("\r\x1b[K");
    }
}

impl ProgressLine {
    /// Starts watching; `active` false makes it silent.
    pub fn start(active: bool, phase: &str) -> ProgressLine {
        let line = Arc::new(Mutex::new(Line { phase: phase.to_string(), since: Instant::now(), shown: false }));
        if !active || !std::io::stderr().is_terminal() {
            return ProgressLine { line, stop: None };
        }
        let (stop, stopped) = channel();
        let shared = line.clone();
        let thread = std::thread::Builder::new().name("wccl-progress".into()).spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(REFRESH) {
                let mut l = lock(&shared);
                let elapsed = l.since.elapsed();
                if elapsed >= PATIENCE {
                    eprint!("\r\x1b[K{} ({} s)", l.phase, elapsed.as_secs());
                    l.shown = true;
                }
            }
        });
        // Without the thread there is no progress line, which is no reason not to work.
        ProgressLine { line, stop: thread.ok().map(|t| (stop, t)) }
    }

    /// The next phase begins.
    pub fn phase(&self, phase: &str) {
        if self.stop.is_some() {
            let mut l = lock(&self.line);
            clear(&mut l);
            l.phase = phase.to_string();
            l.since = Instant::now();
        }
    }

    /// Prints to stdout, past the progress line.
    ///
    /// # Errors
    /// Those of stdout.
    pub fn print(&self, text: &str) -> std::io::Result<()> {
        let mut l = lock(&self.line);
        clear(&mut l);
        let mut out = std::io::stdout().lock();
        writeln!(out, "{text}")?;
        out.flush()
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.stop.take() {
            drop(stop);
            // The thread only prints; if it panicked there is nothing to do about it.
            let _ = thread.join();
            clear(&mut lock(&self.line));
        }
    }
}

/// The modelled instance type as users know it: `trn2.48xlarge`.
pub fn instance_type(device: &hw_bridge::model::DeviceModel) -> String {
    let name = format!("{}.{}", device.family().name(), device.size().name()).to_ascii_lowercase();
    if name.ends_with("xl") { name + "arge" } else { name }
}

/// Prints to stdout.
///
/// # Errors
/// Those of stdout.
pub fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}
