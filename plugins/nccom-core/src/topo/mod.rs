//! Topology of one node: from "these devices exist" to a system graph with paths.
//!
//! Owns, in the order data flows: the document ([`xml`], [`synth`], [`merge`]), the graph ([`system`]), its paths
//! ([`paths`]), the check of the device set ([`verify`]) and the questions others ask of it ([`query`]). What the host
//! must answer is the trait [`Machine`]. Nothing here reads a file, a clock or the environment: documents and
//! variables are handed in. Spec: topology-and-rings 2, transports 3.1, INV-42 and INV-43.
//!
//! Invariants: every rank of a node computes the same graph; the order of child elements changes nothing; no document
//! makes it panic.

pub mod error;
pub mod limits;
pub mod machine;
pub mod merge;
pub mod paths;
pub mod query;
pub mod synth;
pub mod system;
pub mod verify;
pub mod xml;

pub use error::{MachineError, TopoError};
#[cfg(test)]
pub(crate) use machine::TableMachine;
pub use machine::{
    Accelerator, Bdf, CpuMask, Family, Machine, MachineFacts, NetDevice, NumaNode, P2pPolicy, RankInfo,
    device_can_access_peer,
};
pub use paths::{P2pCheck, Path, PathInfo};
pub use system::{Gpu, Net, NodeType, PathType, System};

/// Whether a boolean variable is on: any number but 0 (env 1).
pub(crate) fn flag(vars: &dyn Fn(&str) -> Option<String>, name: &str) -> bool {
    vars(name).is_some_and(|v| v.trim().parse::<i64>().is_ok_and(|n| n != 0))
}

/// Discovers the topology of the asking rank's node: document (`topo_file`, the content of `NCCL_TOPO_FILE`, or
/// synthesis), devices of this run, trimming, graph, paths, search numbers, verification. Also returns the document,
/// which the caller writes to `NCCL_TOPO_DUMP_FILE` if it is rank 0.
///
/// # Errors
/// Any [`TopoError`]; each names what to change.
pub fn discover(
    machine: &dyn Machine,
    ranks: &[RankInfo],
    my_rank: i32,
    vars: &dyn Fn(&str) -> Option<String>,
    topo_file: Option<&str>,
) -> Result<(System, String), TopoError> {
    let me = ranks.iter().find(|r| r.rank == my_rank).ok_or(TopoError::NoLocalRank { rank: my_rank })?;
    let mut local: Vec<&RankInfo> = ranks.iter().filter(|r| r.host_hash == me.host_hash).collect();
    local.sort_by_key(|r| r.rank);
    if local.len() > limits::MAX_LOCAL_RANKS {
        return Err(TopoError::TooMany { what: "local ranks", found: local.len(), limit: limits::MAX_LOCAL_RANKS });
    }
    for (i, rank) in local.iter().enumerate() {
        let same = |r: &&RankInfo| r.neuron_dev == rank.neuron_dev || r.rank == rank.rank;
        if let Some(twin) = local[..i].iter().copied().find(same) {
            let (a, b, dev) = (twin.rank, rank.rank, rank.neuron_dev);
            return Err(TopoError::Duplicate { what: format!("device {dev} (ranks {a} and {b})") });
        }
    }
    let p2p = P2pPolicy::from_vars(vars)?;
    let mut document = match topo_file {
        Some(text) => {
            let mut document = xml::read(text)?;
            system::check_root(&document, false)?;
            merge::put_ranks(&mut document, machine, &local)?;
            merge::put_nets(&mut document, &machine.nics())?;
            document
        }
        None => synth::synthesize(machine, &local)?,
    };
    merge::drop_unused(&mut document);
    let mut accelerators = Vec::new();
    for mla in machine.devices()? {
        if machine.mla_available(mla) {
            accelerators.push(Accelerator { mla, rid: machine.mla_to_rid(mla)?, numa: machine.device_numa(mla) });
        }
    }
    let facts = MachineFacts {
        family: machine.family()?,
        virtual_core_size: machine.virtual_core_size()?,
        cores_per_device: machine.cores_per_device()?,
        multi_node: local.len() != ranks.len(),
        local_ranks: local.iter().map(|r| r.rank).collect(),
        p2p,
        accelerators,
    };
    let mut system = System::from_element(&document, facts, false)?;
    system.prepare();
    verify::verify(&system, &local, vars)?;
    Ok((system, xml::write(&document)))
}

#[cfg(test)]
mod tests;
