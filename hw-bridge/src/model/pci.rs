//! PCI addresses and NICs of the modelled server, from which the library synthesises its topology document
//! (topology-and-rings.md §2.1). Addresses are distinct and the same on every run.

use std::fmt;

/// A PCI address, with the widths of `nec_get_device_pci_bdf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    /// Domain, below 65536.
    pub domain: u32,
    /// Bus, below 256.
    pub bus: u32,
    /// Slot (PCI "device"), below 32.
    pub slot: u8,
    /// Function, below 8.
    pub func: u8,
}

impl Bdf {
    /// Whether every part is in its range.
    pub const fn is_valid(&self) -> bool {
        self.domain < 1 << 16 && self.bus < 1 << 8 && self.slot < 32 && self.func < 8
    }
}

/// `domain:bus:slot.func` in the usual hexadecimal form, such as `0000:10:1e.0`.
impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.slot, self.func)
    }
}

/// A network interface card of the modelled server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Interface name.
    pub name: String,
    /// Where it sits.
    pub bdf: Bdf,
    /// Its NUMA node.
    pub numa: u32,
    /// Speed in Mbit/s.
    pub speed_mbps: u32,
    /// Globally unique id.
    pub guid: u64,
}

/// First bus and distance between the buses of two accelerators: 32 of them fit below bus 0x90.
const FIRST_BUS: u32 = 0x10;
const BUS_STEP: u32 = 4;
/// An accelerator and the NIC beside it share a bus.
const DEVICE_SLOT: u8 = 0x1e;
const NIC_SLOT: u8 = 0x1d;

/// Default address of the accelerator at a position, below 32.
pub(super) const fn default_device_bdf(position: u32) -> Bdf {
    Bdf { domain: 0, bus: FIRST_BUS + BUS_STEP * position, slot: DEVICE_SLOT, func: 0 }
}

/// Default NICs: `count` of them, at most one beside an accelerator, evenly spread over `numa_of_device`.
pub(super) fn default_nics(count: u32, speed_mbps: u32, server_id: u32, numa_of_device: &[u32]) -> Vec<Nic> {
    let devices = numa_of_device.len();
    let positions = (0u32..).zip(numa_of_device).filter(|(i, _)| {
        // Position i has a NIC if i * count / devices steps up there: even spacing without rounding drift.
        let before = u64::from(*i) * u64::from(count);
        let n = devices as u64;
        (before + u64::from(count)).div_ceil(n) > before.div_ceil(n)
    });
    let nics = positions.zip(0u64..).map(|((position, numa), index)| {
        let bdf = Bdf { slot: NIC_SLOT, ..default_device_bdf(position) };
        Nic {
            name: format!("rdmap{}s{}", bdf.bus, bdf.slot),
            bdf,
            numa: *numa,
            speed_mbps,
            guid: 0xEFA0_0000_0000_0000 | u64::from(server_id) << 16 | index,
        }
    });
    nics.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn addresses_print_in_the_usual_form() {
        let bdf = Bdf { domain: 1, bus: 0xab, slot: 0x1e, func: 7 };
        assert_eq!(bdf.to_string(), "0001:ab:1e.7");
        assert!(bdf.is_valid());
        assert!(!Bdf { slot: 32, ..bdf }.is_valid() && !Bdf { func: 8, ..bdf }.is_valid());
        assert!(!Bdf { bus: 256, ..bdf }.is_valid() && !Bdf { domain: 65536, ..bdf }.is_valid());
    }

    #[test]
    fn default_nics_are_as_many_as_asked_distinct_and_evenly_spread() {
        for devices in 1..=32u32 {
            let numa: Vec<u32> = (0..devices).map(|i| i / 8).collect();
            for count in 0..=devices {
                let nics = default_nics(count, 100_000, 3, &numa);
                assert_eq!(nics.len() as u32, count, "{count} NICs beside {devices} devices");
                let bdfs: BTreeSet<Bdf> = nics.iter().map(|n| n.bdf).collect();
                let names: BTreeSet<&str> = nics.iter().map(|n| n.name.as_str()).collect();
                let guids: BTreeSet<u64> = nics.iter().map(|n| n.guid).collect();
                assert!(bdfs.len() == nics.len() && names.len() == nics.len() && guids.len() == nics.len());
                assert!(bdfs.iter().all(Bdf::is_valid));
            }
        }
        let buses: Vec<u32> = default_nics(4, 1, 0, &[0; 16]).iter().map(|n| (n.bdf.bus - 0x10) / 4).collect();
        assert_eq!(buses, [0, 4, 8, 12]);
    }
}
