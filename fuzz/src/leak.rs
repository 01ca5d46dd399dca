//! What one input leaves behind in this process.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How long it may take to go: threads end, a task waits for the last time.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is open: descriptors by what they are, and how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open(BTreeMap<String, usize>);

impl Open {
    /// What is open now.
    pub fn now() -> std::io::Result<Open> {
        let mut all = BTreeMap::new();
        for entry in std::fs::read_dir("/proc/self/fd")? {
            // The one that the folder is read through is gone when it is asked for.
            if let Ok(what) = std::fs::read_link(entry?.path()) {
                *all.entry(what.to_string_lossy().into_owned()).or_default() += 1;
            }
        }
        Ok(Open(all))
    }

    /// Waits until nothing else is open, and `working` is nothing.
    pub fn again(&self, working: impl Fn() -> usize) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            let (works, mut now) = (working(), Open::now()?.0);
            now.retain(|what, many| self.0.get(what) != Some(many));
            if works == 0 && now.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("{works} still work, and these descriptors are new: {now:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
