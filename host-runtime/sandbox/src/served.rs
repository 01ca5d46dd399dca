//! What this host serves, by name: interfaces, callbacks, variables, files.

/// An interface this host serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServedInterface {
    /// `package/interface`, without the version.
    pub name: &'static str,
    /// The served version.
    pub version: Numbers,
    /// Whether only types come from it.
    pub types_only: bool,
}

pub(crate) const fn served(name: &'static str, version: Numbers, types_only: bool) -> ServedInterface {
    ServedInterface { name, version, types_only }
}

const NRT: Numbers = (2, 0, 0);
const HW: Numbers = (1, 0, 0);

/// What a transport may import.
pub const TRANSPORT: &[ServedInterface] = &[
    served("neuron:nrt/types", NRT, true),
    served("neuron:nrt/nec", NRT, false),
    served("neuron:nrt/nrt", NRT, false),
    served("neuron:hw/objects", HW, false),
    served("neuron:hw/links", HW, false),
    served("neuron:hw/sockets", HW, false),
    served("neuron:hw/rendezvous", HW, false),
    served("neuron:hw/tasks", HW, false),
    served("neuron:hw/net", HW, false),
    served("neuron:hw/proxy", HW, false),
    served("neuron:hw/identity", HW, false),
    served("neuron:hw/pci", HW, false),
    served("neuron:hw/affinity", HW, false),
    served("neuron:hw/config", HW, false),
    served("neuron:hw/files", HW, false),
    served("neuron:hw/clock", HW, false),
    served("neuron:hw/random", HW, false),
    served("neuron:hw/log", HW, false),
];

/// What a net plug-in may import. `fabric` comes with the work across servers.
pub const NET: &[ServedInterface] = &[
    served("neuron:nrt/types", NRT, true),
    served("neuron:hw/objects", HW, false),
    served("neuron:hw/pci", HW, false),
    served("neuron:hw/config", HW, false),
    served("neuron:hw/clock", HW, false),
    served("neuron:hw/log", HW, false),
];

/// WASI interfaces a policy can grant, of any 0.2 version up to the served one: those that cannot wait without bound. None of
/// `wasi:sockets` and `wasi:filesystem`: addresses and files are reached through `neuron:hw`, which checks them against the
/// policy. None of the streams: a plugin's words go to `neuron:hw/log`, which has a rate.
pub const WASI: &[&str] = &[
    "wasi:cli/environment",
    "wasi:cli/exit",
    "wasi:clocks/monotonic-clock",
    "wasi:clocks/wall-clock",
    "wasi:io/poll",
    "wasi:random/insecure",
    "wasi:random/insecure-seed",
    "wasi:random/random",
];

/// The types-only interface that every `nccl:net` table uses.
pub(crate) const NET_TYPES: &str = "nccl:net/types";

/// The 20 callbacks by interface, in the original's order (INV-08).
pub const CALLBACKS: [(&str, &str); 20] = [
    ("neuron:nrt/nec", "nec-inc-semaphore"),
    ("neuron:nrt/nec", "nec-get-device-count"),
    ("neuron:nrt/nec", "nec-get-device-pci-bdf"),
    ("neuron:nrt/nec", "nec-get-virtual-core-size"),
    ("neuron:nrt/nec", "nec-build-port-and-rid-map"),
    ("neuron:nrt/nec", "nec-is-mla-available"),
    ("neuron:nrt/nec", "nec-mla-idx-to-rid"),
    ("neuron:nrt/nec", "nec-rid-to-mla-idx"),
    ("neuron:nrt/nec", "nec-get-peer-mla-idx"),
    ("neuron:nrt/nec", "nec-get-p2p-pod-peer-node"),
    ("neuron:nrt/nec", "nec-pod-node-can-access-peer-node"),
    ("neuron:nrt/nec", "nec-ndl-printk"),
    ("neuron:nrt/nec", "nec-get-dynamic-send-size-bytes"),
    ("neuron:nrt/nec", "nec-get-dynamic-send-offset-bytes"),
    ("neuron:nrt/nec", "nec-get-dynamic-recv-offset-bytes"),
    ("neuron:nrt/nec", "nec-set-recv-size-bytes"),
    ("neuron:nrt/nrt", "nrt-get-total-vnc-count"),
    ("neuron:nrt/nrt", "nrt-get-instance-info"),
    ("neuron:nrt/nrt", "nrt-get-version"),
    ("neuron:nrt/nrt", "nrt-get-libnccl-net"),
];

/// A version as three numbers.
pub type Numbers = (u64, u64, u64);

/// Splits `a:b/c@1.2.3` into the name, the version if it is three numbers, and the version's text if there is one.
pub fn split_version(import: &str) -> (&str, Option<Numbers>, Option<&str>) {
    let Some((name, version)) = import.split_once('@') else { return (import, None, None) };
    let mut numbers = version.split('.').map(|n| n.parse::<u64>());
    let parsed = match (numbers.next(), numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(a)), Some(Ok(b)), Some(Ok(c)), None) => Some((a, b, c)),
        _ => None,
    };
    (name, parsed, Some(version))
}

/// Variables a plugin may read. Names beside this table are not granted, whatever the process environment holds.
pub const GRANTED: &[&str] = &[
    "NEURON_CCOM_SOCK_TIMEOUT",
    "CCOM_SOCKET_IFNAME",
    "CCOM_SOCKET_FAMILY",
    "NCCL_TOPO_FILE",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_GRAPH_USE_NEW_ALGORITHM",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "CCOM_DBG_DISABLE_VERIFY_TOPOLOGY",
    "FI_EFA_FORK_SAFE",
];

/// Variables whose value names a file the plugin may read or write.
pub(crate) const FILES: &[(&str, bool)] =
    &[("NCCL_TOPO_FILE", false), ("NCCL_GRAPH_FILE", false), ("NCCL_TOPO_DUMP_FILE", true)];

/// Variables whose files a policy can grant for reading.
pub const READABLE: &[&str] = &["NCCL_TOPO_FILE", "NCCL_GRAPH_FILE"];
