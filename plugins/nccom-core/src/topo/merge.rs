//! A loaded document meets this run: ranks and network devices are written into it, and what no rank uses is dropped.
//!
//! Owns: what the original calls "add PCI / NIC details where the host offers them" and the trimming of the DOM.
//! A published document often has neither `<gpu>` nor `<net>` (AWS's have none); a dumped one has both, of another run.

use super::error::TopoError;
use super::machine::{Bdf, Machine, NetDevice, RankInfo};
use super::synth::{self, CLASS_ACCELERATOR, CLASS_NIC};
use super::xml::XmlElement;

fn same_bus(element: &XmlElement, bdf: Bdf) -> bool {
    element.get("busid").and_then(Bdf::parse) == Some(bdf)
}

fn find_pci(root: &mut XmlElement, bdf: Bdf) -> Option<&mut XmlElement> {
    if root.name == "pci" && same_bus(root, bdf) {
        return Some(root);
    }
    root.children.iter_mut().find_map(|c| find_pci(c, bdf))
}

/// The `<pci>` of an address; if the document has none, a new one under the CPU of its NUMA node, or the first CPU.
fn pci_at<'a>(system: &'a mut XmlElement, bdf: Bdf, numa: u32, class: &str) -> Result<&'a mut XmlElement, TopoError> {
    if find_pci(system, bdf).is_none() {
        let numa = numa.to_string();
        let of_numa = system.children.iter().position(|c| c.name == "cpu" && c.get("numaid") == Some(numa.as_str()));
        let first = system.children.iter().position(|c| c.name == "cpu");
        let cpu = of_numa.or(first).and_then(|i| system.children.get_mut(i)).ok_or(TopoError::NoCpu)?;
        cpu.children.push(XmlElement::new("pci").with("busid", bdf).with("class", class));
    }
    find_pci(system, bdf).ok_or(TopoError::NoCpu)
}

fn for_each(root: &mut XmlElement, f: &mut dyn FnMut(&mut XmlElement)) {
    f(root);
    for child in &mut root.children {
        for_each(child, f);
    }
}

/// Writes the local ranks into the document. A gpu of the document that is no local rank's loses its rank.
pub fn put_ranks(system: &mut XmlElement, machine: &dyn Machine, local: &[&RankInfo]) -> Result<(), TopoError> {
    for_each(system, &mut |e| {
        // Not removed: the attribute keeps its place, so that a dump read back is dumped the same.
        if e.name == "gpu" && e.get("rank").is_some() {
            e.set("rank", -1);
        }
    });
    let generation = machine.family()?.generation();
    for (mla, ranks) in synth::by_accelerator(local) {
        let bdf = machine.bdf(mla)?;
        let pci = pci_at(system, bdf, machine.device_numa(mla), CLASS_ACCELERATOR)?;
        let several = ranks.len() > 1;
        for rank in ranks {
            let dev = rank.neuron_dev.to_string();
            let by_dev = pci.children.iter().position(|c| c.name == "gpu" && c.get("dev") == Some(dev.as_str()));
            // A lone gpu is this accelerator whatever number the document gave it.
            let lone = (!several && pci.children_named("gpu").count() == 1)
                .then(|| pci.children.iter().position(|c| c.name == "gpu"))
                .flatten();
            let fresh = synth::gpu(rank, generation);
            match by_dev.or(lone).and_then(|i| pci.children.get_mut(i)) {
                Some(gpu) => {
                    for name in ["dev", "rank", "mla", "core", "rid"] {
                        if let Some(value) = fresh.get(name) {
                            gpu.set(name, value);
                        }
                    }
                }
                None => pci.children.push(fresh),
            }
        }
    }
    Ok(())
}

/// Writes the plug-in's network devices into the document and drops the document's others: a device that no plug-in
/// offers cannot be used. Without any device the document's own are kept, so that a document can be studied alone.
pub fn put_nets(system: &mut XmlElement, nics: &[NetDevice]) -> Result<(), TopoError> {
    if nics.is_empty() {
        return Ok(());
    }
    for_each(system, &mut |e| e.children.retain(|c| c.name != "net"));
    for nic in nics {
        let pci = pci_at(system, nic.bdf, nic.numa, CLASS_NIC)?;
        if pci.children_named("nic").next().is_none() {
            pci.children.push(XmlElement::new("nic"));
        }
        if let Some(holder) = pci.children.iter_mut().find(|c| c.name == "nic") {
            holder.children.push(synth::net(nic));
        }
    }
    Ok(())
}

/// Whether a `<gpu>` is some rank's.
pub(super) fn has_rank(gpu: &XmlElement) -> bool {
    gpu.get("rank").is_some_and(|r| !r.trim_start().starts_with('-'))
}

/// Drops what leads to no rank and to no network device.
pub fn drop_unused(element: &mut XmlElement) -> bool {
    match element.name.as_str() {
        "gpu" => return has_rank(element),
        "net" => return true,
        "system" | "cpu" | "pci" | "nic" => {}
        // Not ours to judge: unknown elements stay where their parent stays.
        _ => return false,
    }
    let mut used = false;
    let schema = |c: &XmlElement| matches!(c.name.as_str(), "cpu" | "pci" | "nic" | "net" | "gpu");
    element.children.retain_mut(|c| {
        let keep = drop_unused(c);
        used |= keep;
        keep || !schema(c)
    });
    used
}
