//! One process of the soak: reads a command a line, answers each with a line.
//!
//! | command | answer |
//! |---|---|
//! | | `ready`, once |
//! | `id N` | `id HEX`: an id for a group of N |
//! | `join KEY HEX RANK N MS` | `joined`; the operations' deadline is MS |
//! | `ops KEY SEED COUNT` | `done BYTES` after COUNT operations, all checked |
//! | `until KEY SEED any\|meeting` | `failed TEXT`: the error that ended an endless list of operations |
//! | `sleep MS` | nothing |
//! | `drop KEY` | `dropped` |
//! | `quit` | `bye` |
//!
//! Anything that goes wrong is answered by `fault TEXT` and the end of the process. The end of stdin is the end.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use wccl::{CommOptions, Communicator, Error, Runtime, RuntimeConfig};

use crate::plan::{Rng, operation};
use wccl_cli::rank::collective::RankBuffers;

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A parent that is gone does not read.
    let _ = writeln!(out, "{}", line.replace('\n', " ")).and_then(|()| out.flush());
}

/// The rank's whole life.
pub fn serve() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say(&format!("fault {e:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let runtime = Runtime::open(RuntimeConfig::from_env()?)?;
    if let Some(e) = runtime.load_error() {
        bail!("{}", e.sentinel);
    }
    let mut groups: HashMap<String, Communicator> = HashMap::new();
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.context("reading a command")?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["id", n] => {
                let id = runtime.unique_id(n.parse()?)?;
                say(&format!("id {}", id.iter().map(|b| format!("{b:02x}")).collect::<String>()));
            }
            ["join", key, id, rank, n, ms] => {
                let timeout = Some(Duration::from_millis(ms.parse()?));
                let options = CommOptions { timeout, ..CommOptions::with_id(unhex(id)?, rank.parse()?, n.parse()?) };
                let comm = runtime.init_comm(options).with_context(|| line.clone())?;
                ensure!(groups.insert(key.into(), comm).is_none(), "{line}: there is such a group");
                say("joined");
            }
            ["ops", key, seed, count] => {
                let comm = groups.get_mut(key).with_context(|| format!("{line}: no such group"))?;
                let mut rng = Rng::new(seed.parse()?, 0);
                let mut bytes = 0;
                for i in 0..count.parse::<u64>()? {
                    bytes += one(comm, &mut rng, false).with_context(|| format!("{line}: operation {i}"))?;
                }
                say(&format!("done {bytes}"));
            }
            ["until", key, seed, which] => {
                let comm = groups.get_mut(key).with_context(|| format!("{line}: no such group"))?;
                let mut rng = Rng::new(seed.parse()?, 0);
                let e = loop {
                    if let Err(e) = one(comm, &mut rng, which == "meeting") {
                        break e;
                    }
                };
                // Only the group may have failed; a wrong result is a fault whatever else happens.
                if !matches!(e.downcast_ref::<Error>(), Some(Error::Op(_))) {
                    return Err(e).context(line.clone());
                }
                say(&format!("failed {e}"));
            }
            ["sleep", ms] => std::thread::sleep(Duration::from_millis(ms.parse()?)),
            ["drop", key] => {
                drop(groups.remove(key).with_context(|| format!("{line}: no such group"))?);
                say("dropped");
            }
            ["quit"] => {
                drop(groups);
                drop(runtime);
                say("bye");
                return Ok(());
            }
            _ => bail!("unknown command `{line}`"),
        }
    }
    Ok(())
}

/// One operation with buffers of its own, checked; answers its bytes.
fn one(comm: &mut Communicator, rng: &mut Rng, meeting: bool) -> Result<u64> {
    let o = operation(rng, comm.nranks(), meeting);
    let bytes = o.case.bytes(comm.nranks());
    let mut buffers = RankBuffers::new(comm, o.memory, bytes)?;
    let wrong = o.case.check(comm, &mut buffers)?;
    ensure!(wrong == 0, "{wrong} elements are wrong on rank {} of {}: {o:?}", comm.rank(), comm.nranks());
    Ok(bytes)
}

fn unhex(text: &str) -> Result<[u8; 128]> {
    let bytes: Vec<u8> = (0..text.len() / 2)
        .map(|i| u8::from_str_radix(text.get(2 * i..2 * i + 2).unwrap_or_default(), 16))
        .collect::<Result<_, _>>()?;
    let len = bytes.len();
    bytes.try_into().map_err(|_| anyhow::anyhow!("an id of {len} bytes, 128 are expected"))
}
