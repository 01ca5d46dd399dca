//! What topology asks of the host, and the small types of the answers.
//!
//! Owns: the [`Machine`] trait (the component implements it over its imports, tests by a table), instance families,
//! PCI addresses, CPU masks, and [`RankInfo`], what the peer records say about one rank.

use super::error::{MachineError, TopoError};
use super::limits::MAX_CPUS;
#[cfg(test)]
use std::collections::BTreeMap;
use std::fmt;

/// Instance family by the original's number (reverse-abi 4.2). Numbers we do not know count as Trn1 where a
/// platform has to be chosen, as in the original.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Family(pub u32);

impl Family {
    /// TRN1 2 and TRN1N 3.
    pub fn is_trn1(self) -> bool {
        matches!(self.0, 2 | 3)
    }
    /// INF2 4 and INF2E 7.
    pub fn is_inf2(self) -> bool {
        matches!(self.0, 4 | 7)
    }
    /// TRN2 5, TRN2N 6, TRN2P 8 to TRN2UAC 13.
    pub fn is_trn2(self) -> bool {
        matches!(self.0, 5 | 6 | 8..=13)
    }
    /// TRN3 14 and TRN3PDS98 15.
    pub fn is_trn3(self) -> bool {
        matches!(self.0, 14 | 15)
    }
    /// TRN3PDS98 15, whose servers connect through a switch.
    pub fn is_switch_v1(self) -> bool {
        self.0 == 15
    }
    /// An UltraServer member, whose nodes may be ordered by pod: TRN2U 9, TRN2EU 11, TRN2UAC 13 and the TRN3
    /// families. Which families count is not recorded; these are the ones whose name says so, and all of TRN3.
    pub fn is_ultraserver(self) -> bool {
        matches!(self.0, 9 | 11 | 13) || self.is_trn3()
    }
    /// Silicon generation as the kernel numbers it (reverse-abi 7): 2 sunda, 3 cayman, 4 mariana.
    pub fn generation(self) -> u32 {
        if self.is_trn3() {
            4
        } else if self.is_trn2() {
            3
        } else {
            2
        }
    }
}

/// A PCI address; shown as `domain:bus:slot.func`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bdf {
    /// PCI domain.
    pub domain: u32,
    /// Bus.
    pub bus: u32,
    /// Slot, at most 31.
    pub slot: u8,
    /// Function, at most 7.
    pub func: u8,
}

impl Bdf {
    /// Reads `domain:bus:slot.func`, hexadecimal.
    pub fn parse(text: &str) -> Option<Self> {
        let (domain, rest) = text.trim().split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (slot, func) = rest.split_once('.')?;
        let hex = |s: &str| {
            (s.len() <= 8 && s.bytes().all(|b| b.is_ascii_hexdigit()))
                .then(|| u32::from_str_radix(s, 16).ok())
                .flatten()
        };
        Some(Self {
            domain: hex(domain)?,
            bus: hex(bus).filter(|b| *b <= 0xff)?,
            slot: hex(slot).and_then(|s| u8::try_from(s).ok())?,
            func: hex(func).filter(|f| *f <= 0xf).and_then(|f| u8::try_from(f).ok())?,
        })
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.slot, self.func)
    }
}

/// A NUMA node and its CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its CPUs as a list such as `0-3,8`.
    pub cpus: String,
}

/// A network device as the bound net plug-in offers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetDevice {
    /// Device index of the plug-in: what `graph.inter` holds.
    pub dev: i32,
    /// Name.
    pub name: String,
    /// PCI address of the card.
    pub bdf: Bdf,
    /// NUMA node.
    pub numa: u32,
    /// Mbit/s.
    pub speed: u32,
    /// Port on the card.
    pub port: u32,
    /// GUID.
    pub guid: u64,
    /// Connections it takes at most.
    pub max_comms: u32,
    /// Whether it reaches device memory directly.
    pub gdr: bool,
}

/// What discovery asks of the host. Every answer must be the same for every rank of a node.
pub trait Machine {
    /// `nrt_get_instance_info`: the family.
    fn family(&self) -> Result<Family, MachineError>;
    /// `nec_get_virtual_core_size`: physical cores in a logical one, 1 or 2.
    fn virtual_core_size(&self) -> Result<u32, MachineError>;
    /// Physical cores of an accelerator: 2 on sunda, 8 on cayman and mariana (reverse-abi 7).
    fn cores_per_device(&self) -> Result<u32, MachineError> {
        Ok(if self.family()?.generation() == 2 { 2 } else { 8 })
    }
    /// `nec_get_device_count`: indices of the accelerators the server has.
    fn devices(&self) -> Result<Vec<i32>, MachineError>;
    /// `nec_get_device_pci_bdf`: PCI address of an accelerator.
    fn bdf(&self, mla: i32) -> Result<Bdf, MachineError>;
    /// `nec_is_mla_available`.
    fn mla_available(&self, mla: i32) -> bool;
    /// `nec_mla_idx_to_rid`; asked only for available accelerators.
    fn mla_to_rid(&self, mla: i32) -> Result<i32, MachineError>;
    /// `nec_get_peer_mla_idx`; an unconnected port (the original's -22) is None.
    fn peer_mla(&self, mla: i32, port: u32) -> Option<i32>;
    /// NUMA nodes, at least one.
    fn numa_nodes(&self) -> Result<Vec<NumaNode>, MachineError>;
    /// NUMA node of an accelerator.
    fn device_numa(&self, mla: i32) -> u32;
    /// Network devices; empty without a net plug-in.
    fn nics(&self) -> Vec<NetDevice>;
}

/// What the peer records say about one rank, as far as topology and rings need it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RankInfo {
    /// Rank in the communicator.
    pub rank: i32,
    /// `neuron_dev`: index of the logical core on its server.
    pub neuron_dev: i32,
    /// Accelerator that carries the core.
    pub mla: i32,
    /// Logical core index inside the accelerator.
    pub core: i32,
    /// Routing id of the accelerator.
    pub rid: i32,
    /// Host hash: equal means same node.
    pub host_hash: u64,
    /// Pod, 0 without one.
    pub pod_id: u64,
    /// Node number inside the pod, negative without one.
    pub pod_node: i32,
}

impl RankInfo {
    /// Accelerator of a logical core: `core × vcore size / cores per device` (transports 3.1). None if a size is 0 or
    /// the index negative.
    pub fn accelerator_of(neuron_dev: i32, virtual_core_size: u32, cores_per_device: u32) -> Option<i32> {
        let core = u64::try_from(neuron_dev).ok()? * u64::from(virtual_core_size);
        i32::try_from(core.checked_div(u64::from(cores_per_device))?).ok()
    }
}

/// A set of CPUs, 64 a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuMask(pub [u64; MAX_CPUS / 64]);

impl CpuMask {
    /// Reads a list such as `0-3,8`.
    pub fn from_list(text: &str) -> Option<Self> {
        let mut mask = Self::default();
        for part in text.trim().split(',').filter(|p| !p.trim().is_empty()) {
            let (low, high) = match part.split_once('-') {
                Some((a, b)) => (a.trim().parse::<usize>().ok()?, b.trim().parse::<usize>().ok()?),
                None => {
                    let one = part.trim().parse::<usize>().ok()?;
                    (one, one)
                }
            };
            if low > high || high >= MAX_CPUS {
                return None;
            }
            for cpu in low..=high {
                mask.0[cpu / 64] |= 1 << (cpu % 64);
            }
        }
        Some(mask)
    }

    /// Reads the schema's form: 32-bit words in hexadecimal, most significant first.
    pub fn from_hex(text: &str) -> Option<Self> {
        let mut mask = Self::default();
        for (i, word) in text.trim().rsplit(',').enumerate() {
            let word = word.trim();
            if word.len() > 8 || !word.bytes().all(|b| b.is_ascii_hexdigit()) {
                return None;
            }
            let bits = u64::from(u32::from_str_radix(word, 16).ok()?);
            match mask.0.get_mut(i / 2) {
                Some(slot) => *slot |= bits << (32 * (i % 2)),
                None if bits == 0 => {}
                None => return None,
            }
        }
        Some(mask)
    }

    /// Whether no CPU is in it.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }
}

impl fmt::Display for CpuMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<u32> = self.0.iter().flat_map(|w| [*w as u32, (*w >> 32) as u32]).collect();
        let top = words.iter().rposition(|w| *w != 0).unwrap_or(0);
        for (i, word) in words[..=top].iter().enumerate().rev() {
            write!(f, "{word:08x}{}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// What the path and search rooms must know of the machine, kept beside the system graph.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct MachineFacts {
    /// Instance family.
    pub family: Family,
    /// Physical cores in a logical one.
    pub virtual_core_size: u32,
    /// Physical cores of an accelerator.
    pub cores_per_device: u32,
    /// Whether the communicator spans nodes.
    pub multi_node: bool,
    /// Ranks of this node; empty takes every ranked gpu of the document.
    pub local_ranks: Vec<i32>,
    /// Worst path type over which ranks talk directly, and off.
    pub p2p: P2pPolicy,
    /// Every accelerator of the server, also those without a rank.
    pub accelerators: Vec<Accelerator>,
}

/// An accelerator of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accelerator {
    /// Index.
    pub mla: i32,
    /// Routing id.
    pub rid: i32,
    /// NUMA node.
    pub numa: u32,
}

/// `NCCL_P2P_DISABLE` and `NCCL_P2P_LEVEL` (env 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct P2pPolicy {
    /// Never connect directly.
    pub disabled: bool,
    /// The user's level.
    pub level: Option<super::PathType>,
}

impl P2pPolicy {
    /// Reads the two variables.
    ///
    /// # Errors
    /// [`TopoError::BadVariable`] for a level that is neither a name nor a number of 0 to 6.
    pub fn from_vars(vars: &dyn Fn(&str) -> Option<String>) -> Result<Self, TopoError> {
        let disabled = super::flag(vars, "NCCL_P2P_DISABLE");
        let level = match vars("NCCL_P2P_LEVEL") {
            None => None,
            Some(value) => match super::PathType::parse(&value) {
                Some(level) => Some(level),
                None => {
                    return Err(TopoError::BadVariable {
                        name: "NCCL_P2P_LEVEL",
                        value,
                        expected: "LOC, NVL, PIX, PXB, PHB, SYS or a number from 0 to 6",
                    });
                }
            },
        };
        Ok(Self { disabled, level })
    }
}

/// Whether two ranks' accelerators reach one another's memory (transports 3.1): the same accelerator, a port of the
/// first that leads to the second; on TRN1 always within a server; on switch-v1 within a server (routing ids equal
/// above the low 4 bits) or by the pod predicate, `nec_pod_node_can_access_peer_node`.
///
/// # Errors
/// [`TopoError::Machine`] if the host does not tell its family.
pub fn device_can_access_peer(
    machine: &dyn Machine,
    a: &RankInfo,
    b: &RankInfo,
    pod_access: &dyn Fn(&RankInfo, &RankInfo) -> bool,
) -> Result<bool, TopoError> {
    let family = machine.family()?;
    let same_host = a.host_hash == b.host_hash;
    if same_host {
        if a.mla == b.mla || family.is_trn1() {
            return Ok(true);
        }
        if (0..super::limits::PORTS).any(|port| machine.peer_mla(a.mla, port) == Some(b.mla)) {
            return Ok(true);
        }
    }
    if family.is_switch_v1() {
        return Ok((same_host && a.rid >> 4 == b.rid >> 4) || pod_access(a, b));
    }
    Ok(false)
}

/// A machine that is a table: for tests of this crate.
#[cfg(test)]
#[derive(Clone, Debug, Default)]
pub struct TableMachine {
    /// Family.
    pub family: Family,
    /// Physical cores in a logical one.
    pub vcore: u32,
    /// Accelerators, and for each its ports' other ends.
    pub ports: BTreeMap<i32, Vec<i32>>,
    /// Addresses other than the made-up ones.
    pub bdfs: BTreeMap<i32, Bdf>,
    /// NUMA nodes; accelerators are spread over them in blocks.
    pub numa: Vec<NumaNode>,
    /// NICs.
    pub nics: Vec<NetDevice>,
}

#[cfg(test)]
impl TableMachine {
    /// `n` accelerators: a 4 × 4 torus for 16 (Trn1, Trn2), else a ring; nothing wired on switch-v1. Two NUMA nodes
    /// of 8 CPUs, `nics` NICs of 100 Gb/s spread over both.
    pub fn server(family: u32, n: i32, vcore: u32, nics: i32) -> Self {
        let family = Family(family);
        let ports = (0..n)
            .map(|m| {
                let mut peers = if n == 16 && !family.is_inf2() {
                    let (row, col) = (m / 4, m % 4);
                    vec![
                        row * 4 + (col + 1) % 4,
                        row * 4 + (col + 3) % 4,
                        ((row + 1) % 4) * 4 + col,
                        ((row + 3) % 4) * 4 + col,
                    ]
                } else {
                    vec![(m + 1) % n, (m + n - 1) % n]
                };
                peers.retain(|p| *p != m);
                if family.is_switch_v1() {
                    peers.clear();
                }
                (m, peers)
            })
            .collect();
        let numa = vec![NumaNode { id: 0, cpus: "0-7".to_string() }, NumaNode { id: 1, cpus: "8-15".to_string() }];
        let nics = (0..nics)
            .map(|i| NetDevice {
                dev: i,
                name: format!("rdmap{i}"),
                bdf: Bdf { domain: 0, bus: 0xc0 + i as u32, slot: 0x1d, func: 0 },
                numa: u32::from(i >= (nics + 1) / 2),
                speed: 100_000,
                port: 1,
                guid: 0x100 + i as u64,
                max_comms: 1024,
                gdr: true,
            })
            .collect();
        Self { family, vcore, ports, bdfs: BTreeMap::new(), numa, nics }
    }

    /// Logical cores of one accelerator.
    pub fn cores(&self) -> i32 {
        (self.cores_per_device().unwrap_or(0) / self.vcore.max(1)) as i32
    }

    /// One rank a logical core for the first `n` cores of each of `nodes` equal servers.
    pub fn ranks(&self, n: i32, nodes: i32) -> Vec<RankInfo> {
        let cores = self.cores().max(1);
        (0..nodes)
            .flat_map(|node| {
                (0..n).map(move |dev| RankInfo {
                    rank: node * n + dev,
                    neuron_dev: dev,
                    mla: dev / cores,
                    core: dev % cores,
                    rid: dev / cores,
                    host_hash: 0x1000 + node as u64,
                    pod_id: 0,
                    pod_node: -1,
                })
            })
            .collect()
    }
}

#[cfg(test)]
impl Machine for TableMachine {
    fn family(&self) -> Result<Family, MachineError> {
        Ok(self.family)
    }
    fn virtual_core_size(&self) -> Result<u32, MachineError> {
        Ok(self.vcore)
    }
    fn devices(&self) -> Result<Vec<i32>, MachineError> {
        Ok(self.ports.keys().copied().collect())
    }
    fn bdf(&self, mla: i32) -> Result<Bdf, MachineError> {
        if !self.ports.contains_key(&mla) {
            return Err(MachineError { call: "nec_get_device_pci_bdf", detail: format!("no device {mla}") });
        }
        let made_up = Bdf { domain: 0, bus: 0x10 + mla as u32, slot: 0x1e, func: 0 };
        Ok(self.bdfs.get(&mla).copied().unwrap_or(made_up))
    }
    fn mla_available(&self, mla: i32) -> bool {
        self.ports.contains_key(&mla)
    }
    fn mla_to_rid(&self, mla: i32) -> Result<i32, MachineError> {
        Ok(mla)
    }
    fn peer_mla(&self, mla: i32, port: u32) -> Option<i32> {
        self.ports.get(&mla)?.get(port as usize).copied()
    }
    fn numa_nodes(&self) -> Result<Vec<NumaNode>, MachineError> {
        Ok(self.numa.clone())
    }
    fn device_numa(&self, mla: i32) -> u32 {
        let n = self.ports.len().max(1);
        let block = mla.max(0) as usize * self.numa.len() / n;
        self.numa.get(block).map_or(0, |node| node.id)
    }
    fn nics(&self) -> Vec<NetDevice> {
        self.nics.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_addresses_round_trip() {
        let mask = CpuMask::from_list("0-3,8, 70").unwrap();
        assert_eq!(mask.to_string(), "00000040,00000000,0000010f");
        assert_eq!(CpuMask::from_hex(&mask.to_string()), Some(mask));
        assert_eq!(CpuMask::from_hex("0003ff,f0003fff").map(|m| m.0[0]), Some(0x3ff_f000_3fff));
        for bad in ["4-2", "1024", "x", "1-"] {
            assert_eq!(CpuMask::from_list(bad), None, "{bad}");
        }
        assert_eq!(CpuMask::from_hex("123456789"), None);
        let bdf = Bdf::parse("0000:10:1c.0").unwrap();
        assert_eq!(bdf.to_string(), "0000:10:1c.0");
        assert_eq!(Bdf::parse("FFFF:ff:01.0").unwrap().to_string(), "ffff:ff:01.0");
        for bad in ["", "0:0:0", "0000:100:00.0", "g:0:0.0", "+1:0:0.0", "0:0:fff.0"] {
            assert_eq!(Bdf::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn accelerators_of_logical_cores() {
        assert_eq!(RankInfo::accelerator_of(31, 1, 2), Some(15));
        assert_eq!(RankInfo::accelerator_of(63, 2, 8), Some(15));
        assert_eq!(RankInfo::accelerator_of(-1, 2, 8), None);
        assert_eq!(RankInfo::accelerator_of(1, 2, 0), None);
    }

    #[test]
    fn peers_reach_one_another_by_port_server_or_pod() {
        let no = |_: &RankInfo, _: &RankInfo| false;
        let yes = |_: &RankInfo, _: &RankInfo| true;
        let trn2 = TableMachine::server(5, 16, 2, 0);
        let r = trn2.ranks(64, 2);
        let reach = |m: &TableMachine, a: &RankInfo, b: &RankInfo| device_can_access_peer(m, a, b, &no).unwrap();
        assert!(reach(&trn2, &r[0], &r[3]), "same accelerator");
        assert!(reach(&trn2, &r[0], &r[4 * 12]), "torus neighbour");
        assert!(!reach(&trn2, &r[0], &r[4 * 5]), "no neighbour");
        assert!(!reach(&trn2, &r[0], &r[64]), "other server, same device number");
        let trn1 = TableMachine::server(2, 16, 1, 0);
        let r = trn1.ranks(32, 2);
        assert!(reach(&trn1, &r[0], &r[11]));
        assert!(!reach(&trn1, &r[0], &r[32]));
        let switch = TableMachine::server(15, 16, 2, 0);
        let r = switch.ranks(64, 2);
        assert!(reach(&switch, &r[0], &r[40]));
        assert!(!reach(&switch, &r[0], &r[64]));
        assert!(device_can_access_peer(&switch, &r[0], &r[64], &yes).unwrap());
    }
}
