//! Where a process stands in its job, as its launcher says: rank, size, meeting place.
//!
//! | | rank and size, the first that is set |
//! |---|---|
//! | `wccl run`, torchrun | `RANK`, `WORLD_SIZE` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` |
//! | MPICH, Intel MPI, other PMI | `PMI_RANK`, `PMI_SIZE` |
//! | Slurm | `SLURM_PROCID`, `SLURM_NTASKS` |
//!
//! The ranks meet at `NEURON_RT_ROOT_COMM_ID` (`host:port`), or else at `MASTER_ADDR` and `MASTER_PORT`. Where torchrun's agent
//! listens there itself (`TORCHELASTIC_USE_AGENT_STORE=True`) they meet at the port above.

use std::ffi::OsString;

use crate::error::Error;
use sandbox::vars;

/// Who sets which variables for rank and size, in the order in which they are looked for.
const LAUNCHERS: [(&str, &str, &str); 4] = [
    ("wccl run or torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or another PMI", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
];

/// Rank, size and meeting place of this process, and which variables said so.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launched {
    /// This rank.
    pub rank: usize,
    /// Ranks of the job.
    pub nranks: usize,
    /// `host:port` where they meet.
    pub root: String,
    /// The variables that said so, in words.
    pub from: String,
}

impl Launched {
    /// What the environment of this process says.
    ///
    /// # Errors
    /// [`Error::Config`] names the variable that is missing or wrong, or all that were looked for.
    pub fn from_env() -> Result<Launched, Error> {
        Self::from_vars(|name| std::env::var_os(name))
    }

    /// The same from any look-up.
    ///
    /// # Errors
    /// As [`Launched::from_env`].
    pub fn from_vars(look_up: impl Fn(&str) -> Option<OsString>) -> Result<Launched, Error> {
        let var = |name: &str| Ok(vars::text(name, look_up(name))?);
        let number = |name: &str, text: String| {
            let wrong = || Error::Config(format!("{name}={text}: a whole number was expected"));
            text.trim().parse::<usize>().map_err(|_| wrong())
        };
        for (launcher, rank, size) in LAUNCHERS {
            let (r, n) = match (var(rank)?, var(size)?) {
                (None, None) => continue,
                (Some(r), Some(n)) => (number(rank, r)?, number(size, n)?),
                (None, Some(n)) => return Err(half(launcher, size, &n, rank)),
                (Some(r), None) => return Err(half(launcher, rank, &r, size)),
            };
            if r >= n {
                return Err(Error::Config(format!("{rank}={r} is not one of the {n} ranks of {size} ({launcher})")));
            }
            let (root, met) = root(var, n)?;
            return Ok(Launched { rank: r, nranks: n, root, from: format!("{rank} and {size} ({launcher}), {met}") });
        }
        let all: Vec<String> = LAUNCHERS.iter().map(|(l, r, n)| format!("{r} and {n} ({l})")).collect();
        Err(Error::Config(format!(
            "no launcher has said which rank this process is: none of {} is set; start it by `wccl run -r 4 -- PROGRAM`",
            all.join(", ")
        )))
    }
}

fn half(launcher: &str, has: &str, value: &str, lacks: &str) -> Error {
    Error::Config(format!("{has}={value} is set and {lacks} is not; {launcher} sets both"))
}

/// Where the ranks meet, and which variables said so.
fn root(var: impl Fn(&str) -> Result<Option<String>, Error>, n: usize) -> Result<(String, String), Error> {
    if let Some(root) = var("NEURON_RT_ROOT_COMM_ID")? {
        return Ok((root, "NEURON_RT_ROOT_COMM_ID".into()));
    }
    match (var("MASTER_ADDR")?, var("MASTER_PORT")?) {
        (Some(host), Some(port)) => {
            let wrong = || Error::Config(format!("MASTER_PORT={port}: a port from 1 to 65535 was expected"));
            let at = port.trim().parse::<u16>().ok().filter(|p| *p > 0).ok_or_else(wrong)?;
            let taken = var("TORCHELASTIC_USE_AGENT_STORE")?.is_some_and(|on| on.eq_ignore_ascii_case("true"));
            let at = match taken {
                true => at.checked_add(1).ok_or_else(wrong)?,
                false => at,
            };
            // An address of IPv6 has colons of its own.
            let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
            let beside = if taken { ", one above the port of torchrun's agent" } else { "" };
            Ok((format!("{host}:{at}"), format!("MASTER_ADDR and MASTER_PORT{beside}")))
        }
        // Nobody else comes.
        (None, None) if n == 1 => Ok(("127.0.0.1:0".into(), "a job of one".into())),
        (host, port) => {
            let lacks = match (host, port) {
                (None, None) => "neither NEURON_RT_ROOT_COMM_ID nor MASTER_ADDR and MASTER_PORT are set",
                (None, _) => "MASTER_PORT is set and MASTER_ADDR is not",
                _ => "MASTER_ADDR is set and MASTER_PORT is not",
            };
            Err(Error::Config(format!(
                "it is not said where the {n} ranks meet: {lacks}; set NEURON_RT_ROOT_COMM_ID=HOST:PORT, the same on all ranks"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(vars: &[(&str, &str)]) -> Result<Launched, String> {
        let look_up = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v));
        Launched::from_vars(look_up).map_err(|e| e.to_string())
    }

    #[test]
    fn each_launcher_is_understood_and_the_first_one_is_believed() {
        let root = ("NEURON_RT_ROOT_COMM_ID", "host:7");
        for (launcher, rank, size) in LAUNCHERS {
            let l = found(&[(rank, "2"), (size, " 5"), root]).unwrap();
            assert_eq!((l.rank, l.nranks, &*l.root), (2, 5, "host:7"));
            assert!(
                l.from.contains(rank) && l.from.contains(launcher) && l.from.ends_with("NEURON_RT_ROOT_COMM_ID"),
                "{l:?}"
            );
        }
        let both = [("PMI_RANK", "1"), ("PMI_SIZE", "3"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "9"), root];
        assert_eq!(found(&both).unwrap().nranks, 3);
        // As everywhere, an empty one is unset.
        let empty = [("RANK", ""), ("WORLD_SIZE", ""), ("PMI_RANK", "1"), ("PMI_SIZE", "3"), root];
        assert_eq!(found(&empty).unwrap().rank, 1);
    }

    #[test]
    fn the_meeting_place_is_the_runtimes_own_or_the_master() {
        let of = |more: &[(&str, &str)]| {
            let all: Vec<_> = [("RANK", "0"), ("WORLD_SIZE", "2")].into_iter().chain(more.iter().copied()).collect();
            found(&all).map(|l| l.root)
        };
        let master = |host, port| [("MASTER_ADDR", host), ("MASTER_PORT", port)];
        assert_eq!(of(&master("node1", "29500")).unwrap(), "node1:29500");
        assert_eq!(of(&master("fe80::1", "29500")).unwrap(), "[fe80::1]:29500");
        let own = [("NEURON_RT_ROOT_COMM_ID", "here:1"), ("MASTER_ADDR", "there"), ("MASTER_PORT", "2")];
        assert_eq!(of(&own).unwrap(), "here:1");
        let agent = [("MASTER_ADDR", "a"), ("MASTER_PORT", "29500"), ("TORCHELASTIC_USE_AGENT_STORE", "True")];
        assert_eq!(of(&agent).unwrap(), "a:29501");
        for (port, says) in [("0", "MASTER_PORT=0"), ("x", "MASTER_PORT=x"), ("70000", "MASTER_PORT=70000")] {
            let e = of(&master("a", port)).unwrap_err();
            assert!(e.contains(says) && e.contains("a port from 1 to 65535"), "{e}");
        }
        let e = of(&[("MASTER_ADDR", "a")]).unwrap_err();
        assert!(e.contains("MASTER_ADDR is set and MASTER_PORT is not"), "{e}");
        assert!(of(&[]).unwrap_err().contains("where the 2 ranks meet"));
        assert!(found(&[("RANK", "0"), ("WORLD_SIZE", "1")]).is_ok());
    }

    #[test]
    fn what_cannot_be_is_an_error_that_names_its_variable() {
        for (vars, says) in [
            (vec![], "none of RANK and WORLD_SIZE"),
            (vec![("RANK", "0")], "RANK=0 is set and WORLD_SIZE is not"),
            (vec![("SLURM_NTASKS", "4")], "SLURM_NTASKS=4 is set and SLURM_PROCID is not"),
            (vec![("RANK", "-1"), ("WORLD_SIZE", "2")], "RANK=-1: a whole number"),
            (vec![("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 is not one of the 2 ranks"),
        ] {
            let e = found(&vars).unwrap_err();
            assert!(e.contains(says), "{e}");
        }
    }
}
