//! The accelerator maps behind the five topology callbacks (reverse-abi.md §3.3).
//!
//! The original keeps one 772-byte `device_id_maps` per local device: `built` @0, `port_map` int\[32\]\[4\] @4,
//! `mla_to_rid` int\[32\] @516, `rid_to_mla` int\[32\] @644. [`DeviceIdMaps`] is that structure, [`IdMapSet`] the array
//! of them.
//!
//! Where the original asserts, the functions return a [`MapError`]; [`MapError::fault`] says whether the original would
//! have ended the process (the host traps the calling instance) or answered a status. A failed build leaves the old
//! maps.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use super::DeviceModel;
use super::wiring::Fabric;

/// Accelerator indexes.
pub const MAX_MLA_DEVICES: usize = 32;
/// Links of an accelerator.
pub const PORTS_PER_MLA: usize = 4;
/// Local devices that may have maps (NEC_MAX_DEVICES).
pub const NEC_MAX_DEVICES: usize = 256;
/// "Network" in the place of a device; device-keyed functions assert against it.
pub const NEC_NET_MLA_DEV: i32 = -1;
/// Unknown or unreachable accelerator; also the start value of `rid_to_mla`.
pub const NEC_UNKNOWN_MLA_DEV: i32 = -3;
/// Start value of a port: unconnected.
pub const PORT_UNCONNECTED: i32 = -2;
/// Start value of `rid_to_mla`.
pub const RID_UNMAPPED: i32 = NEC_UNKNOWN_MLA_DEV;
/// Start value of `mla_to_rid`.
pub const MLA_ABSENT: i32 = -4;
/// What `nec_get_peer_mla_idx` answers for an unconnected port.
pub const PEER_NOT_CONNECTED: i32 = -22;
/// The accelerator's part of a routing id on switch-v1.
pub const RID_INDEX_MASK: i32 = 0xF;
/// Shift of the server's part of a routing id on switch-v1.
pub const RID_SERVER_SHIFT: u32 = 4;

/// What the original does where a [`MapError`] is returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapFault {
    /// It asserts: the caller is broken and is ended.
    Assertion,
    /// It answers NRT_INVALID: a bad argument.
    Invalid,
    /// It answers NRT_FAILURE.
    Failure,
}

/// Why a topology callback has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MapError {
    /// The network was passed as local device.
    #[error("the local device is NEC_NET_MLA_DEV (-1), but the network has no accelerator maps; pass a NeuronDevice")]
    NetDevice,
    /// The local device cannot exist.
    #[error("local device {local_dev} is out of range, expected 0 to {}; pass a NeuronDevice", NEC_MAX_DEVICES - 1)]
    LocalDeviceOutOfRange {
        /// The device.
        local_dev: i32,
    },
    /// The accelerator index cannot exist.
    #[error("accelerator index {mla_idx} is out of range, expected 0 to {}; correct mla_idx", MAX_MLA_DEVICES - 1)]
    MlaIndexOutOfRange {
        /// The index.
        mla_idx: i32,
    },
    /// The port cannot exist.
    #[error("port {port} of accelerator {mla_idx} is out of range, expected 0 to {}; correct port", PORTS_PER_MLA - 1)]
    PortOutOfRange {
        /// The accelerator.
        mla_idx: i32,
        /// The port.
        port: i32,
    },
    /// Query before build.
    #[error("the accelerator maps of this local device are not built; call nec_build_port_and_rid_map first")]
    NotBuilt,
    /// The accelerator takes no part.
    #[error("accelerator {mla_idx} has no routing id in the maps; ask nec_is_mla_available first")]
    MlaAbsent {
        /// The accelerator.
        mla_idx: i32,
    },
    /// The routing id does not fit the family.
    #[error(
        "Mismatching routing ID {rid} of host device {host_device_id}: expected 0 to {} for this instance family",
        .max_devices - 1
    )]
    MismatchingRoutingId {
        /// The routing id, without its server part.
        rid: i32,
        /// Whose it is.
        host_device_id: i32,
        /// Routing ids of the family.
        max_devices: u32,
    },
    /// A routing id that no map has room for.
    #[error("routing id {rid} is out of range, expected 0 to {}; correct rid", MAX_MLA_DEVICES - 1)]
    RidOutOfRange {
        /// The routing id.
        rid: i32,
    },
    /// The routing id belongs to another server (switch-v1).
    #[error(
        "routing id {rid} belongs to server {server}, but this is server {own}; ask only for accelerators of this server"
    )]
    OtherServer {
        /// The routing id.
        rid: i32,
        /// Its server.
        server: i32,
        /// This server.
        own: u32,
    },
    /// Two entries for one accelerator or routing id: one of the two maps would lie.
    #[error("accelerator {mla_idx} (routing id {rid}) is listed twice; list each accelerator of one server once")]
    Duplicate {
        /// The accelerator of the second entry.
        mla_idx: i32,
        /// Its routing id.
        rid: i32,
    },
    /// The driver has no id table. The first sentence is the original's.
    #[error("Failed to retrieve host device ID to routing ID map; the driver layer of this server has none")]
    NoRoutingTable,
    /// The driver's table lacks a device.
    #[error("host device {host_device_id} is not in the driver's routing id table; pass ids of devices that exist")]
    UnknownHostDevice {
        /// The device.
        host_device_id: i32,
    },
    /// Two lists of one count differ.
    #[error(
        "{mla_indexes} accelerator indexes but {host_device_ids} host device ids; pass two lists of the same length"
    )]
    LengthMismatch {
        /// Length of the first list.
        mla_indexes: usize,
        /// Length of the second.
        host_device_ids: usize,
    },
}

impl MapError {
    /// What the original does in this case.
    pub fn fault(&self) -> MapFault {
        match self {
            MapError::NoRoutingTable | MapError::UnknownHostDevice { .. } => MapFault::Failure,
            MapError::LengthMismatch { .. } => MapFault::Invalid,
            _ => MapFault::Assertion,
        }
    }
}

/// The maps of one local device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceIdMaps {
    built: bool,
    port_map: [[i32; PORTS_PER_MLA]; MAX_MLA_DEVICES],
    mla_to_rid: [i32; MAX_MLA_DEVICES],
    rid_to_mla: [i32; MAX_MLA_DEVICES],
}

impl Default for DeviceIdMaps {
    /// Not built; the three tables at their three different start values.
    fn default() -> Self {
        DeviceIdMaps {
            built: false,
            port_map: [[PORT_UNCONNECTED; PORTS_PER_MLA]; MAX_MLA_DEVICES],
            mla_to_rid: [MLA_ABSENT; MAX_MLA_DEVICES],
            rid_to_mla: [RID_UNMAPPED; MAX_MLA_DEVICES],
        }
    }
}

impl DeviceIdMaps {
    /// Whether the maps were built.
    pub fn is_built(&self) -> bool {
        self.built
    }

    /// Builds the maps from the accelerators that take part: index `i` of both lists is one accelerator. Built maps are
    /// replaced.
    ///
    /// A port whose peer takes no part is connected but leads to [`RID_UNMAPPED`], as in the original.
    ///
    /// # Errors
    /// [`MapError`]; the maps stay as they were.
    pub fn build(&mut self, fabric: &Fabric, mla_indexes: &[i32], host_device_ids: &[i32]) -> Result<(), MapError> {
        if mla_indexes.len() != host_device_ids.len() {
            let (mla_indexes, host_device_ids) = (mla_indexes.len(), host_device_ids.len());
            return Err(MapError::LengthMismatch { mla_indexes, host_device_ids });
        }
        let host_to_rid = fabric.host_to_rid().ok_or(MapError::NoRoutingTable)?;
        let max_devices = fabric.family().max_devices();
        let mut maps = DeviceIdMaps::default();
        for (&mla_idx, &host_device_id) in mla_indexes.iter().zip(host_device_ids) {
            let mla = mla_index(mla_idx)?;
            let rid = host_to_rid.get(&host_device_id).ok_or(MapError::UnknownHostDevice { host_device_id })?;
            let rid = fabric.in_server(*rid);
            let mismatch = MapError::MismatchingRoutingId { rid, host_device_id, max_devices };
            // The family's range lies within the tables: 16 or 32.
            if u32::try_from(rid).map_or(true, |r| r >= max_devices) {
                return Err(mismatch);
            }
            let slot = usize::try_from(rid).map_err(|_| mismatch)?;
            if maps.mla_to_rid[mla] != MLA_ABSENT || maps.rid_to_mla[slot] != RID_UNMAPPED {
                return Err(MapError::Duplicate { mla_idx, rid });
            }
            maps.mla_to_rid[mla] = rid;
            maps.rid_to_mla[slot] = mla_idx;
        }
        for (mla, rid) in maps.mla_to_rid.into_iter().enumerate() {
            for port in 0..PORTS_PER_MLA {
                // An absent accelerator's -4 has no peers.
                if let Some(peer) = fabric.peer_rid(rid, port).and_then(|peer| usize::try_from(peer).ok()) {
                    maps.port_map[mla][port] = maps.rid_to_mla.get(peer).copied().unwrap_or(RID_UNMAPPED);
                }
            }
        }
        maps.built = true;
        *self = maps;
        Ok(())
    }

    /// Whether the accelerator takes part.
    ///
    /// # Errors
    /// [`MapError::MlaIndexOutOfRange`], [`MapError::NotBuilt`].
    pub fn is_mla_available(&self, mla_idx: i32) -> Result<bool, MapError> {
        Ok(self.mla_to_rid[self.checked(mla_idx)?] >= 0)
    }

    /// Routing id of an accelerator; on switch-v1 without the server part.
    ///
    /// # Errors
    /// [`MapError::MlaIndexOutOfRange`], [`MapError::NotBuilt`], [`MapError::MlaAbsent`].
    pub fn mla_idx_to_rid(&self, mla_idx: i32) -> Result<i32, MapError> {
        let rid = self.mla_to_rid[self.checked(mla_idx)?];
        if rid >= 0 { Ok(rid) } else { Err(MapError::MlaAbsent { mla_idx }) }
    }

    /// Accelerator of a routing id, or [`RID_UNMAPPED`]. On switch-v1 the routing id carries its server.
    ///
    /// # Errors
    /// [`MapError::NotBuilt`], [`MapError::OtherServer`], [`MapError::RidOutOfRange`].
    pub fn rid_to_mla_idx(&self, fabric: &Fabric, rid: i32) -> Result<i32, MapError> {
        self.assert_built()?;
        if fabric.family().is_switch_v1() {
            let (server, own) = (fabric.server_of(rid), fabric.server_id());
            if u32::try_from(server) != Ok(own) {
                return Err(MapError::OtherServer { rid, server, own });
            }
        }
        let slot = usize::try_from(fabric.in_server(rid)).map_err(|_| MapError::RidOutOfRange { rid })?;
        self.rid_to_mla.get(slot).copied().ok_or(MapError::RidOutOfRange { rid })
    }

    /// Accelerator at the other end of a port: its index, [`PEER_NOT_CONNECTED`] for an unconnected port, or
    /// [`NEC_UNKNOWN_MLA_DEV`] for a peer that takes no part. TRN2 and TRN3 families remap the port first.
    ///
    /// # Errors
    /// [`MapError::MlaIndexOutOfRange`], [`MapError::NotBuilt`], [`MapError::PortOutOfRange`].
    pub fn get_peer_mla_idx(&self, fabric: &Fabric, mla_idx: i32, port: i32) -> Result<i32, MapError> {
        let mla = self.checked(mla_idx)?;
        let out_of_range = MapError::PortOutOfRange { mla_idx, port };
        let mut slot = usize::try_from(port).ok().filter(|p| *p < PORTS_PER_MLA).ok_or(out_of_range)?;
        if fabric.family().is_trn2_or_trn3_family() {
            slot = fabric.remap().port(mla, slot).ok_or(out_of_range)?;
        }
        let entry = self.port_map[mla][slot];
        Ok(if entry == PORT_UNCONNECTED { PEER_NOT_CONNECTED } else { entry })
    }

    /// Whether two accelerators are the same or one link apart (runtime-internal).
    ///
    /// # Errors
    /// [`MapError::MlaIndexOutOfRange`], [`MapError::NotBuilt`].
    pub fn directly_connected(&self, mla_idx: i32, other: i32) -> Result<bool, MapError> {
        let mla = self.checked(mla_idx)?;
        self.checked(other)?;
        Ok(mla_idx == other || self.port_map[mla].contains(&other))
    }

    /// Whether every accelerator of `other` is here, with the same routing id.
    fn covers(&self, other: &DeviceIdMaps) -> bool {
        let mut both = other.mla_to_rid.iter().zip(&self.mla_to_rid);
        both.all(|(theirs, ours)| *theirs == MLA_ABSENT || theirs == ours)
    }

    fn assert_built(&self) -> Result<(), MapError> {
        if self.built { Ok(()) } else { Err(MapError::NotBuilt) }
    }

    fn checked(&self, mla_idx: i32) -> Result<usize, MapError> {
        let mla = mla_index(mla_idx)?;
        self.assert_built()?;
        Ok(mla)
    }
}

fn mla_index(mla_idx: i32) -> Result<usize, MapError> {
    usize::try_from(mla_idx).ok().filter(|m| *m < MAX_MLA_DEVICES).ok_or(MapError::MlaIndexOutOfRange { mla_idx })
}

/// The maps of all local devices of one tenant, keyed as the callbacks key them.
///
/// Each tenant has its own set: what one library builds is not what another sees.
#[derive(Clone, Debug)]
pub struct IdMapSet {
    model: Arc<DeviceModel>,
    maps: BTreeMap<i32, DeviceIdMaps>,
}

impl IdMapSet {
    /// No map built.
    pub fn new(model: Arc<DeviceModel>) -> IdMapSet {
        IdMapSet { model, maps: BTreeMap::new() }
    }

    /// `nec_build_port_and_rid_map`. See [`DeviceIdMaps::build`]. Maps that hold all these accelerators already stay: the
    /// library of a sub-group names only its own, and the whole group's must not lose the others.
    ///
    /// # Errors
    /// [`MapError`]; the device's maps stay as they were.
    pub fn build(&mut self, local_dev: i32, mla_indexes: &[i32], host_device_ids: &[i32]) -> Result<(), MapError> {
        check_local(local_dev)?;
        let mut maps = DeviceIdMaps::default();
        maps.build(self.model.fabric(), mla_indexes, host_device_ids)?;
        if !self.maps.get(&local_dev).is_some_and(|old| old.covers(&maps)) {
            self.maps.insert(local_dev, maps);
        }
        Ok(())
    }

    /// `nec_is_mla_available`.
    ///
    /// # Errors
    /// The local device's asserts, and those of [`DeviceIdMaps::is_mla_available`].
    pub fn is_mla_available(&self, local_dev: i32, mla_idx: i32) -> Result<bool, MapError> {
        check_local(local_dev)?;
        mla_index(mla_idx)?;
        self.of(local_dev)?.is_mla_available(mla_idx)
    }

    /// `nec_mla_idx_to_rid`.
    ///
    /// # Errors
    /// The local device's asserts, and those of [`DeviceIdMaps::mla_idx_to_rid`].
    pub fn mla_idx_to_rid(&self, local_dev: i32, mla_idx: i32) -> Result<i32, MapError> {
        check_local(local_dev)?;
        mla_index(mla_idx)?;
        self.of(local_dev)?.mla_idx_to_rid(mla_idx)
    }

    /// `nec_rid_to_mla_idx`.
    ///
    /// # Errors
    /// The local device's asserts, and those of [`DeviceIdMaps::rid_to_mla_idx`].
    pub fn rid_to_mla_idx(&self, local_dev: i32, rid: i32) -> Result<i32, MapError> {
        check_local(local_dev)?;
        self.of(local_dev)?.rid_to_mla_idx(self.model.fabric(), rid)
    }

    /// `nec_get_peer_mla_idx`.
    ///
    /// # Errors
    /// The local device's asserts, and those of [`DeviceIdMaps::get_peer_mla_idx`].
    pub fn get_peer_mla_idx(&self, local_dev: i32, mla_idx: i32, port: i32) -> Result<i32, MapError> {
        check_local(local_dev)?;
        mla_index(mla_idx)?;
        self.of(local_dev)?.get_peer_mla_idx(self.model.fabric(), mla_idx, port)
    }

    /// Whether two accelerators are the same or one link apart (runtime-internal).
    ///
    /// # Errors
    /// The local device's asserts, and those of [`DeviceIdMaps::directly_connected`].
    pub fn directly_connected(&self, local_dev: i32, mla_idx: i32, other: i32) -> Result<bool, MapError> {
        check_local(local_dev)?;
        mla_index(mla_idx)?;
        self.of(local_dev)?.directly_connected(mla_idx, other)
    }

    fn of(&self, local_dev: i32) -> Result<&DeviceIdMaps, MapError> {
        self.maps.get(&local_dev).ok_or(MapError::NotBuilt)
    }
}

fn check_local(local_dev: i32) -> Result<(), MapError> {
    if local_dev == NEC_NET_MLA_DEV {
        return Err(MapError::NetDevice);
    }
    if usize::try_from(local_dev).map_or(true, |d| d >= NEC_MAX_DEVICES) {
        return Err(MapError::LocalDeviceOutOfRange { local_dev });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::DeviceConfig;
    use super::super::silicon::Family;
    use super::super::wiring::{PortRemap, Wiring};
    use super::*;
    use proptest::prelude::*;

    fn fabric(family: Family, server_id: u32, rids: &[i32]) -> Fabric {
        let table = (0..).zip(rids.iter().copied()).collect();
        Fabric::new(family, server_id, Some(table), &Wiring::Family, PortRemap::default()).unwrap()
    }

    fn built(fabric: &Fabric, count: i32) -> DeviceIdMaps {
        let ids: Vec<i32> = (0..count).collect();
        let mut maps = DeviceIdMaps::default();
        maps.build(fabric, &ids, &ids).unwrap();
        maps
    }

    const RIDS: [i32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    #[test]
    fn the_three_start_values_differ() {
        let maps = DeviceIdMaps::default();
        assert!(!maps.is_built());
        assert!(maps.port_map.iter().flatten().all(|cell| *cell == -2));
        assert!(maps.mla_to_rid.iter().all(|rid| *rid == -4));
        assert!(maps.rid_to_mla.iter().all(|mla| *mla == -3));
        // The original's 772 bytes: a word for `built` and three tables of ints.
        let ints = 1 + maps.port_map.as_flattened().len() + maps.mla_to_rid.len() + maps.rid_to_mla.len();
        assert_eq!(4 * ints, 772);
    }

    #[test]
    fn build_writes_only_what_takes_part() {
        let fabric = fabric(Family::Trn2, 0, &RIDS);
        let mut maps = DeviceIdMaps::default();
        // Host devices 4 and 5 under other accelerator indexes; the rest of the torus takes no part.
        maps.build(&fabric, &[9, 31], &[4, 5]).unwrap();
        assert_eq!((maps.mla_to_rid[9], maps.mla_to_rid[31]), (4, 5));
        assert_eq!((maps.rid_to_mla[4], maps.rid_to_mla[5]), (9, 31));
        assert_eq!(maps.mla_to_rid.iter().filter(|rid| **rid == -4).count(), 30);
        assert_eq!(maps.rid_to_mla.iter().filter(|mla| **mla == -3).count(), 30);
        // 4's links: 5 takes part, 7, 8 and 0 do not: connected, but to an unknown accelerator.
        assert_eq!(maps.port_map[9], [31, -3, -3, -3]);
        assert_eq!(maps.port_map[0], [-2; 4]);
        assert_eq!(maps.get_peer_mla_idx(&fabric, 9, 1), Ok(NEC_UNKNOWN_MLA_DEV));
        // A second build starts from the start values again.
        maps.build(&fabric, &[0], &[0]).unwrap();
        assert_eq!((maps.mla_to_rid[9], maps.rid_to_mla[4], maps.port_map[9]), (-4, -3, [-2; 4]));
    }

    #[test]
    fn queries_answer_as_the_original() {
        let fabric = fabric(Family::Trn2, 0, &RIDS[..4]);
        let maps = built(&fabric, 4);
        assert_eq!((maps.is_mla_available(3), maps.is_mla_available(4)), (Ok(true), Ok(false)));
        assert_eq!(maps.mla_idx_to_rid(3), Ok(3));
        assert_eq!((maps.rid_to_mla_idx(&fabric, 3), maps.rid_to_mla_idx(&fabric, 4)), (Ok(3), Ok(-3)));
        assert_eq!([0, 1, 2, 3].map(|port| maps.get_peer_mla_idx(&fabric, 0, port)), [Ok(1), Ok(3), Ok(-22), Ok(-22)]);
        assert_eq!(maps.get_peer_mla_idx(&fabric, 20, 0), Ok(-22));
        assert_eq!(maps.directly_connected(0, 0), Ok(true));
        assert_eq!((maps.directly_connected(0, 3), maps.directly_connected(0, 2)), (Ok(true), Ok(false)));
    }

    #[test]
    fn only_trn2_and_trn3_families_remap_ports() {
        // A rotation is not its own inverse, so applying it backwards or twice shows.
        let rotate = PortRemap::uniform([1, 2, 3, 0]).unwrap();
        for family in Family::ALL.into_iter().filter(|f| f.arch().is_some()) {
            let rids = (0..16).map(|i| (i, i)).collect();
            let fabric = Fabric::new(family, 0, Some(rids), &Wiring::Torus, rotate.clone()).unwrap();
            let maps = built(&fabric, 16);
            assert_eq!(maps.port_map[0], [1, 3, 4, 12], "the map itself is not remapped");
            let peers = [0, 1, 2, 3].map(|port| maps.get_peer_mla_idx(&fabric, 0, port).unwrap());
            let expected = if family.is_trn2_or_trn3_family() { [3, 4, 12, 1] } else { [1, 3, 4, 12] };
            assert_eq!(peers, expected, "{}", family.name());
        }
    }

    #[test]
    fn switch_v1_masks_routing_ids_and_refuses_other_servers() {
        let rids: Vec<i32> = (0..16).map(|i| 0x30 + i).collect();
        let fabric = fabric(Family::Trn3Pds98, 3, &rids);
        let maps = built(&fabric, 16);
        assert_eq!(maps.mla_idx_to_rid(5), Ok(5), "stored without the server");
        assert_eq!(maps.rid_to_mla_idx(&fabric, 0x35), Ok(5));
        let error = maps.rid_to_mla_idx(&fabric, 0x25).unwrap_err();
        assert_eq!(error, MapError::OtherServer { rid: 0x25, server: 2, own: 3 });
        assert_eq!(error.fault(), MapFault::Assertion);
        assert!(maps.rid_to_mla_idx(&fabric, -1).is_err());
    }

    /// The 32 accelerators of a switch-v1 fabric are two servers' to the maps: a routing id keeps four bits, so a server's maps
    /// hold either half, refuse both together, and never take one for the other. Elsewhere there is one half.
    ///
    /// Proves INV-15.
    #[test]
    fn thirty_two_routing_ids_are_two_servers_of_sixteen() {
        let rids: Vec<i32> = (0..32).collect();
        let half = |fabric: &Fabric, from: i32| {
            let indexes: Vec<i32> = (from..from + 16).collect();
            let mut maps = DeviceIdMaps::default();
            maps.build(fabric, &indexes, &indexes).map(|()| maps)
        };
        for server in [0, 1] {
            let fabric = fabric(Family::Trn3Pds98, server, &rids);
            let (first, second) = (half(&fabric, 0).unwrap(), half(&fabric, 16).unwrap());
            let own = server as i32 * 16;
            for i in 0..16 {
                assert_eq!((first.mla_idx_to_rid(i), second.mla_idx_to_rid(16 + i)), (Ok(i), Ok(i)));
                assert_eq!(first.rid_to_mla_idx(&fabric, own + i), Ok(i));
                assert_eq!(second.rid_to_mla_idx(&fabric, own + i), Ok(16 + i));
                let rid = 16 - own + i;
                let other = MapError::OtherServer { rid, server: 1 - server as i32, own: server };
                assert_eq!(first.rid_to_mla_idx(&fabric, rid), Err(other));
            }
            // Masked to four bits, 16 is 0 again.
            let both = DeviceIdMaps::default().build(&fabric, &rids, &rids);
            assert_eq!(both, Err(MapError::Duplicate { mla_idx: 16, rid: 0 }));
        }
        let one = fabric(Family::Trn3, 0, &rids);
        assert!(half(&one, 0).is_ok());
        let error = MapError::MismatchingRoutingId { rid: 16, host_device_id: 16, max_devices: 16 };
        assert_eq!(half(&one, 16).unwrap_err(), error);
    }

    /// Proves INV-15.
    #[test]
    fn the_accepted_routing_ids_follow_the_family_at_run_time() {
        // Routing id 16 is one too many for TRN3, whose silicon is that of the switch-v1 family, where it is id 0 of
        // server 1.
        let build = |family, rid| {
            let fabric = fabric(family, 1, &[rid]);
            DeviceIdMaps::default().build(&fabric, &[0], &[0])
        };
        for family in Family::ALL.into_iter().filter(|f| f.arch().is_some() && !f.is_switch_v1()) {
            assert_eq!(build(family, 15), Ok(()));
            let error = MapError::MismatchingRoutingId { rid: 16, host_device_id: 0, max_devices: 16 };
            assert_eq!(build(family, 16), Err(error), "{}", family.name());
        }
        assert_eq!(build(Family::Trn3Pds98, 16), Ok(()));
        assert_eq!(
            build(Family::Trn3, -1).unwrap_err().to_string(),
            "Mismatching routing ID -1 of host device 0: expected 0 to 15 for this instance family"
        );
    }

    #[test]
    fn every_assert_is_an_error_value() {
        let model = Arc::new(DeviceModel::new(DeviceConfig::default()).unwrap());
        let mut set = IdMapSet::new(model);
        let all = |set: &IdMapSet, dev: i32, mla: i32| {
            [
                set.is_mla_available(dev, mla).map(i32::from).unwrap_err(),
                set.mla_idx_to_rid(dev, mla).unwrap_err(),
                set.get_peer_mla_idx(dev, mla, 0).unwrap_err(),
                set.directly_connected(dev, mla, 0).map(i32::from).unwrap_err(),
            ]
        };
        // Before the build, the first two asserts of the original come first.
        assert_eq!(all(&set, -1, 0), [MapError::NetDevice; 4]);
        assert_eq!(all(&set, 0, 32), [MapError::MlaIndexOutOfRange { mla_idx: 32 }; 4]);
        assert_eq!(all(&set, 0, 0), [MapError::NotBuilt; 4]);
        assert_eq!(set.rid_to_mla_idx(-1, 0), Err(MapError::NetDevice));
        assert_eq!(set.rid_to_mla_idx(0, 0), Err(MapError::NotBuilt));
        assert_eq!(set.build(-1, &[], &[]), Err(MapError::NetDevice));
        assert_eq!(set.build(256, &[], &[]), Err(MapError::LocalDeviceOutOfRange { local_dev: 256 }));
        assert_eq!(set.build(-2, &[], &[]), Err(MapError::LocalDeviceOutOfRange { local_dev: -2 }));

        set.build(0, &[0, 1], &[0, 1]).unwrap();
        set.build(0, &[1], &[1]).unwrap();
        assert_eq!(set.is_mla_available(0, 0), Ok(true), "a smaller set takes nothing away");
        assert_eq!(all(&set, 0, -1), [MapError::MlaIndexOutOfRange { mla_idx: -1 }; 4]);
        assert_eq!(all(&set, 1, 0), [MapError::NotBuilt; 4], "the maps are per local device");
        assert_eq!(set.mla_idx_to_rid(0, 2), Err(MapError::MlaAbsent { mla_idx: 2 }));
        for port in [-1, 4, i32::MAX] {
            assert_eq!(set.get_peer_mla_idx(0, 0, port), Err(MapError::PortOutOfRange { mla_idx: 0, port }));
        }
        assert_eq!(set.directly_connected(0, 0, 32), Err(MapError::MlaIndexOutOfRange { mla_idx: 32 }));
        for rid in [-1, 32, i32::MIN, i32::MAX] {
            assert_eq!(set.rid_to_mla_idx(0, rid), Err(MapError::RidOutOfRange { rid }));
        }
        let asserts = [MapError::NetDevice, MapError::NotBuilt, MapError::MlaIndexOutOfRange { mla_idx: 32 }];
        assert!(asserts.iter().all(|e| e.fault() == MapFault::Assertion));
    }

    #[test]
    fn a_refused_build_says_why_and_leaves_the_maps() {
        let good = fabric(Family::Trn2, 0, &RIDS);
        let mut maps = built(&good, 16);
        let before = maps.clone();
        let no_table = Fabric::new(Family::Trn2, 0, None, &Wiring::Family, PortRemap::default()).unwrap();
        let error = maps.build(&no_table, &[0], &[0]).unwrap_err();
        assert_eq!(error.fault(), MapFault::Failure);
        assert!(error.to_string().starts_with("Failed to retrieve host device ID to routing ID map"));
        let error = maps.build(&good, &[0], &[99]).unwrap_err();
        assert_eq!((error, error.fault()), (MapError::UnknownHostDevice { host_device_id: 99 }, MapFault::Failure));
        let error = maps.build(&good, &[0, 1], &[0]).unwrap_err();
        assert_eq!(error.fault(), MapFault::Invalid);
        assert_eq!(error.to_string(), "2 accelerator indexes but 1 host device ids; pass two lists of the same length");
        assert_eq!(maps.build(&good, &[0, 0], &[0, 1]), Err(MapError::Duplicate { mla_idx: 0, rid: 1 }));
        assert_eq!(maps.build(&good, &[0, 1], &[0, 0]), Err(MapError::Duplicate { mla_idx: 1, rid: 0 }));
        assert_eq!(maps.build(&good, &[32], &[0]), Err(MapError::MlaIndexOutOfRange { mla_idx: 32 }));
        assert_eq!(maps, before);
    }

    proptest! {
        #[test]
        fn maps_round_trip_and_links_have_a_way_back(
            rids in Just(RIDS.to_vec()).prop_shuffle(),
            mlas in Just((0..32).collect::<Vec<i32>>()).prop_shuffle(),
            family in proptest::sample::select(Family::ALL[2..].to_vec()),
            server_id in 0u32..1000,
        ) {
            let offset = if family.is_switch_v1() { (server_id << 4) as i32 } else { 0 };
            let full: Vec<i32> = rids.iter().map(|rid| rid + offset).collect();
            let fabric = fabric(family, server_id, &full);
            let hosts: Vec<i32> = (0..16).collect();
            let mut maps = DeviceIdMaps::default();
            maps.build(&fabric, &mlas[..16], &hosts).unwrap();
            for (i, mla) in mlas[..16].iter().enumerate() {
                prop_assert_eq!(maps.mla_idx_to_rid(*mla), Ok(rids[i]));
                prop_assert_eq!(maps.rid_to_mla_idx(&fabric, full[i]), Ok(*mla));
                for port in 0..4 {
                    let peer = maps.get_peer_mla_idx(&fabric, *mla, port).unwrap();
                    if family.is_inf2_family() && port >= 2 {
                        prop_assert_eq!(peer, -22);
                    } else {
                        prop_assert_eq!(maps.get_peer_mla_idx(&fabric, peer, port ^ 1), Ok(*mla));
                        prop_assert_eq!(maps.directly_connected(peer, *mla), Ok(true));
                    }
                }
            }
            for mla in &mlas[16..] {
                prop_assert_eq!(maps.is_mla_available(*mla), Ok(false));
            }
        }
    }
}
