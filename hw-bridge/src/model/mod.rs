//! Device model: what the runtime answers when it is asked about the machine (reverse-abi.md §3, §4, §7).
//!
//! | room | owns |
//! |---|---|
//! | `silicon` | families, sizes, architectures, silicon facts, core-type numberings |
//! | `config` | what server to model, from data or variables; the errors |
//! | `info` | instance info and runtime version |
//! | `pci` | PCI addresses, NICs |
//! | `wiring` | accelerator links, port remap |
//! | `maps` | accelerator index ↔ routing id ↔ port maps of a local device |
//! | `pod` | pods of servers |
//! | `dynamic` | per-peer counts of variable-length collectives |
//! | `register` | increment registers |
//!
//! [`DeviceModel`] is immutable and validated: after [`DeviceModel::new`] its facts never change and never contradict
//! one another, so it is shared between threads and tenants without locks. What tenants change lives outside it:
//! [`IdMapSet`], [`HostMem`], [`IncrementRegister`].
//!
//! Words: a *device* or accelerator is one Neuron chip; `nec_dev_id` is the id `nec_get_device_count` lists, always 0,
//! 1, … here, and equals the accelerator index (`mla_idx`); `host_device_id` is the driver's absolute id; a *rid* is
//! the routing id; a *logical core* fuses `virtual_core_size` physical cores and carries at most one rank.

mod config;
mod dynamic;
mod info;
mod maps;
mod pci;
mod pod;
mod register;
mod silicon;
mod wiring;

use std::collections::{BTreeMap, BTreeSet};

pub use config::{
    DEVICE_COUNT, DeviceConfig, DeviceError, FAKE_INSTANCE_TYPE, LOGICAL_NC_CONFIG, MAX_LOGICAL_CORES, MAX_NICS,
    MAX_SERVER_ID, NUM_CORES, RoutingTable, VIRTUAL_CORE_SIZE, VISIBLE_CORES, virtual_core_size,
};
pub use dynamic::{
    DynSizeError, HostMem, MAX_DYNAMIC_RANKS, enc_get_recv_post_offset_bytes, enc_get_send_count_size_bytes,
    enc_get_send_offset_bytes, enc_set_recv_size_bytes,
};
pub use info::{ARCH_NAME_MAX, DEVICE_REVISION_MAX, InstanceInfo, NRT_VERSION, NrtVersion};
pub use maps::{
    DeviceIdMaps, IdMapSet, MAX_MLA_DEVICES, MLA_ABSENT, MapError, MapFault, NEC_MAX_DEVICES, NEC_NET_MLA_DEV,
    NEC_UNKNOWN_MLA_DEV, PEER_NOT_CONNECTED, PORT_UNCONNECTED, PORTS_PER_MLA, RID_INDEX_MASK, RID_SERVER_SHIFT,
    RID_UNMAPPED,
};
pub use pci::{Bdf, Nic};
pub use pod::{PodConfig, PodError, PodType, SWITCH_POD_NODES};
pub use register::{IncrementRegister, StoreTarget, nec_inc_semaphore};
pub use silicon::{Arch, CoreType, CoreTypeError, Family, Numbering, Size, identify_product};
pub use wiring::{Fabric, PortPeers, PortRemap, Wiring};

/// One accelerator of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Id that `nec_get_device_count` lists; also the accelerator index.
    pub nec_dev_id: i32,
    /// Absolute id the driver gives it.
    pub host_device_id: i32,
    /// Routing id, on switch-v1 with the server part.
    pub rid: i32,
    /// PCI address.
    pub bdf: Bdf,
    /// NUMA node.
    pub numa: u32,
}

/// Where a rank runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CorePlace {
    /// The device.
    pub nec_dev_id: i32,
    /// Its accelerator index.
    pub mla_idx: i32,
    /// Its absolute id.
    pub host_device_id: i32,
    /// Its routing id, on switch-v1 with the server part.
    pub rid: i32,
    /// Its NUMA node.
    pub numa: u32,
    /// Logical core on the device (`tpb_idx`).
    pub core: u32,
    /// Logical core on the server.
    pub logical_core: u32,
}

/// The modelled server.
#[derive(Clone, Debug)]
pub struct DeviceModel {
    family: Family,
    size: Size,
    arch: Arch,
    cores_per_device: u32,
    virtual_core_size: u32,
    device_ids: Vec<i32>,
    devices: Vec<Device>,
    numa_nodes: u32,
    nics: Vec<Nic>,
    visible_cores: Vec<u32>,
    fabric: Fabric,
    pod: PodConfig,
    info: InstanceInfo,
}

impl DeviceModel {
    /// Makes the model, or says what of the configuration cannot be.
    ///
    /// # Errors
    /// [`DeviceError`]; all of them are NRT_INVALID to a caller of the runtime.
    pub fn new(config: DeviceConfig) -> Result<DeviceModel, DeviceError> {
        let family = config.family;
        let not_modelled = || DeviceError::FamilyNotModelled { family: family.name(), known: Family::modelled_names() };
        let arch = family.arch().ok_or_else(not_modelled)?;
        let count = config.device_count.unwrap_or_else(|| config.default_device_count());
        let max = family.max_devices();
        if count == 0 || count > max {
            return Err(DeviceError::DeviceCount { count, family: family.name(), max });
        }
        let cores_per_device = config.cores_per_device.unwrap_or(arch.cores_per_device());
        let max = arch.cores_per_device();
        if cores_per_device == 0 || cores_per_device > max {
            return Err(DeviceError::CoresPerDevice { cores: cores_per_device, arch: arch.name(), max });
        }
        let virtual_core_size =
            virtual_core_size(arch, cores_per_device, config.logical_nc_config, config.virtual_core_size)?;
        let total = cores_per_device * count / virtual_core_size;
        let visible_cores = visible_cores(&config, total)?;
        config.pod.validate().map_err(DeviceError::Pod)?;
        let numa_nodes = match config.numa_nodes {
            Some(0) => {
                return Err(bad_field("numa_nodes", 0, "a server has at least one NUMA node"));
            }
            Some(nodes) => nodes,
            None => 2.min(config.default_device_count().max(count)),
        };
        let (devices, routing) = devices(&config, count, numa_nodes)?;
        let nics = nics(&config, &devices, numa_nodes)?;
        let fabric = Fabric::new(family, config.server_id, routing, &config.wiring, config.port_remap)?;
        Ok(DeviceModel {
            family,
            size: config.size,
            arch,
            cores_per_device,
            virtual_core_size,
            device_ids: devices.iter().map(|d| d.nec_dev_id).collect(),
            devices,
            numa_nodes,
            nics,
            visible_cores,
            fabric,
            pod: config.pod,
            info: InstanceInfo::new(family, config.size, arch, config.hardware_revision),
        })
    }

    /// Instance family.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Instance size.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Silicon.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// What `nrt_get_instance_info` answers.
    pub fn instance_info(&self) -> &InstanceInfo {
        &self.info
    }

    /// What `nrt_get_version` answers.
    pub fn version(&self) -> NrtVersion {
        NRT_VERSION
    }

    /// Accelerators in the fabric (INV-15).
    pub fn max_devices(&self) -> u32 {
        self.family.max_devices()
    }

    /// Folds of a mesh (INV-15).
    pub fn max_mesh_folds(&self) -> u32 {
        self.family.max_mesh_folds()
    }

    /// Physical cores of an accelerator.
    pub fn cores_per_device(&self) -> u32 {
        self.cores_per_device
    }

    /// Physical cores of a logical core (`nec_get_virtual_core_size`).
    pub fn virtual_core_size(&self) -> u32 {
        self.virtual_core_size
    }

    /// Logical cores of an accelerator: the workers of the virtual inference layout (reverse-abi.md §4.4).
    pub fn logical_cores_per_device(&self) -> u32 {
        self.cores_per_device / self.virtual_core_size
    }

    /// Logical cores of the server (`nrt_get_total_vnc_count`).
    pub fn total_vnc_count(&self) -> u32 {
        self.cores_per_device * self.device_count() / self.virtual_core_size
    }

    /// Physical cores `L·size … L·size + size − 1` of logical core `L` of a device.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchCore`] if a device has no such logical core.
    pub fn physical_cores(&self, core: u32) -> Result<std::ops::Range<u32>, DeviceError> {
        let total = self.logical_cores_per_device();
        if core >= total {
            return Err(DeviceError::NoSuchCore { core, total });
        }
        let first = core * self.virtual_core_size;
        Ok(first..first + self.virtual_core_size)
    }

    /// Accelerators of the server.
    pub fn device_count(&self) -> u32 {
        self.devices.len() as u32
    }

    /// Ids of the accelerators (`nec_get_device_count`).
    pub fn available_devices(&self) -> &[i32] {
        &self.device_ids
    }

    /// The accelerators.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// An accelerator by id.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchDevice`].
    pub fn device(&self, nec_dev_id: i32) -> Result<&Device, DeviceError> {
        let position = usize::try_from(nec_dev_id).ok();
        position.and_then(|p| self.devices.get(p)).ok_or(DeviceError::NoSuchDevice { nec_dev_id })
    }

    /// PCI address of an accelerator (`nec_get_device_pci_bdf`).
    ///
    /// # Errors
    /// [`DeviceError::NoSuchDevice`].
    pub fn device_pci_bdf(&self, nec_dev_id: i32) -> Result<Bdf, DeviceError> {
        Ok(self.device(nec_dev_id)?.bdf)
    }

    /// NUMA node of an accelerator.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchDevice`].
    pub fn device_numa(&self, nec_dev_id: i32) -> Result<u32, DeviceError> {
        Ok(self.device(nec_dev_id)?.numa)
    }

    /// NUMA nodes of the server, at least 1.
    pub fn numa_node_count(&self) -> u32 {
        self.numa_nodes
    }

    /// NICs of the server.
    pub fn nics(&self) -> &[Nic] {
        &self.nics
    }

    /// Links, id table and port remap.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// The server's place in its pod.
    pub fn pod(&self) -> &PodConfig {
        &self.pod
    }

    /// `nec_get_p2p_pod_peer_node`: the node at a distance along a pod port of a device.
    ///
    /// # Errors
    /// [`PodError::NoSuchDevice`], and those of [`PodConfig::p2p_peer_node`].
    pub fn p2p_pod_peer_node(&self, nec_dev_id: u32, node: i32, port_distance: u32) -> Result<i32, PodError> {
        if nec_dev_id >= self.device_count() {
            return Err(PodError::NoSuchDevice { nec_dev_id });
        }
        self.pod.p2p_peer_node(node, port_distance)
    }

    /// `nec_pod_node_can_access_peer_node`. See [`PodConfig::can_access_peer_node`].
    ///
    /// # Errors
    /// [`PodError::InvalidType`], [`PodError::InvalidNode`].
    pub fn pod_node_can_access_peer_node(
        &self,
        pod_type: PodType,
        local_rid: u32,
        local_node_id: u32,
        remote_rid: u32,
        remote_node_id: u32,
    ) -> Result<bool, PodError> {
        self.pod.can_access_peer_node(pod_type, local_rid, local_node_id, remote_rid, remote_node_id)
    }

    /// The logical cores this process may use, in the order given: NEURON_RT_VISIBLE_CORES, else the first
    /// NEURON_RT_NUM_CORES, else all.
    pub fn visible_cores(&self) -> &[u32] {
        &self.visible_cores
    }

    /// Where a logical core of the server is.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchCore`].
    pub fn core_place(&self, logical_core: u32) -> Result<CorePlace, DeviceError> {
        let no_such_core = DeviceError::NoSuchCore { core: logical_core, total: self.total_vnc_count() };
        let per_device = self.logical_cores_per_device();
        let position = usize::try_from(logical_core / per_device).ok();
        let device = position.and_then(|p| self.devices.get(p)).ok_or(no_such_core)?;
        Ok(CorePlace {
            nec_dev_id: device.nec_dev_id,
            mla_idx: device.nec_dev_id,
            host_device_id: device.host_device_id,
            rid: device.rid,
            numa: device.numa,
            core: logical_core % per_device,
            logical_core,
        })
    }

    /// Where rank `rank` of the `nranks` ranks of this server runs.
    ///
    /// The ranks share the first 1, 4, 8 or 16 accelerators, the only sets that the library's topology check accepts
    /// (INV-43), in blocks of consecutive ranks whose lengths differ by at most one, and no accelerator of the set
    /// stays empty. One accelerator if they fit, else four, else the largest set of the server, else eight.
    ///
    /// # Errors
    /// [`DeviceError::RankOutOfRange`], [`DeviceError::NotEnoughCores`], [`DeviceError::NoDeviceSet`].
    pub fn place(&self, rank: u32, nranks: u32) -> Result<CorePlace, DeviceError> {
        if rank >= nranks {
            return Err(DeviceError::RankOutOfRange { rank, nranks });
        }
        let used = self.placement_devices(nranks)?;
        // rank < nranks ≤ 256 and used ≤ 16: nothing overflows. Block d starts at the first rank with rank·used/nranks
        // = d.
        let block = rank * used / nranks;
        let first = (block * nranks).div_ceil(used);
        self.core_place(block * self.logical_cores_per_device() + (rank - first))
    }

    /// How many accelerators `nranks` ranks use: 1, 4, 8 or 16.
    ///
    /// # Errors
    /// [`DeviceError::NotEnoughCores`], [`DeviceError::NoDeviceSet`].
    pub fn placement_devices(&self, nranks: u32) -> Result<u32, DeviceError> {
        let (devices, per_device, total) =
            (self.device_count(), self.logical_cores_per_device(), self.total_vnc_count());
        if nranks > total {
            return Err(DeviceError::NotEnoughCores { nranks, total, devices, per_device });
        }
        let largest = [16, 8, 4].into_iter().find(|set| *set <= devices).unwrap_or(1);
        [1, 4, largest, 8]
            .into_iter()
            .find(|set| *set <= devices && nranks <= set * per_device && nranks >= *set)
            .ok_or(DeviceError::NoDeviceSet { nranks, devices, per_device })
    }
}

fn bad_field(field: &'static str, index: usize, reason: &'static str) -> DeviceError {
    DeviceError::BadField { field, index, reason }
}

fn visible_cores(config: &DeviceConfig, total: u32) -> Result<Vec<u32>, DeviceError> {
    let Some(cores) = &config.visible_cores else {
        let wanted = config.num_cores.unwrap_or(total);
        if wanted == 0 || wanted > total {
            let core = wanted.saturating_sub(1);
            return Err(DeviceError::CoreOutOfRange { name: NUM_CORES, core, total });
        }
        return Ok((0..wanted).collect());
    };
    if cores.is_empty() {
        return Err(bad_field("visible_cores", 0, "the list is empty"));
    }
    let mut seen = BTreeSet::new();
    for (index, &core) in cores.iter().enumerate() {
        if core >= total {
            return Err(DeviceError::CoreOutOfRange { name: VISIBLE_CORES, core, total });
        }
        if !seen.insert(core) {
            return Err(bad_field("visible_cores", index, "the core is listed twice"));
        }
    }
    Ok(cores.clone())
}

/// A per-device list of the configuration, if given, must have one entry for each device.
fn per_device<'a, T>(
    field: &'static str,
    list: &'a Option<Vec<T>>,
    count: usize,
) -> Result<Option<&'a [T]>, DeviceError> {
    match list {
        Some(list) if list.len() != count => Err(DeviceError::ListLength { field, given: list.len(), expected: count }),
        list => Ok(list.as_deref()),
    }
}

type DevicesAndRouting = (Vec<Device>, Option<BTreeMap<i32, i32>>);

fn devices(config: &DeviceConfig, count: u32, numa_nodes: u32) -> Result<DevicesAndRouting, DeviceError> {
    if config.server_id > MAX_SERVER_ID {
        return Err(bad_field(
            "server_id",
            0,
            "it does not fit a routing id together with the accelerator's four bits",
        ));
    }
    let n = count as usize;
    let hosts = per_device("host_device_ids", &config.host_device_ids, n)?;
    let bdfs = per_device("bdfs", &config.bdfs, n)?;
    let numas = per_device("device_numa", &config.device_numa, n)?;
    let table = match &config.routing {
        RoutingTable::Table(pairs) => {
            let table: BTreeMap<i32, i32> = pairs.iter().copied().collect();
            if table.len() != pairs.len() {
                return Err(bad_field("routing", 0, "a host device id is listed twice"));
            }
            Some(table)
        }
        RoutingTable::Family | RoutingTable::Absent => None,
    };
    // A server of which only some accelerators are modelled keeps its NUMA layout.
    let full = config.default_device_count().max(count);
    let base = if config.family.is_switch_v1() { config.server_id << RID_SERVER_SHIFT } else { 0 };
    let (mut rids, mut host_ids, mut addresses) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut devices = Vec::with_capacity(n);
    for (index, position) in (0..count).enumerate() {
        let host_device_id = hosts.map_or(position as i32, |list| list[index]);
        if !host_ids.insert(host_device_id) {
            return Err(bad_field("host_device_ids", index, "the id is listed twice"));
        }
        let rid = match &table {
            Some(table) => *table
                .get(&host_device_id)
                .ok_or_else(|| bad_field("routing", index, "the table does not list this device's host id"))?,
            None => i32::try_from(base + position)
                .map_err(|_| bad_field("server_id", 0, "the routing ids of its accelerators do not fit an int"))?,
        };
        let in_range = if config.family.is_switch_v1() {
            rid >= 0
        } else {
            u32::try_from(rid).is_ok_and(|r| r < config.family.max_devices())
        };
        if !in_range {
            return Err(bad_field("routing", index, "the routing id is out of range for the family"));
        }
        if !rids.insert(rid) {
            return Err(bad_field("routing", index, "another device has the same routing id"));
        }
        let bdf = bdfs.map_or(pci::default_device_bdf(position), |list| list[index]);
        if !bdf.is_valid() || !addresses.insert(bdf) {
            return Err(bad_field("bdfs", index, "the address is out of range or another device has it"));
        }
        let numa = numas.map_or_else(|| (position * numa_nodes.min(full)) / full, |list| list[index]);
        if numa >= numa_nodes {
            return Err(bad_field("device_numa", index, "the server has no such NUMA node"));
        }
        devices.push(Device { nec_dev_id: position as i32, host_device_id, rid, bdf, numa });
    }
    let routing = match config.routing {
        RoutingTable::Absent => None,
        RoutingTable::Table(_) => table,
        RoutingTable::Family => Some(devices.iter().map(|d| (d.host_device_id, d.rid)).collect()),
    };
    Ok((devices, routing))
}

fn nics(config: &DeviceConfig, devices: &[Device], numa_nodes: u32) -> Result<Vec<Nic>, DeviceError> {
    let nics = match &config.nics {
        Some(nics) => nics.clone(),
        None => {
            // A part of a server has its part of the NICs, and at least one if the server has any.
            let (full_nics, speed) = config.default_nics();
            let count = (full_nics * devices.len() as u32).div_ceil(16).min(devices.len() as u32);
            let numa: Vec<u32> = devices.iter().map(|d| d.numa).collect();
            pci::default_nics(count, speed, config.server_id, &numa)
        }
    };
    if nics.len() > MAX_NICS {
        return Err(bad_field("nics", MAX_NICS, "a server has at most 64 NICs"));
    }
    let mut addresses: BTreeSet<Bdf> = devices.iter().map(|d| d.bdf).collect();
    let mut names = BTreeSet::new();
    for (index, nic) in nics.iter().enumerate() {
        let reason = if !nic.bdf.is_valid() || !addresses.insert(nic.bdf) {
            "the PCI address is out of range or taken"
        } else if nic.name.is_empty() || !names.insert(nic.name.as_str()) {
            "the name is empty or taken"
        } else if nic.numa >= numa_nodes {
            "the server has no such NUMA node"
        } else {
            continue;
        };
        return Err(bad_field("nics", index, reason));
    }
    Ok(nics)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(config: DeviceConfig) -> DeviceModel {
        DeviceModel::new(config).unwrap()
    }

    fn from(vars: &[(&str, &str)]) -> Result<DeviceModel, DeviceError> {
        let look_up = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into());
        DeviceModel::new(DeviceConfig::from_vars(look_up)?)
    }

    fn refused(change: impl FnOnce(&mut DeviceConfig)) -> DeviceError {
        let mut config = DeviceConfig::default();
        change(&mut config);
        DeviceModel::new(config).unwrap_err()
    }

    #[test]
    fn the_default_is_a_trn2_with_eight_logical_cores_per_device() {
        let m = model(DeviceConfig::default());
        assert_eq!((m.family(), m.size(), m.arch()), (Family::Trn2, Size::Xl48, Arch::Cayman));
        assert_eq!((m.device_count(), m.cores_per_device(), m.virtual_core_size()), (16, 8, 1));
        assert_eq!((m.logical_cores_per_device(), m.total_vnc_count()), (8, 128));
        assert_eq!(m.available_devices(), (0..16).collect::<Vec<i32>>());
        assert_eq!((m.nics().len(), m.numa_node_count()), (16, 2));
        assert_eq!(m.visible_cores().len(), 128);
        let info = m.instance_info();
        assert_eq!((info.family.number(), info.size.number(), info.arch_name.as_str()), (5, 7, "cayman"));
        assert_eq!(m.version(), NRT_VERSION);
    }

    #[test]
    fn servers_have_their_family_s_shape() {
        let shape = |kind: &str| {
            let m = from(&[(FAKE_INSTANCE_TYPE, kind)]).unwrap();
            (m.device_count(), m.virtual_core_size(), m.total_vnc_count(), m.nics().len(), m.numa_node_count())
        };
        assert_eq!(shape("trn1.32xlarge"), (16, 1, 32, 8, 2));
        assert_eq!(shape("trn1n.32xlarge"), (16, 1, 32, 16, 2));
        assert_eq!(shape("trn1.2xlarge"), (1, 1, 2, 1, 1));
        assert_eq!(shape("inf2.48xlarge"), (12, 1, 24, 0, 2));
        assert_eq!(shape("inf2.24xlarge"), (6, 1, 12, 0, 2));
        assert_eq!(shape("inf2.xlarge"), (1, 1, 2, 0, 1));
        assert_eq!(shape("trn2.48xlarge"), (16, 2, 64, 16, 2));
        assert_eq!(shape("trn2.3xlarge"), (1, 2, 4, 1, 1));
        assert_eq!(shape("trn3.48xlarge"), (16, 2, 64, 16, 2));
        assert_eq!(shape("trn3pds98.48xlarge"), (16, 2, 64, 16, 2));
        let speed = |kind: &str| from(&[(FAKE_INSTANCE_TYPE, kind)]).unwrap().nics()[0].speed_mbps;
        assert_eq!(["trn1", "trn2", "trn3"].map(speed), [100_000, 200_000, 400_000]);
        assert!(matches!(from(&[(FAKE_INSTANCE_TYPE, "inf1.xlarge")]), Err(DeviceError::FamilyNotModelled { .. })));
        assert!(matches!(from(&[(FAKE_INSTANCE_TYPE, "0.7")]), Err(DeviceError::FamilyNotModelled { .. })));
    }

    /// Proves INV-15.
    #[test]
    fn the_model_sizes_its_fabric_by_family_at_run_time() {
        let ask = |kind: &str, count: &str| from(&[(FAKE_INSTANCE_TYPE, kind), (DEVICE_COUNT, count)]);
        let switch = ask("trn3pds98.48xlarge", "32").unwrap();
        assert_eq!((switch.device_count(), switch.max_devices(), switch.max_mesh_folds()), (32, 32, 16));
        assert!(matches!(ask("trn3pds98.48xlarge", "33"), Err(DeviceError::DeviceCount { max: 32, .. })));
        for kind in ["trn1.32xlarge", "inf2.48xlarge", "trn2.48xlarge", "trn3.48xlarge"] {
            let m = ask(kind, "16").unwrap();
            assert_eq!((m.max_devices(), m.max_mesh_folds()), (16, 8), "{kind}");
            assert!(matches!(ask(kind, "17"), Err(DeviceError::DeviceCount { count: 17, max: 16, .. })), "{kind}");
        }
        // Thirty-two routing ids reach into a second server id; none is given twice.
        let rids: BTreeSet<i32> = switch.devices().iter().map(|d| d.rid).collect();
        assert_eq!(rids, (0..32).collect());
    }

    #[test]
    fn logical_cores_cover_their_physical_cores() {
        let m = from(&[(FAKE_INSTANCE_TYPE, "trn2.48xlarge")]).unwrap();
        assert_eq!([0, 1, 3].map(|core| m.physical_cores(core)), [Ok(0..2), Ok(2..4), Ok(6..8)]);
        assert_eq!(m.physical_cores(4), Err(DeviceError::NoSuchCore { core: 4, total: 4 }));
        let place = m.core_place(4 * 3 + 1).unwrap();
        assert_eq!((place.nec_dev_id, place.core, place.rid, place.logical_core), (3, 1, 3, 13));
        assert_eq!(m.core_place(64), Err(DeviceError::NoSuchCore { core: 64, total: 64 }));
        assert!(m.core_place(u32::MAX).is_err());
    }

    #[test]
    fn bad_core_sizes_and_counts_are_refused() {
        assert!(matches!(from(&[(LOGICAL_NC_CONFIG, "4")]), Err(DeviceError::VirtualCoreSizeCap { size: 4, .. })));
        assert!(matches!(from(&[(LOGICAL_NC_CONFIG, "3")]), Err(DeviceError::VirtualCoreSize { size: 3, .. })));
        assert!(matches!(from(&[(DEVICE_COUNT, "0")]), Err(DeviceError::DeviceCount { count: 0, .. })));
        assert!(matches!(refused(|c| c.cores_per_device = Some(9)), DeviceError::CoresPerDevice { max: 8, .. }));
        assert!(matches!(refused(|c| c.cores_per_device = Some(0)), DeviceError::CoresPerDevice { .. }));
        let one_core = DeviceConfig { cores_per_device: Some(1), ..DeviceConfig::of(Family::Trn2, Size::Xl48) };
        assert_eq!(model(one_core).virtual_core_size(), 1);
        assert_eq!(
            from(&[(DEVICE_COUNT, "40")]).unwrap_err().to_string(),
            "a TRN2 server with 40 accelerators cannot be modelled, expected 1 to 16; correct NEURON_DEVICE_COUNT or \
             device_count"
        );
    }

    #[test]
    fn core_selection_is_validated_against_the_server() {
        assert_eq!(from(&[(VISIBLE_CORES, "4-6,0")]).unwrap().visible_cores(), [4, 5, 6, 0]);
        assert_eq!(from(&[(NUM_CORES, "3")]).unwrap().visible_cores(), [0, 1, 2]);
        // The list goes before the number.
        assert_eq!(from(&[(NUM_CORES, "3"), (VISIBLE_CORES, "9")]).unwrap().visible_cores(), [9]);
        assert_eq!(
            from(&[(VISIBLE_CORES, "0,128")]).unwrap_err().to_string(),
            "NEURON_RT_VISIBLE_CORES asks for core 128, but the server has logical cores 0 to 127; lower it, or use a \
             larger instance"
        );
        assert!(matches!(from(&[(NUM_CORES, "129")]), Err(DeviceError::CoreOutOfRange { core: 128, total: 128, .. })));
        assert!(matches!(refused(|c| c.visible_cores = Some(vec![])), DeviceError::BadField { .. }));
        assert!(matches!(refused(|c| c.visible_cores = Some(vec![1, 1])), DeviceError::BadField { index: 1, .. }));
    }

    #[test]
    fn addresses_and_numa_nodes_are_distinct_and_deterministic() {
        for family in Family::ALL.into_iter().filter(|f| f.arch().is_some()) {
            let config =
                DeviceConfig { device_count: Some(family.max_devices()), ..DeviceConfig::of(family, Size::Xl48) };
            let m = model(config.clone());
            let devices = m.devices().iter().map(|d| d.bdf);
            let all: BTreeSet<Bdf> = devices.chain(m.nics().iter().map(|n| n.bdf)).collect();
            assert_eq!(all.len(), m.devices().len() + m.nics().len(), "{}", family.name());
            assert_eq!(model(config).devices(), m.devices());
        }
        let m = model(DeviceConfig::default());
        assert_eq!(m.device_pci_bdf(1).unwrap().to_string(), "0000:14:1e.0");
        assert_eq!((m.device_numa(7), m.device_numa(8)), (Ok(0), Ok(1)));
        assert_eq!(m.device_pci_bdf(16), Err(DeviceError::NoSuchDevice { nec_dev_id: 16 }));
        assert_eq!(m.device_pci_bdf(-1), Err(DeviceError::NoSuchDevice { nec_dev_id: -1 }));
        // Half a server is the first half of the whole one.
        let half = model(DeviceConfig { device_count: Some(8), ..DeviceConfig::default() });
        assert_eq!(half.devices(), &m.devices()[..8]);
        assert_eq!(half.nics().len(), 8);
    }

    #[test]
    fn every_table_can_be_configured_and_is_checked() {
        let nic = |name: &str, bus: u32| Nic {
            name: name.to_owned(),
            bdf: Bdf { domain: 1, bus, slot: 0, func: 0 },
            numa: 0,
            speed_mbps: 400_000,
            guid: 7,
        };
        let config = DeviceConfig {
            device_count: Some(2),
            host_device_ids: Some(vec![8, 5]),
            routing: RoutingTable::Table(vec![(5, 3), (8, 2), (9, 1)]),
            bdfs: Some(vec![Bdf { domain: 1, bus: 2, slot: 3, func: 4 }, Bdf { domain: 1, bus: 2, slot: 3, func: 5 }]),
            numa_nodes: Some(4),
            device_numa: Some(vec![3, 1]),
            nics: Some(vec![nic("a", 7)]),
            ..DeviceConfig::default()
        };
        let m = model(config.clone());
        let facts: Vec<_> = m.devices().iter().map(|d| (d.host_device_id, d.rid, d.numa, d.bdf.func)).collect();
        assert_eq!(facts, [(8, 2, 3, 4), (5, 3, 1, 5)]);
        assert_eq!(m.fabric().host_to_rid().unwrap().get(&9), Some(&1));
        assert_eq!((m.nics().len(), m.nics()[0].name.as_str()), (1, "a"));

        let field = |change: &dyn Fn(&mut DeviceConfig)| {
            let mut config = config.clone();
            change(&mut config);
            match DeviceModel::new(config).unwrap_err() {
                DeviceError::BadField { field, index, .. } => (field, index),
                DeviceError::ListLength { field, given, expected: 2 } => (field, given),
                other => panic!("{other}"),
            }
        };
        assert_eq!(field(&|c| c.host_device_ids = Some(vec![1])), ("host_device_ids", 1));
        assert_eq!(field(&|c| c.host_device_ids = Some(vec![8, 8])), ("host_device_ids", 1));
        assert_eq!(field(&|c| c.host_device_ids = Some(vec![8, 4])), ("routing", 1));
        assert_eq!(field(&|c| c.routing = RoutingTable::Table(vec![(8, 1), (5, 1)])), ("routing", 1));
        assert_eq!(field(&|c| c.routing = RoutingTable::Table(vec![(8, 16), (5, 1)])), ("routing", 0));
        assert_eq!(field(&|c| c.routing = RoutingTable::Table(vec![(8, -1), (5, 1)])), ("routing", 0));
        assert_eq!(field(&|c| c.routing = RoutingTable::Table(vec![(8, 1), (8, 2)])), ("routing", 0));
        assert_eq!(field(&|c| c.bdfs = Some(vec![Bdf { domain: 0, bus: 0, slot: 0, func: 0 }; 2])), ("bdfs", 1));
        assert_eq!(field(&|c| c.bdfs = Some(vec![Bdf { domain: 0, bus: 0, slot: 32, func: 0 }; 2])), ("bdfs", 0));
        assert_eq!(field(&|c| c.device_numa = Some(vec![0, 4])), ("device_numa", 1));
        assert_eq!(field(&|c| c.numa_nodes = Some(0)), ("numa_nodes", 0));
        assert_eq!(field(&|c| c.nics = Some(vec![nic("a", 7), nic("a", 8)])), ("nics", 1));
        assert_eq!(field(&|c| c.nics = Some(vec![nic("a", 7), nic("b", 7)])), ("nics", 1));
        assert_eq!(field(&|c| c.nics = Some(vec![Nic { numa: 4, ..nic("a", 7) }])), ("nics", 0));
        assert_eq!(field(&|c| c.nics = Some((0..65).map(|i| nic(&i.to_string(), i)).collect())), ("nics", 64));
        assert_eq!(field(&|c| c.server_id = MAX_SERVER_ID + 1), ("server_id", 0));

        let pod = PodConfig { pod_type: PodType::P2p, node_id: 4, pod_size: 4, pod_id: 0 };
        assert!(matches!(refused(|c| c.pod = pod), DeviceError::Pod(PodError::InvalidNode { node: 4, .. })));
        assert!(matches!(
            refused(|c| c.wiring = Wiring::Table(vec![[Some(1), None, None, None], [None; 4]])),
            DeviceError::Wiring { rid: 0, port: 0, .. }
        ));
    }

    #[test]
    fn switch_v1_routing_ids_carry_the_server() {
        let config = DeviceConfig { server_id: 5, ..DeviceConfig::of(Family::Trn3Pds98, Size::Xl48) };
        let m = std::sync::Arc::new(model(config));
        assert_eq!((m.devices()[0].rid, m.devices()[15].rid), (0x50, 0x5F));
        assert_eq!(m.place(0, 1).unwrap().rid, 0x50);
        let mut maps = IdMapSet::new(m.clone());
        let ids: Vec<i32> = (0..16).collect();
        maps.build(0, &ids, &ids).unwrap();
        assert_eq!(maps.rid_to_mla_idx(0, m.devices()[7].rid), Ok(7));
        let last = DeviceConfig { server_id: MAX_SERVER_ID, ..DeviceConfig::of(Family::Trn3Pds98, Size::Xl48) };
        assert_eq!(model(last.clone()).devices()[15].rid, i32::MAX);
        assert!(DeviceModel::new(DeviceConfig { device_count: Some(17), ..last }).is_err());
    }

    #[test]
    fn an_absent_routing_table_fails_the_map_build_only() {
        let m = model(DeviceConfig { routing: RoutingTable::Absent, ..DeviceConfig::default() });
        assert_eq!(m.place(3, 8).unwrap().rid, 0);
        let mut maps = IdMapSet::new(std::sync::Arc::new(m));
        assert_eq!(maps.build(0, &[0], &[0]), Err(MapError::NoRoutingTable));
    }

    #[test]
    fn pods_are_asked_through_the_model() {
        let pod = PodConfig { pod_type: PodType::P2p, node_id: 1, pod_size: 4, pod_id: 9 };
        let m = model(DeviceConfig { pod, ..DeviceConfig::default() });
        assert_eq!(m.p2p_pod_peer_node(15, 3, 2), Ok(1));
        assert_eq!(m.p2p_pod_peer_node(16, 3, 2), Err(PodError::NoSuchDevice { nec_dev_id: 16 }));
        assert_eq!(m.pod_node_can_access_peer_node(PodType::P2p, 1, 0, 1, 3), Ok(true));
        assert_eq!(m.pod(), &pod);
        let alone = model(DeviceConfig::default());
        assert_eq!(alone.p2p_pod_peer_node(0, 0, 1), Err(PodError::NotP2p { pod_type: 0 }));
    }

    #[test]
    fn ranks_fill_one_four_or_all_devices() {
        let m = model(DeviceConfig::default());
        for (nranks, devices) in [(1, 1), (8, 1), (9, 4), (32, 4), (33, 16), (64, 16), (128, 16)] {
            assert_eq!(m.placement_devices(nranks), Ok(devices), "{nranks} ranks");
        }
        let cores = |rank| m.place(rank, 8).map(|p| (p.nec_dev_id, p.core)).unwrap();
        assert_eq!((0..8).map(cores).collect::<Vec<_>>(), (0..8).map(|r| (0, r)).collect::<Vec<_>>());
        let nine = |rank| m.place(rank, 9).map(|p| (p.nec_dev_id, p.core)).unwrap();
        assert_eq!(
            (0..9).map(nine).collect::<Vec<_>>(),
            [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
        );
        assert_eq!(m.place(31, 32).map(|p| (p.nec_dev_id, p.core, p.numa)), Ok((3, 7, 0)));
        assert_eq!(m.place(127, 128).map(|p| (p.nec_dev_id, p.core, p.numa)), Ok((15, 7, 1)));
        assert_eq!(m.place(8, 8), Err(DeviceError::RankOutOfRange { rank: 8, nranks: 8 }));
        assert_eq!(m.place(0, 0), Err(DeviceError::RankOutOfRange { rank: 0, nranks: 0 }));
        assert_eq!(
            m.place(0, 129).unwrap_err().to_string(),
            "129 ranks do not fit on 128 logical cores (16 accelerators of 8); start fewer ranks per server, choose a \
             larger NEURON_RT_FAKE_INSTANCE_TYPE or a smaller NEURON_LOGICAL_NC_CONFIG"
        );
    }

    #[test]
    fn ranks_that_fill_no_accepted_set_are_refused() {
        let trn1 = from(&[(FAKE_INSTANCE_TYPE, "trn1.32xlarge")]).unwrap();
        assert_eq!(trn1.placement_devices(3), Err(DeviceError::NoDeviceSet { nranks: 3, devices: 16, per_device: 2 }));
        assert_eq!([2, 4, 8, 9, 15, 16, 32].map(|n| trn1.placement_devices(n)), [1, 4, 4, 8, 8, 16, 16].map(Ok));
        let inf2 = from(&[(FAKE_INSTANCE_TYPE, "inf2.48xlarge")]).unwrap();
        assert_eq!([2, 8, 16].map(|n| inf2.placement_devices(n)), [1, 4, 8].map(Ok));
        assert!(matches!(inf2.placement_devices(17), Err(DeviceError::NoDeviceSet { .. })));
        let two = from(&[(DEVICE_COUNT, "2")]).unwrap();
        assert!(matches!(two.place(0, 9), Err(DeviceError::NoDeviceSet { nranks: 9, devices: 2, .. })));
    }

    proptest! {
        #[test]
        fn placement_uses_each_core_once_and_accepted_sets_only(
            family in proptest::sample::select(Family::ALL[2..].to_vec()),
            count in 1u32..=16,
            lnc in 1u32..=2,
            nranks in 1u32..=160,
        ) {
            let config = DeviceConfig {
                device_count: Some(count),
                logical_nc_config: Some(lnc),
                ..DeviceConfig::of(family, Size::Xl48)
            };
            let m = model(config);
            match m.placement_devices(nranks) {
                Err(_) => prop_assert!(m.place(0, nranks).is_err()),
                Ok(set) => {
                    prop_assert!([1, 4, 8, 16].contains(&set) && nranks <= m.total_vnc_count());
                    let places: Vec<CorePlace> = (0..nranks).map(|r| m.place(r, nranks).unwrap()).collect();
                    let cores: BTreeSet<u32> = places.iter().map(|p| p.logical_core).collect();
                    prop_assert_eq!(cores.len(), places.len());
                    let used: BTreeSet<i32> = places.iter().map(|p| p.nec_dev_id).collect();
                    prop_assert_eq!(used, (0..set as i32).collect());
                    prop_assert!(places.is_sorted_by_key(|p| p.logical_core));
                    prop_assert!(places.iter().all(|p| p.core < m.logical_cores_per_device()));
                }
            }
        }
    }
}
