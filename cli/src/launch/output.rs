//! The output of ranks, each line with its rank before it, while several write at once.
//!
//! Whole lines are printed at once, and never in pieces. A line without an end (a prompt, a progress line) is shown when it
//! has waited for a moment; what the same rank adds to it follows without a new tag, and if another rank comes between, the
//! line is ended first. A carriage return goes back before the tag, so what follows it is tagged again.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes after which an unfinished line is printed as it is.
const MAX_LINE: usize = 64 * 1024;
/// How long an unfinished line waits for its end.
const MOMENT: Duration = Duration::from_millis(100);
/// How long pipes that are still open when nothing of the job is left may be silent: something outside the job holds them.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// Which stream of which rank.
type Source = (usize, bool);

/// Where the cursor stands, as far as this program moved it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Cursor {
    /// On an empty line.
    #[default]
    Start,
    /// Behind what this source wrote.
    Behind(Source),
    /// Before it, by a carriage return.
    Returned(Source),
}

/// One place where lines appear: a terminal, a file.
#[derive(Debug, Default)]
pub struct Screen(Cursor);

impl Screen {
    /// `text` as it is to be written now.
    fn put(&mut self, from: Source, text: &[u8], out: &mut Vec<u8>) {
        for piece in text.split_inclusive(|b| matches!(b, b'\n' | b'\r')) {
            let tag = match self.0 {
                Cursor::Start => true,
                Cursor::Behind(who) if who == from => false,
                // A line may end in both.
                Cursor::Returned(who) if who == from => piece != b"\n",
                _ => {
                    out.push(b'\n');
                    true
                }
            };
            if tag {
                out.extend_from_slice(format!("[{}] ", from.0).as_bytes());
            }
            out.extend_from_slice(piece);
            self.0 = match piece.last() {
                Some(b'\n') => Cursor::Start,
                Some(b'\r') => Cursor::Returned(from),
                _ => Cursor::Behind(from),
            };
        }
    }

    /// The source writes no more.
    fn end(&mut self, from: Source, out: &mut Vec<u8>) {
        if matches!(self.0, Cursor::Behind(who) | Cursor::Returned(who) if who == from) {
            out.push(b'\n');
            self.0 = Cursor::Start;
        }
    }
}

/// One pipe, and what came of a line whose end has not.
struct Pipe {
    from: Source,
    pipe: PipeReader,
    line: Vec<u8>,
    since: Option<Instant>,
}

impl Pipe {
    /// Takes what has come; what is to be shown now. `None` at the end.
    fn take(&mut self, space: &mut [u8]) -> Option<Vec<u8>> {
        let n = match self.pipe.read(space) {
            Ok(0) => return None,
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => return Some(Vec::new()),
            Err(_) => return None,
        };
        self.line.extend_from_slice(&space[..n]);
        let ended = self.line.iter().rposition(|b| matches!(b, b'\n' | b'\r')).map_or(0, |i| i + 1);
        let whole = if self.line.len() - ended >= MAX_LINE { self.line.len() } else { ended };
        let shown: Vec<u8> = self.line.drain(..whole).collect();
        // The moment is that of the oldest byte that waits.
        let since = self.since.filter(|_| shown.is_empty()).unwrap_or_else(Instant::now);
        self.since = (!self.line.is_empty()).then_some(since);
        Some(shown)
    }

    fn rest(&mut self) -> Vec<u8> {
        self.since = None;
        std::mem::take(&mut self.line)
    }
}

/// Threads that print what ranks write to one stream each.
#[derive(Debug)]
pub struct Printing {
    /// Its end says that nothing of the job is left.
    over: Vec<PipeWriter>,
    /// Its end is the end of the threads.
    threads: PipeReader,
    /// For each of the two: by which it learns that the job is over, and says that it has ended.
    streams: Vec<(PipeReader, PipeWriter)>,
}

impl Printing {
    /// What is needed to print; the descriptors for it are taken here, so that they are there however many ranks are started.
    ///
    /// # Errors
    /// No pipe.
    pub fn prepare() -> anyhow::Result<Printing> {
        let pipe = || std::io::pipe().context("making a pipe");
        let (threads, alive) = pipe()?;
        let [(a, over_a), (b, over_b)] = [pipe()?, pipe()?];
        let other = alive.try_clone().context("making a pipe")?;
        Ok(Printing { over: vec![over_a, over_b], threads, streams: vec![(a, alive), (b, other)] })
    }

    /// Prints what comes from the pipes, by rank: stdout's to stdout, stderr's to stderr.
    ///
    /// # Errors
    /// No thread.
    pub fn start(&mut self, stdout: Vec<PipeReader>, stderr: Vec<PipeReader>) -> anyhow::Result<()> {
        let one = same(std::io::stdout(), std::io::stderr());
        let screen = Arc::new(Mutex::new(Screen::default()));
        let other = if one { screen.clone() } else { Arc::default() };
        self.stream(true, stderr, std::io::stderr(), other)?;
        self.stream(false, stdout, std::io::stdout(), screen)
    }

    fn stream(
        &mut self,
        is_err: bool,
        pipes: Vec<PipeReader>,
        to: impl Write + Send + 'static,
        screen: Arc<Mutex<Screen>>,
    ) -> anyhow::Result<()> {
        let (over, alive) = self.streams.pop().context("the output is printed already")?;
        let pipes = pipes.into_iter().enumerate();
        let pipes = pipes.map(|(r, pipe)| Pipe { from: (r, is_err), pipe, line: Vec::new(), since: None }).collect();
        std::thread::Builder::new()
            .name("wccl-output".into())
            .spawn(move || {
                copy(pipes, to, &screen, &over);
                drop(alive);
            })
            .context("starting the thread that prints the output of the ranks")?;
        Ok(())
    }

    /// Nothing of the job is left: what comes now is the last.
    pub fn job_is_over(&mut self) {
        self.over.clear();
        // Of threads that were not started.
        self.streams.clear();
    }

    /// What becomes readable when all is printed.
    pub fn ended(&self) -> &impl AsFd {
        &self.threads
    }
}

/// Whether two descriptors are one file.
fn same(a: impl AsFd, b: impl AsFd) -> bool {
    match (rustix::fs::fstat(a), rustix::fs::fstat(b)) {
        (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
        _ => false,
    }
}

/// Copies until all pipes have ended. They are drained even if nobody reads what is printed, so that a rank is never blocked by
/// that.
fn copy(mut pipes: Vec<Pipe>, mut to: impl Write, screen: &Mutex<Screen>, over: &PipeReader) {
    let mut space = vec![0; MAX_LINE];
    let mut is_over = false;
    let mut print = |from, text: &[u8], end: bool| {
        let mut screen = screen.lock().unwrap_or_else(|p| p.into_inner());
        let mut out = Vec::with_capacity(text.len() + 16);
        screen.put(from, text, &mut out);
        if end {
            screen.end(from, &mut out);
        }
        if !out.is_empty() {
            let _ = to.write_all(&out).and_then(|()| to.flush());
        }
    };
    while !pipes.is_empty() {
        let now = Instant::now();
        let moment = pipes.iter().filter_map(|p| p.since).map(|s| (s + MOMENT).saturating_duration_since(now)).min();
        let wait = moment.or(is_over.then_some(LAST_OUTPUT));
        let wait = wait.map(|w| Timespec { tv_sec: w.as_secs() as i64, tv_nsec: i64::from(w.subsec_nanos()) });
        let mut fds: Vec<PollFd<'_>> = pipes.iter().map(|p| PollFd::new(&p.pipe, PollFlags::IN)).collect();
        if !is_over {
            fds.push(PollFd::new(over, PollFlags::IN));
        }
        let silent = match poll(&mut fds, wait.as_ref()) {
            Ok(n) => n == 0,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        };
        let ready: Vec<bool> = fds.iter().map(|f| !f.revents().is_empty()).collect();
        if silent && is_over && moment.is_none() {
            return;
        }
        is_over |= ready.get(pipes.len()) == Some(&true);
        let mut ready = ready.into_iter();
        pipes.retain_mut(|p| {
            let mut goes_on = true;
            if ready.next() == Some(true) {
                match p.take(&mut space) {
                    Some(text) => print(p.from, &text, false),
                    None => {
                        let rest = p.rest();
                        print(p.from, &rest, true);
                        goes_on = false;
                    }
                }
            }
            if p.since.is_some_and(|s| s.elapsed() >= MOMENT) {
                let rest = p.rest();
                print(p.from, &rest, false);
            }
            goes_on
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(parts: &[(usize, &str)]) -> String {
        let (mut screen, mut out) = (Screen::default(), Vec::new());
        parts.iter().for_each(|(rank, text)| screen.put((*rank, false), text.as_bytes(), &mut out));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn every_line_has_its_rank_before_it() {
        assert_eq!(shown(&[(0, "a\nb\n"), (1, "c\n"), (0, "\n")]), "[0] a\n[0] b\n[1] c\n[0] \n");
    }

    #[test]
    fn a_line_that_goes_on_is_tagged_once_unless_another_rank_comes_between() {
        assert_eq!(shown(&[(0, "name? "), (0, "ok\n")]), "[0] name? ok\n");
        assert_eq!(shown(&[(0, "name? "), (1, "x\n"), (0, "ok\n")]), "[0] name? \n[1] x\n[0] ok\n");
    }

    #[test]
    fn what_follows_a_carriage_return_is_tagged_again() {
        assert_eq!(shown(&[(0, "1%\r2%\r"), (0, "3%\n")]), "[0] 1%\r[0] 2%\r[0] 3%\n");
        assert_eq!(shown(&[(0, "1%\r"), (1, "x\n")]), "[0] 1%\r\n[1] x\n");
        // The end of a line on other systems, also in two parts.
        assert_eq!(shown(&[(0, "a\r\nb\r"), (0, "\nc\n")]), "[0] a\r\n[0] b\r\n[0] c\n");
    }

    #[test]
    fn both_streams_of_a_rank_on_one_screen_are_two_sources() {
        let (mut screen, mut out) = (Screen::default(), Vec::new());
        screen.put((0, false), b"name? ", &mut out);
        screen.put((0, true), b"warning\n", &mut out);
        screen.put((0, false), b"rest", &mut out);
        screen.end((0, false), &mut out);
        screen.end((0, true), &mut out);
        assert_eq!(String::from_utf8(out).unwrap(), "[0] name? \n[0] warning\n[0] rest\n");
    }

    /// Through pipes: whole lines in whatever parts they come, and the last one without an end.
    #[test]
    fn a_line_in_parts_is_one_line_and_the_last_one_is_ended() {
        let (pipe, mut writer) = std::io::pipe().unwrap();
        let (over, _open) = std::io::pipe().unwrap();
        let (mut shown, to) = std::io::pipe().unwrap();
        let pipes = vec![Pipe { from: (3, false), pipe, line: Vec::new(), since: None }];
        let copies = std::thread::spawn(move || copy(pipes, to, &Mutex::default(), &over));
        writer.write_all(b"half ").unwrap();
        writer.write_all(b"and half\nprompt? ").unwrap();
        // Shown though the line has no end.
        let mut got = vec![0; "[3] half and half\n[3] prompt? ".len()];
        shown.read_exact(&mut got).unwrap();
        assert_eq!(String::from_utf8(got).unwrap(), "[3] half and half\n[3] prompt? ");
        writer.write_all(b"yes").unwrap();
        drop(writer);
        let mut rest = String::new();
        shown.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "yes\n");
        copies.join().unwrap();
    }

    /// A pipe that something outside the job holds does not keep the launcher.
    #[test]
    fn a_pipe_that_stays_open_is_left_when_the_job_is_over() {
        let (pipe, mut held) = std::io::pipe().unwrap();
        let (over, job) = std::io::pipe().unwrap();
        let (mut shown, to) = std::io::pipe().unwrap();
        held.write_all(b"last words\n").unwrap();
        drop(job);
        copy(vec![Pipe { from: (0, false), pipe, line: Vec::new(), since: None }], to, &Mutex::default(), &over);
        let mut got = String::new();
        shown.read_to_string(&mut got).unwrap();
        assert_eq!(got, "[0] last words\n");
    }
}
