//! How accelerators are wired: who is at the other end of each port (reverse-abi.md §3.3).
//!
//! The originals' tables are not recorded, so the wiring is data. [`Wiring`] says what to build, [`Fabric`] holds the
//! resolved table. Presets: a 4 × 4 two-dimensional torus (Trn1, Trn2, Trn3), a ring (Inf2), and for switch-v1 the four
//! partners each accelerator is paired with through the switch.
//!
//! Invariants: every link has a way back (a port of the peer that leads here); no port leads to its own accelerator.
//! Presets pair ports 0 with 1 and 2 with 3: what leaves by port p arrives by port p ^ 1.

use std::collections::{BTreeMap, BTreeSet};

use super::config::DeviceError;
use super::maps::{MAX_MLA_DEVICES, PORTS_PER_MLA, RID_INDEX_MASK, RID_SERVER_SHIFT};
use super::silicon::Family;

/// Peers of one accelerator, by port; `None` is an unconnected port.
pub type PortPeers = [Option<i32>; PORTS_PER_MLA];

/// Side of the torus.
const TORUS_SIDE: i32 = 4;

/// What to wire.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Wiring {
    /// What the family has: [`Wiring::Torus`], [`Wiring::Ring`] for Inf2, [`Wiring::Switch`] for switch-v1.
    #[default]
    Family,
    /// A 4 × 4 torus, routing id = 4 × row + column; ports 0 and 1 lead to the next and previous column, 2 and 3 to the
    /// next and previous row. With fewer accelerators, the links among those present: four make a row, one has none.
    Torus,
    /// A ring in the order of routing ids: port 0 to the next, port 1 to the previous, 2 and 3 unconnected.
    Ring,
    /// Everybody hangs on a switch; the ports name the partners it pairs an accelerator with by default: the next, the
    /// previous, the one after next and the one before the previous.
    Switch,
    /// No accelerator links.
    None,
    /// This table, by in-server routing id. Refused unless every link has a way back.
    Table(Vec<PortPeers>),
}

/// Port renumbering (`encd_arch_get_port`), by accelerator index. Only TRN2 and TRN3 families apply it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRemap([[u8; PORTS_PER_MLA]; MAX_MLA_DEVICES]);

impl Default for PortRemap {
    /// The identity.
    fn default() -> Self {
        PortRemap([[0, 1, 2, 3]; MAX_MLA_DEVICES])
    }
}

impl PortRemap {
    /// A table of permutations: row `mla`, entry `port` is the port to look up instead.
    ///
    /// # Errors
    /// [`DeviceError::PortRemap`] if a row is no permutation of 0 to 3.
    pub fn new(table: [[u8; PORTS_PER_MLA]; MAX_MLA_DEVICES]) -> Result<PortRemap, DeviceError> {
        for (mla, row) in table.iter().enumerate() {
            if (0..PORTS_PER_MLA as u8).any(|port| !row.contains(&port)) {
                return Err(DeviceError::PortRemap { mla, row: *row });
            }
        }
        Ok(PortRemap(table))
    }

    /// The same permutation for every accelerator.
    ///
    /// # Errors
    /// [`DeviceError::PortRemap`] if it is no permutation of 0 to 3.
    pub fn uniform(row: [u8; PORTS_PER_MLA]) -> Result<PortRemap, DeviceError> {
        PortRemap::new([row; MAX_MLA_DEVICES])
    }

    /// The port to look up for (`mla`, `port`), or `None` outside the table.
    pub fn port(&self, mla: usize, port: usize) -> Option<usize> {
        self.0.get(mla)?.get(port).map(|p| usize::from(*p))
    }
}

/// What the topology callbacks rest on: the family, the driver's id table, the resolved wiring and the port remap.
#[derive(Clone, Debug)]
pub struct Fabric {
    family: Family,
    server_id: u32,
    host_to_rid: Option<BTreeMap<i32, i32>>,
    peers: [PortPeers; MAX_MLA_DEVICES],
    remap: PortRemap,
}

impl Fabric {
    /// Resolves `wiring` for the accelerators of `host_to_rid` (the driver's table host device id → routing id; `None`
    /// if the driver has none, which wires nothing and makes every map build fail).
    ///
    /// Routing ids outside the family's range are kept and left unwired: the map build is where the original asserts on
    /// them.
    ///
    /// # Errors
    /// [`DeviceError::Wiring`] if the table is too long, leads out of itself, to itself, or has a link without a way
    /// back.
    pub fn new(
        family: Family,
        server_id: u32,
        host_to_rid: Option<BTreeMap<i32, i32>>,
        wiring: &Wiring,
        remap: PortRemap,
    ) -> Result<Fabric, DeviceError> {
        let mut fabric =
            Fabric { family, server_id, host_to_rid, peers: [[None; PORTS_PER_MLA]; MAX_MLA_DEVICES], remap };
        let present: BTreeSet<i32> =
            fabric.host_to_rid.iter().flatten().map(|(_, rid)| fabric.in_server(*rid)).collect();
        let present: Vec<i32> = present.into_iter().filter(|rid| (0..MAX_MLA_DEVICES as i32).contains(rid)).collect();
        let steps: &[i32] = match wiring {
            Wiring::Family if family.is_switch_v1() => &[1, -1, 2, -2],
            Wiring::Family if family.is_inf2_family() => &[1, -1],
            Wiring::Switch => &[1, -1, 2, -2],
            Wiring::Ring => &[1, -1],
            Wiring::Family | Wiring::Torus => {
                fabric.wire_torus(&present);
                &[]
            }
            Wiring::None => &[],
            Wiring::Table(table) => {
                fabric.wire_table(table)?;
                &[]
            }
        };
        fabric.wire_steps(&present, steps);
        Ok(fabric)
    }

    /// The family.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The server's part of a routing id, on switch-v1.
    pub fn server_id(&self) -> u32 {
        self.server_id
    }

    /// The driver's table host device id → routing id.
    pub fn host_to_rid(&self) -> Option<&BTreeMap<i32, i32>> {
        self.host_to_rid.as_ref()
    }

    /// A routing id without its server part: `rid & 0xF` on switch-v1, else unchanged.
    pub fn in_server(&self, rid: i32) -> i32 {
        if self.family.is_switch_v1() { rid & RID_INDEX_MASK } else { rid }
    }

    /// The server part of a routing id on switch-v1: `rid >> 4`.
    pub fn server_of(&self, rid: i32) -> i32 {
        rid >> RID_SERVER_SHIFT
    }

    /// In-server routing id at the other end of a port, or `None` if the port is unconnected or does not exist.
    pub fn peer_rid(&self, rid: i32, port: usize) -> Option<i32> {
        let peers = usize::try_from(rid).ok().and_then(|r| self.peers.get(r))?;
        peers.get(port).copied().flatten()
    }

    /// The port remap.
    pub fn remap(&self) -> &PortRemap {
        &self.remap
    }

    fn wire_torus(&mut self, present: &[i32]) {
        for &rid in present.iter().filter(|rid| **rid < TORUS_SIDE * TORUS_SIDE) {
            let (row, column) = (rid / TORUS_SIDE, rid % TORUS_SIDE);
            let at = |row: i32, column: i32| row.rem_euclid(TORUS_SIDE) * TORUS_SIDE + column.rem_euclid(TORUS_SIDE);
            let peers = [at(row, column + 1), at(row, column - 1), at(row + 1, column), at(row - 1, column)];
            self.peers[rid as usize] = peers.map(|peer| Some(peer).filter(|p| present.contains(p)));
        }
    }

    /// Port i leads `steps[i]` places on in the cyclic order of the accelerators present.
    fn wire_steps(&mut self, present: &[i32], steps: &[i32]) {
        let count = present.len() as i32;
        for (position, &rid) in (0i32..).zip(present) {
            for (port, step) in steps.iter().enumerate() {
                let peer = present[(position + step).rem_euclid(count) as usize];
                self.peers[rid as usize][port] = Some(peer).filter(|p| *p != rid);
            }
        }
    }

    fn wire_table(&mut self, table: &[PortPeers]) -> Result<(), DeviceError> {
        let refuse = |rid: usize, port: usize, reason: &'static str| Err(DeviceError::Wiring { rid, port, reason });
        if table.len() > MAX_MLA_DEVICES {
            return refuse(MAX_MLA_DEVICES, 0, "the table has more than 32 rows");
        }
        for (rid, row) in table.iter().enumerate() {
            for (port, peer) in row.iter().enumerate() {
                let Some(peer) = *peer else { continue };
                let Some(back) = usize::try_from(peer).ok().and_then(|p| table.get(p)) else {
                    return refuse(rid, port, "it leads to a routing id that the table has no row for");
                };
                if peer as usize == rid {
                    return refuse(rid, port, "it leads back to its own accelerator");
                }
                if !back.contains(&Some(rid as i32)) {
                    return refuse(rid, port, "no port of the peer leads back");
                }
            }
        }
        self.peers[..table.len()].copy_from_slice(table);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn identity(count: i32) -> Option<BTreeMap<i32, i32>> {
        Some((0..count).map(|i| (i, i)).collect())
    }

    fn fabric(family: Family, count: i32, wiring: Wiring) -> Fabric {
        Fabric::new(family, 0, identity(count), &wiring, PortRemap::default()).unwrap()
    }

    fn row(fabric: &Fabric, rid: i32) -> [Option<i32>; 4] {
        [0, 1, 2, 3].map(|port| fabric.peer_rid(rid, port))
    }

    fn assert_symmetric(fabric: &Fabric) {
        for rid in 0..32 {
            for port in 0..4 {
                if let Some(peer) = fabric.peer_rid(rid, port) {
                    assert_ne!(peer, rid);
                    assert_eq!(fabric.peer_rid(peer, port ^ 1), Some(rid), "rid {rid} port {port}");
                }
            }
        }
    }

    fn degree(fabric: &Fabric, rid: i32) -> usize {
        row(fabric, rid).into_iter().flatten().collect::<BTreeSet<i32>>().len()
    }

    #[test]
    fn sixteen_accelerators_make_a_4_by_4_torus() {
        for family in [Family::Trn1, Family::Trn1N, Family::Trn2, Family::Trn2UAC, Family::Trn3] {
            let torus = fabric(family, 16, Wiring::Family);
            assert_symmetric(&torus);
            assert!((0..16).all(|rid| degree(&torus, rid) == 4));
            assert_eq!(row(&torus, 0), [Some(1), Some(3), Some(4), Some(12)]);
            assert_eq!(row(&torus, 7), [Some(4), Some(6), Some(11), Some(3)]);
            assert_eq!(row(&torus, 15), [Some(12), Some(14), Some(3), Some(11)]);
            assert_eq!(row(&torus, 16), [None; 4]);
        }
    }

    #[test]
    fn fewer_accelerators_keep_the_links_among_themselves() {
        let four = fabric(Family::Trn2, 4, Wiring::Family);
        assert_symmetric(&four);
        assert_eq!(row(&four, 0), [Some(1), Some(3), None, None]);
        assert_eq!(row(&four, 3), [Some(0), Some(2), None, None]);
        let eight = fabric(Family::Trn2, 8, Wiring::Family);
        assert_symmetric(&eight);
        assert_eq!(row(&eight, 1), [Some(2), Some(0), Some(5), None]);
        assert_eq!(row(&eight, 5), [Some(6), Some(4), None, Some(1)]);
        for family in [Family::Trn2, Family::Inf2, Family::Trn3Pds98] {
            assert_eq!(row(&fabric(family, 1, Wiring::Family), 0), [None; 4], "{}", family.name());
        }
    }

    #[test]
    fn inferentia_is_a_ring() {
        let ring = fabric(Family::Inf2, 12, Wiring::Family);
        assert_symmetric(&ring);
        assert!((0..12).all(|rid| degree(&ring, rid) == 2));
        assert_eq!(row(&ring, 0), [Some(1), Some(11), None, None]);
        assert_eq!(row(&ring, 11), [Some(0), Some(10), None, None]);
    }

    #[test]
    fn switch_v1_pairs_everyone_with_four_partners_and_masks_the_server() {
        // The routing ids carry the server number 2 in their upper bits.
        let rids = Some((0..16).map(|i| (i, 2 * 16 + i)).collect());
        let switch = Fabric::new(Family::Trn3Pds98, 2, rids, &Wiring::Family, PortRemap::default()).unwrap();
        assert_symmetric(&switch);
        assert!((0..16).all(|rid| degree(&switch, rid) == 4));
        assert_eq!(row(&switch, 0), [Some(1), Some(15), Some(2), Some(14)]);
        assert_eq!((switch.in_server(0x25), switch.server_of(0x25)), (5, 2));
        // Elsewhere a routing id has no server part.
        assert_eq!(fabric(Family::Trn3, 16, Wiring::Family).in_server(0x25), 0x25);
    }

    #[test]
    fn a_table_states_its_own_wiring_and_is_checked() {
        let make = |table| Fabric::new(Family::Trn2, 0, identity(2), &Wiring::Table(table), PortRemap::default());
        let pair = make(vec![[None, None, Some(1), None], [Some(0), None, None, None]]).unwrap();
        assert_eq!((row(&pair, 0), row(&pair, 1)), ([None, None, Some(1), None], [Some(0), None, None, None]));
        let reason = |table: Vec<PortPeers>| make(table).unwrap_err().to_string();
        assert_eq!(
            reason(vec![[Some(1), None, None, None], [None; 4]]),
            "port 0 of routing id 0 is wired wrongly: no port of the peer leads back; correct the wiring table"
        );
        assert!(reason(vec![[None, Some(0), None, None]]).contains("leads back to its own accelerator"));
        assert!(reason(vec![[Some(9), None, None, None]]).contains("no row for"));
        assert!(reason(vec![[Some(-1), None, None, None]]).contains("no row for"));
        assert!(reason(vec![[None; 4]; 33]).contains("more than 32 rows"));
        assert_eq!(row(&fabric(Family::Trn2, 16, Wiring::None), 0), [None; 4]);
    }

    #[test]
    fn a_port_remap_is_a_permutation_and_need_not_be_its_own_inverse() {
        let rotate = PortRemap::uniform([1, 2, 3, 0]).unwrap();
        assert_eq!([0, 1, 2, 3].map(|p| rotate.port(31, p)), [Some(1), Some(2), Some(3), Some(0)]);
        assert_eq!((rotate.port(32, 0), rotate.port(0, 4)), (None, None));
        assert_eq!([0, 1, 2, 3].map(|p| PortRemap::default().port(7, p)), [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(
            PortRemap::uniform([0, 0, 2, 3]).unwrap_err().to_string(),
            "the port remap of accelerator 0 is [0, 0, 2, 3], which is no permutation of the ports 0 to 3; correct the row"
        );
        assert!(PortRemap::uniform([0, 1, 2, 4]).is_err());
    }

    proptest! {
        #[test]
        fn every_preset_is_symmetric_for_any_set_of_accelerators(
            rids in proptest::collection::btree_set(0i32..16, 1..=16),
            kind in 0usize..3,
        ) {
            let wiring = [Wiring::Torus, Wiring::Ring, Wiring::Switch][kind].clone();
            let table = rids.iter().map(|rid| (*rid, *rid)).collect();
            let fabric = Fabric::new(Family::Trn2, 0, Some(table), &wiring, PortRemap::default()).unwrap();
            assert_symmetric(&fabric);
            for rid in 0..32 {
                let peers = row(&fabric, rid);
                prop_assert!(rids.contains(&rid) || peers == [None; 4]);
                prop_assert!(peers.iter().flatten().all(|peer| rids.contains(peer)));
                if wiring == Wiring::Ring && rids.contains(&rid) {
                    prop_assert_eq!(degree(&fabric, rid), 2.min(rids.len() - 1));
                }
            }
        }
    }
}
