//! What processes hold, from /proc: whether it grows, and whether anything is left of them.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Samples before anything is judged: first calls fill caches.
const WARM: usize = 4;
/// Samples after them from which on a trend is one.
const ENOUGH: usize = 8;

/// How much each number may grow from the first quarter of the samples to the last. They are medians, so a single sample
/// does not count, and a leak in every round does.
pub struct Bounds;

impl Bounds {
    /// (name, most growth) in the order of a sample.
    pub const ALL: [(&'static str, i64); 4] =
        [("kB resident", 24 * 1024), ("descriptors", 4), ("threads", 1), ("mappings", 24)];
}

/// What a process holds over time.
#[derive(Debug)]
pub struct Trend {
    pid: u32,
    samples: Vec<[i64; 4]>,
}

impl Trend {
    /// Of a process that has just begun.
    pub fn new(pid: u32) -> Trend {
        Trend { pid, samples: Vec::new() }
    }

    /// Looks at the process.
    ///
    /// # Errors
    /// It is gone, or /proc is not readable.
    pub fn sample(&mut self) -> Result<()> {
        let dir = Path::new("/proc").join(self.pid.to_string());
        let read = |name: &str| {
            std::fs::read_to_string(dir.join(name)).with_context(|| format!("reading {}", dir.join(name).display()))
        };
        let status = read("status")?;
        let number = |name: &str| -> Result<i64> {
            let line = status.lines().find_map(|l| l.strip_prefix(name)).with_context(|| format!("no {name}"))?;
            Ok(line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse()?)
        };
        let fds = std::fs::read_dir(dir.join("fd")).with_context(|| format!("reading descriptors of {}", self.pid))?;
        let maps = read("maps")?.lines().count();
        self.samples.push([number("VmRSS")?, fds.count() as i64, number("Threads")?, maps as i64]);
        Ok(())
    }

    /// Growth so far, once there are enough samples.
    ///
    /// # Errors
    /// It is beyond the bounds.
    pub fn growth(&self) -> Result<Vec<(&'static str, i64)>> {
        let judged = self.samples.get(WARM..).unwrap_or_default();
        if judged.len() < ENOUGH {
            return Ok(Vec::new());
        }
        let quarter = judged.len() / 4;
        let mut all = Vec::new();
        for (i, (what, most)) in Bounds::ALL.into_iter().enumerate() {
            let (from, to) = (median(&judged[..quarter], i), median(&judged[judged.len() - quarter..], i));
            if to - from > most {
                let (pid, n) = (self.pid, judged.len());
                bail!(
                    "process {pid} grows: {from} {what} became {to} over {n} rounds, at most {most} more are allowed"
                );
            }
            all.push((what, to - from));
        }
        Ok(all)
    }
}

fn median(samples: &[[i64; 4]], i: usize) -> i64 {
    let mut of: Vec<i64> = samples.iter().map(|s| s[i]).collect();
    of.sort_unstable();
    of.get(of.len() / 2).copied().unwrap_or(0)
}

/// Sockets and memfds that processes hold, by inode.
#[derive(Debug)]
pub struct Left {
    sockets: HashSet<String>,
    memfds: HashSet<String>,
}

/// The links of a process's descriptors: target and, for files, the inode.
fn links(pid: &str) -> Vec<(String, Option<String>)> {
    use std::os::unix::fs::MetadataExt;
    let Ok(dir) = std::fs::read_dir(Path::new("/proc").join(pid).join("fd")) else { return Vec::new() };
    dir.flatten()
        .filter_map(|fd| {
            let to = std::fs::read_link(fd.path()).ok()?.to_string_lossy().into_owned();
            let inode = std::fs::metadata(fd.path()).ok().map(|m| format!("{}:{}", m.dev(), m.ino()));
            Some((to, inode))
        })
        .collect()
}

impl Left {
    /// What these processes hold now.
    ///
    /// # Errors
    /// Nothing at all: then looking for what is left would prove nothing.
    pub fn held_by(pids: &[u32]) -> Result<Left> {
        let (mut sockets, mut memfds) = (HashSet::new(), HashSet::new());
        for (to, inode) in pids.iter().flat_map(|p| links(&p.to_string())) {
            if let Some(s) = to.strip_prefix("socket:[").and_then(|s| s.strip_suffix(']')) {
                sockets.insert(s.to_string());
            } else if to.starts_with("/memfd:") {
                memfds.extend(inode);
            }
        }
        if sockets.is_empty() || memfds.is_empty() {
            bail!("the ranks hold {} sockets and {} memfds; some of each are expected", sockets.len(), memfds.len());
        }
        Ok(Left { sockets, memfds })
    }

    /// Checks that none of it is there any more, nor the processes.
    ///
    /// # Errors
    /// Names what is left.
    pub fn are_gone(&self, pids: &[u32]) -> Result<()> {
        if let Some(pid) = pids.iter().find(|p| Path::new("/proc").join(p.to_string()).exists()) {
            bail!("process {pid} is left");
        }
        // A TCP connection in TIME_WAIT has inode 0 in these tables, so it is not taken for one that is held.
        for table in ["unix", "tcp", "tcp6"] {
            let text = std::fs::read_to_string(Path::new("/proc/net").join(table)).unwrap_or_default();
            if let Some(s) = text.split_whitespace().find(|w| self.sockets.contains(*w)) {
                // Numbers in other columns may be the same by chance; the inode's column decides.
                let column = if table == "unix" { 6 } else { 9 };
                if text.lines().any(|l| l.split_whitespace().nth(column) == Some(s)) {
                    bail!("socket {s} is left in /proc/net/{table}");
                }
            }
        }
        let all = std::fs::read_dir("/proc").context("reading /proc")?.flatten();
        for p in all.map(|p| p.file_name().to_string_lossy().into_owned()) {
            if let Some((to, _)) = links(&p).iter().find(|l| l.1.as_ref().is_some_and(|i| self.memfds.contains(i))) {
                bail!("{to} of the ranks is still held by process {p}");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;

    use super::*;

    fn trend(of: impl Fn(i64) -> [i64; 4]) -> Result<Vec<(&'static str, i64)>> {
        Trend { pid: 1, samples: (0..40).map(of).collect() }.growth()
    }

    #[test]
    fn a_leak_is_found_and_noise_is_not() {
        let flat = trend(|i| [50_000 + i % 7 * 1000, 30 + i % 2, 5, 200]).unwrap();
        assert!(flat.iter().all(|(_, by)| by.abs() < 5000), "{flat:?}");
        // Warming up is not growth.
        assert!(trend(|i| [if i < 4 { 1000 } else { 90_000 }, 30, 5, 200]).is_ok());
        let e = trend(|i| [50_000, 30 + i, 5, 200]).unwrap_err().to_string();
        assert!(e.contains("descriptors became"), "{e}");
        assert!(trend(|i| [50_000 + i * 1024, 30, 5, 200]).is_err());
        assert!(trend(|i| [50_000, 30, 5 + i / 16, 200]).is_err());
        assert!(trend(|i| [50_000, 30, 5, 200 + i]).is_err());
        let few = Trend { pid: 1, samples: vec![[0; 4]; WARM + ENOUGH - 1] };
        assert!(few.growth().unwrap().is_empty());
    }

    #[test]
    fn what_is_held_is_seen() {
        let name = std::os::unix::net::SocketAddr::from_abstract_name(format!("soak-test-{}", std::process::id()));
        let _socket = std::os::unix::net::UnixListener::bind_addr(&name.unwrap()).unwrap();
        let file = hw_bridge::memory::segment::Segment::create("soak-test", 4096).unwrap();
        let held = Left::held_by(&[std::process::id()]).unwrap();
        assert!(held.are_gone(&[std::process::id()]).unwrap_err().to_string().contains("process"));
        assert!(held.are_gone(&[]).unwrap_err().to_string().contains("socket"));
        let only = Left { sockets: HashSet::new(), memfds: held.memfds };
        assert!(only.are_gone(&[]).unwrap_err().to_string().contains("memfd"));
        drop(file);
        only.are_gone(&[]).unwrap();
    }
}
