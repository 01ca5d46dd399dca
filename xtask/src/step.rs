//! Runs one outside command without noise: its output goes to a log, a notice appears only if it takes long,
//! and the log's end is shown only if it fails.
//!
//! Invariants: no command outlives its limit; a log is kept exactly when its command failed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A command may run this long before the user is told what is going on.
const NOTICE_AFTER: Duration = Duration::from_secs(1);
/// How often a running command is looked at.
const POLL: Duration = Duration::from_millis(20);
/// A failed command's log is shown from this many lines before its end.
const TAIL_LINES: usize = 60;

/// How a quiet command failed.
#[derive(Debug)]
pub enum Failure {
    /// The program could not be started or watched.
    Unusable(io::Error),
    /// It ran and said no: its exit status and the end of what it printed.
    Refused(ExitStatus, String),
    /// It gave no answer within its limit and was ended.
    NoAnswer(Duration),
}

impl Failure {
    /// The reason as the end of a sentence that began with the command.
    pub fn reason(&self) -> String {
        match self {
            Self::Unusable(error) if error.kind() == io::ErrorKind::NotFound => "is not installed".to_string(),
            Self::Unusable(error) => format!("could not be run: {error}"),
            Self::Refused(status, tail) => {
                // Tools print their verdict last, but rustup and apt follow it with hints: the error line says more.
                let line = tail.lines().rev().find(|l| is_error_line(l)).or_else(|| tail.lines().next_back());
                format!("said no ({status}): {}", line.unwrap_or("it printed nothing").trim())
            }
            Self::NoAnswer(limit) => {
                format!("gave no answer within {} s and was ended", limit.as_secs())
            }
        }
    }
}

fn is_error_line(line: &str) -> bool {
    line.starts_with("error") || line.starts_with("E: ")
}

/// Runs `command` with no input and its output in `log`. Prints `notice` to standard error if that takes longer than a
/// second. A command that passes `limit` is ended. On success the log is removed.
///
/// # Errors
///
/// See [`Failure`]; the log is then still there.
pub fn run(command: &mut Command, notice: &str, log: &Path, limit: Duration) -> Result<(), Failure> {
    let file = open_log(log).map_err(Failure::Unusable)?;
    let errors = file.try_clone().map_err(Failure::Unusable)?;
    command.stdin(Stdio::null()).stdout(file).stderr(errors);
    let started = Instant::now();
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            remove(log);
            return Err(Failure::Unusable(error));
        }
    };
    let mut told = false;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(Failure::Unusable)? {
            break status;
        }
        let elapsed = started.elapsed();
        if elapsed >= limit {
            // It may have ended between the two looks; then there is nothing to end, which is just as well.
            let _ = child.kill();
            let _ = child.wait();
            return Err(Failure::NoAnswer(limit));
        }
        if !told && elapsed >= NOTICE_AFTER {
            told = true;
            note(notice);
        }
        thread::sleep(POLL);
    };
    if status.success() {
        remove(log);
        return Ok(());
    }
    let text = fs::read(log).map_err(Failure::Unusable)?;
    Err(Failure::Refused(status, tail(&String::from_utf8_lossy(&text), TAIL_LINES)))
}

/// A line for the person who waits. A closed standard error is no reason to stop the work.
pub fn note(line: &str) {
    let _ = writeln!(io::stderr(), "xtask: {line}");
}

fn open_log(log: &Path) -> io::Result<File> {
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder)?;
    }
    File::create(log)
}

fn remove(log: &Path) {
    // A log left behind is only untidy.
    let _ = fs::remove_file(log);
}

/// The last `count` lines of `text`, without the blank ones at its end.
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn tail_keeps_the_end_and_short_texts_whole() {
        assert_eq!(tail("a\nb\nc\n\n", 2), "b\nc");
        assert_eq!(tail("a\nb", 5), "a\nb");
        assert_eq!(tail("", 5), "");
    }

    #[test]
    fn success_leaves_no_log() {
        let folder = TestFolder::new("step-ok");
        let log = folder.path().join("a.log");
        let result = run(Command::new("sh").args(["-c", "echo fine"]), "unused", &log, MINUTE);
        assert!(result.is_ok(), "{result:?}");
        assert!(!log.exists());
    }

    #[test]
    fn failure_shows_the_error_line_and_keeps_the_log() {
        let folder = TestFolder::new("step-no");
        let log = folder.path().join("a.log");
        let script = "echo one; echo 'error: no such target' >&2; echo 'note: a hint'; exit 7";
        let failure = run(Command::new("sh").args(["-c", script]), "unused", &log, MINUTE).unwrap_err();
        assert!(log.exists());
        let Failure::Refused(status, tail) = &failure else { panic!("{failure:?}") };
        assert_eq!(status.code(), Some(7));
        assert_eq!(tail, "one\nerror: no such target\nnote: a hint");
        assert!(failure.reason().ends_with("error: no such target"), "{}", failure.reason());
    }

    #[test]
    fn a_missing_program_is_said_to_be_missing() {
        let folder = TestFolder::new("step-missing");
        let log = folder.path().join("a.log");
        let failure = run(&mut Command::new("no-such-program-here"), "unused", &log, MINUTE).unwrap_err();
        assert_eq!(failure.reason(), "is not installed");
        assert!(!log.exists());
    }

    #[test]
    fn a_command_past_its_limit_is_ended() {
        let folder = TestFolder::new("step-slow");
        let log = folder.path().join("a.log");
        let failure = run(Command::new("sleep").arg("600"), "unused", &log, Duration::ZERO).unwrap_err();
        assert!(matches!(failure, Failure::NoAnswer(limit) if limit.is_zero()), "{failure:?}");
    }
}
