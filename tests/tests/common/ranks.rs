//! Ranks as processes of the program `rank`, and the lines they print.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use super::HANG;

/// A rank's process and the lines it prints. Ends with this value.
pub struct Rank {
    pub child: Child,
    lines: Receiver<String>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rank {
    /// The next line; a rank that says nothing for long fails the test.
    pub fn line(&self) -> String {
        self.lines.recv_timeout(HANG).expect("a line of the rank")
    }

    /// The lines until it ends.
    pub fn rest(&self) -> Vec<String> {
        let mut all = Vec::new();
        while let Ok(l) = self.lines.recv_timeout(HANG) {
            all.push(l);
        }
        all
    }

    /// Ends it by SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Starts `n` ranks in `mode` that meet at a port of their own.
pub fn start(mode: &str, n: usize, vars: &[(&str, &str)]) -> Vec<Rank> {
    start_at(&format!("127.0.0.1:{}", super::free_port()), mode, n, vars)
}

/// The same, where they meet at `root`.
pub fn start_at(root: &str, mode: &str, n: usize, vars: &[(&str, &str)]) -> Vec<Rank> {
    (0..n).map(|rank| spawn(Command::new(env!("CARGO_BIN_EXE_rank")), root, mode, rank, n, vars)).collect()
}

/// Starts one rank by `command`, which is the program `rank` or runs it.
pub fn spawn(mut command: Command, root: &str, mode: &str, rank: usize, n: usize, vars: &[(&str, &str)]) -> Rank {
    let mut child = command
        .arg(mode)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", n.to_string())
        .env("NEURON_RT_ROOT_COMM_ID", root)
        .env("NEURON_CCOM_SOCK_TIMEOUT", "120000")
        .env("WCCL_TIMEOUT_MS", "120000")
        .env("WCCL_HBM_BYTES", (256u64 << 20).to_string())
        .envs(vars.iter().copied())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let (tx, lines) = channel();
    std::thread::spawn(move || out.lines().map_while(Result::ok).for_each(|l| drop(tx.send(l))));
    Rank { child, lines }
}
