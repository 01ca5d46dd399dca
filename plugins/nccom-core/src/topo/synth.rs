//! Synthesis: a topology document from what the host answers, no bus walk (topology-and-rings 2.1).
//!
//! Owns: the choice of platform and what each platform's document looks like. All emit the upstream schema, version 1:
//! one `<cpu>` per NUMA node, PCI switches, accelerators as `<pci>` with one `<gpu>` per logical core that carries a
//! rank, one `<nvlink>` per connected port (under the accelerator's first gpu), `<nic>`/`<net>` per network device.
//! Beyond the schema a `<gpu>` has `mla`, `core` and `rid`, which readers of the plain schema ignore.

use super::error::TopoError;
use super::limits::PORTS;
use super::machine::{CpuMask, Family, Machine, NetDevice, RankInfo};
use super::xml::XmlElement;
use std::collections::BTreeMap;

/// Class of an accelerator, of a switch, of a network card, of the fabric switch.
pub(super) const CLASS_ACCELERATOR: &str = "0x120000";
pub(super) const CLASS_PCI_SWITCH: &str = "0x060400";
pub(super) const CLASS_NIC: &str = "0x020000";
pub(super) const CLASS_FABRIC_SWITCH: &str = "0x068000";

/// The five documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SynthPlatform {
    /// TRN3 families.
    Trn3,
    /// TRN2 families.
    Trn2,
    /// Inf2.
    Inf2,
    /// Trn1 with network devices.
    Trn1,
    /// Trn1 without.
    Trn1NoNic,
}

impl SynthPlatform {
    /// The choice, in the order of topology-and-rings 2.1.
    pub fn choose(family: Family, has_nic: bool) -> Self {
        if family.is_trn3() {
            Self::Trn3
        } else if family.is_trn2() {
            Self::Trn2
        } else if family.is_inf2() {
            Self::Inf2
        } else if has_nic {
            Self::Trn1
        } else {
            Self::Trn1NoNic
        }
    }

    /// Accelerators behind one PCI switch. Not recorded: as many as there are per NIC (Trn1 has 8 NICs, Trn2 16).
    fn accelerators_per_switch(self) -> usize {
        match self {
            Self::Trn1 | Self::Trn1NoNic => 2,
            Self::Trn3 | Self::Trn2 | Self::Inf2 => 1,
        }
    }

    fn link_speed(self) -> &'static str {
        match self {
            Self::Trn3 | Self::Trn2 => "32 GT/s",
            Self::Inf2 | Self::Trn1 | Self::Trn1NoNic => "16 GT/s",
        }
    }
}

fn pci(busid: &str, class: &str, platform: SynthPlatform) -> XmlElement {
    XmlElement::new("pci")
        .with("busid", busid)
        .with("class", class)
        .with("link_speed", platform.link_speed())
        .with("link_width", 16)
}

/// The `<gpu>` of a rank.
pub(super) fn gpu(rank: &RankInfo, generation: u32) -> XmlElement {
    XmlElement::new("gpu")
        .with("dev", rank.neuron_dev)
        .with("sm", generation)
        .with("rank", rank.rank)
        .with("gdr", 1)
        .with("mla", rank.mla)
        .with("core", rank.core)
        .with("rid", rank.rid)
}

/// The `<net>` of a network device.
pub(super) fn net(nic: &NetDevice) -> XmlElement {
    XmlElement::new("net")
        .with("name", &nic.name)
        .with("dev", nic.dev)
        .with("speed", nic.speed)
        .with("port", nic.port)
        .with("guid", format!("0x{:x}", nic.guid))
        .with("maxconn", nic.max_comms)
        .with("gdr", u8::from(nic.gdr))
}

/// Ranks grouped by accelerator, cores ascending.
pub(super) fn by_accelerator<'a>(local: &[&'a RankInfo]) -> BTreeMap<i32, Vec<&'a RankInfo>> {
    let mut groups: BTreeMap<i32, Vec<&RankInfo>> = BTreeMap::new();
    for rank in local {
        groups.entry(rank.mla).or_default().push(rank);
    }
    for cores in groups.values_mut() {
        cores.sort_by_key(|r| (r.core, r.neuron_dev));
    }
    groups
}

/// Makes the document for the ranks of this node.
///
/// # Errors
/// [`TopoError::Machine`] if the host does not answer, [`TopoError::NoCpu`] if it names no NUMA node,
/// [`TopoError::BadAttribute`] if a NUMA node's CPU list cannot be read.
pub fn synthesize(machine: &dyn Machine, local: &[&RankInfo]) -> Result<XmlElement, TopoError> {
    let family = machine.family()?;
    let mut nics = machine.nics();
    nics.sort_by_key(|n| n.dev);
    let platform = SynthPlatform::choose(family, !nics.is_empty());
    let accelerators = by_accelerator(local);
    let mut numa = machine.numa_nodes()?;
    numa.sort_by_key(|n| n.id);
    let Some(first_numa) = numa.first().map(|n| n.id) else {
        return Err(TopoError::NoCpu);
    };
    // A device of an unknown NUMA node hangs under the first, as the original does with node -1.
    let known = |id: u32| {
        if numa.iter().any(|n| n.id == id) { id } else { first_numa }
    };

    let mut system = XmlElement::new("system").with("version", 1);
    let mut switches = 0usize;
    for node in &numa {
        let Some(mask) = CpuMask::from_list(&node.cpus) else {
            return Err(TopoError::BadAttribute {
                node: format!("cpu {}", node.id),
                attribute: "affinity",
                value: node.cpus.clone(),
                expected: "a CPU list such as 0-3,8 below 1024",
            });
        };
        let mut cpu = XmlElement::new("cpu")
            .with("numaid", node.id)
            .with("affinity", mask)
            .with("arch", "x86_64")
            .with("vendor", "GenuineIntel")
            .with("familyid", 6)
            .with("modelid", 106);
        let here: Vec<_> =
            accelerators.iter().filter(|(mla, _)| known(machine.device_numa(**mla)) == node.id).collect();
        let mut cards: Vec<(String, Vec<&NetDevice>)> = Vec::new();
        for nic in nics.iter().filter(|n| known(n.numa) == node.id) {
            let busid = nic.bdf.to_string();
            match cards.iter_mut().find(|(b, _)| *b == busid) {
                Some((_, ports)) => ports.push(nic),
                None => cards.push((busid, vec![nic])),
            }
        }
        let mut below: Vec<XmlElement> = Vec::new();
        for chunk in here.chunks(platform.accelerators_per_switch()) {
            switches += 1;
            // Synthetic switches live where no real device can, as in the documents AWS publishes.
            let busid = format!("ffff:{:02x}:{:02x}.0", 0xff - switches / 32, switches % 32);
            let mut switch = pci(&busid, CLASS_PCI_SWITCH, platform);
            for (mla, ranks) in chunk {
                let busid = machine.bdf(**mla)?.to_string();
                let mut accelerator = pci(&busid, CLASS_ACCELERATOR, platform);
                for (i, rank) in ranks.iter().enumerate() {
                    let mut gpu = gpu(rank, family.generation());
                    if i == 0 {
                        gpu.children = nvlinks(machine, **mla, family, &accelerators)?;
                    }
                    accelerator.children.push(gpu);
                }
                switch.children.push(accelerator);
            }
            below.push(switch);
        }
        let spread = below.len();
        for (i, (busid, ports)) in cards.iter().enumerate() {
            let mut card = pci(busid, CLASS_NIC, platform);
            let mut nic = XmlElement::new("nic");
            nic.children = ports.iter().map(|n| net(n)).collect();
            card.children.push(nic);
            match below.get_mut(i * spread / cards.len()) {
                Some(switch) if spread > 0 => switch.children.push(card),
                _ => below.push(card),
            }
        }
        cpu.children = below;
        system.children.push(cpu);
    }
    Ok(system)
}

/// The fast links of an accelerator to accelerators that carry ranks, and on switch-v1 to the switch.
fn nvlinks(
    machine: &dyn Machine,
    mla: i32,
    family: Family,
    accelerators: &BTreeMap<i32, Vec<&RankInfo>>,
) -> Result<Vec<XmlElement>, TopoError> {
    let link = |target: String, count: u32, class: &str| {
        XmlElement::new("nvlink").with("target", target).with("count", count).with("tclass", class)
    };
    let mut links = Vec::new();
    for port in 0..PORTS {
        if let Some(peer) = machine.peer_mla(mla, port)
            && peer != mla
            && accelerators.contains_key(&peer)
        {
            links.push(link(machine.bdf(peer)?.to_string(), 1, CLASS_ACCELERATOR));
        }
    }
    if family.is_switch_v1() {
        // Links per pod port: 2 on mariana (reverse-abi 7).
        links.push(link("fffe:00:00.0".to_string(), 2, CLASS_FABRIC_SWITCH));
    }
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::super::machine::TableMachine;
    use super::*;

    fn count(e: &XmlElement, name: &str) -> usize {
        usize::from(e.name == name) + e.children.iter().map(|c| count(c, name)).sum::<usize>()
    }

    #[test]
    fn platforms_are_tested_in_order() {
        for (family, nic, expected) in [
            (14, true, SynthPlatform::Trn3),
            (15, false, SynthPlatform::Trn3),
            (5, true, SynthPlatform::Trn2),
            (13, true, SynthPlatform::Trn2),
            (4, true, SynthPlatform::Inf2),
            (7, false, SynthPlatform::Inf2),
            (2, true, SynthPlatform::Trn1),
            (2, false, SynthPlatform::Trn1NoNic),
            (0, false, SynthPlatform::Trn1NoNic),
        ] {
            assert_eq!(SynthPlatform::choose(Family(family), nic), expected, "{family}");
        }
    }

    #[test]
    fn one_gpu_per_logical_core_with_a_rank() {
        for (family, n, vcore, nics, gpus, links) in [
            (2, 16, 1, 8, 32, 64),
            (5, 16, 2, 16, 64, 64),
            (5, 16, 1, 16, 128, 64),
            (4, 4, 1, 0, 8, 8),
            (15, 16, 2, 16, 64, 16),
            (5, 16, 2, 0, 3, 0),
        ] {
            let m = TableMachine::server(family, n, vcore, nics);
            let ranks = m.ranks(gpus, 1);
            let doc = synthesize(&m, &ranks.iter().collect::<Vec<_>>()).unwrap();
            assert_eq!(count(&doc, "gpu"), gpus as usize, "family {family}");
            assert_eq!(count(&doc, "net"), nics as usize, "family {family}");
            assert_eq!(count(&doc, "nvlink"), links, "family {family}");
            assert_eq!(count(&doc, "cpu"), 2, "family {family}");
        }
    }
}
