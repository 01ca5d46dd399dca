//! Why discovery failed, by cause.

use super::xml::XmlError;
use std::fmt;

/// A failed question to the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineError {
    /// The question, under the original's name.
    pub call: &'static str,
    /// What the host answered.
    pub detail: String,
}

impl fmt::Display for MachineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the host refused {}: {}", self.call, self.detail)
    }
}

/// Why the topology could not be read, synthesised, verified or asked.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TopoError {
    /// The document is not well formed or exceeds a limit.
    Xml(XmlError),
    /// The document has another schema version.
    Version {
        /// Version the document states.
        found: i64,
        /// Version this reader was told to want.
        needed: i64,
    },
    /// The outermost element is not `<system>`.
    WrongRoot {
        /// What it is.
        found: String,
    },
    /// An element lacks an attribute it must have.
    MissingAttribute {
        /// The element, with what tells it from its brothers.
        node: String,
        /// The attribute.
        attribute: &'static str,
    },
    /// An attribute has a value that cannot be used.
    BadAttribute {
        /// The element, with what tells it from its brothers.
        node: String,
        /// The attribute.
        attribute: &'static str,
        /// Its value.
        value: String,
        /// What would have been fine.
        expected: &'static str,
    },
    /// Two elements claim one identity.
    Duplicate {
        /// What is there twice: "pci busid 0000:10:1c.0".
        what: String,
    },
    /// The document has no `<cpu>`, so nothing connects its devices.
    NoCpu,
    /// A rank has no accelerator in the document.
    RankWithoutDevice {
        /// The rank.
        rank: i32,
    },
    /// No rank lives on this node, or the asking rank is not in the list.
    NoLocalRank {
        /// The asking rank.
        rank: i32,
    },
    /// More of something than a limit allows.
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        found: usize,
        /// How many at most.
        limit: usize,
    },
    /// Device ids are missing from the set (INV-43); the text is the original's.
    MissingDevices {
        /// Lowest missing id.
        first: i32,
        /// Highest missing id.
        last: i32,
    },
    /// The number of local devices is none of 1, 4, 8, 16 (INV-43); the text contains the original's.
    DeviceCount {
        /// How many there are.
        found: usize,
    },
    /// A variable has a value that cannot be used.
    BadVariable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What would have been fine.
        expected: &'static str,
    },
    /// A rank that the system graph does not hold.
    UnknownRank {
        /// The rank.
        rank: i32,
    },
    /// The system has no network device to answer with.
    NoNet,
    /// The host did not answer.
    Machine(MachineError),
}

impl fmt::Display for TopoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xml(e) => write!(f, "{e}"),
            Self::Version { found, needed } => write!(
                f,
                "XML Topology has wrong version {found}, {needed} needed: convert the document, or read version 2 on purpose"
            ),
            Self::WrongRoot { found } => {
                write!(f, "the topology document starts with <{found}> where <system> was expected")
            }
            Self::MissingAttribute { node, attribute } => write!(
                f,
                "{node} of the topology document has no attribute '{attribute}', which the schema requires: add it"
            ),
            Self::BadAttribute { node, attribute, value, expected } => {
                write!(f, "{node} of the topology document has {attribute}='{value}' where {expected} was expected")
            }
            Self::Duplicate { what } => {
                write!(f, "the topology names {what} twice; every device must be named once")
            }
            Self::NoCpu => {
                write!(f, "the topology has no <cpu> element, so nothing connects its devices: add one per NUMA node")
            }
            Self::RankWithoutDevice { rank } => {
                write!(f, "rank {rank} has no accelerator in the topology: its PCI address is on no <pci> element")
            }
            Self::NoLocalRank { rank } => write!(
                f,
                "rank {rank} is not among the ranks given for topology discovery: pass every rank of the communicator"
            ),
            Self::TooMany { what, found, limit } => {
                write!(f, "the topology has {found} {what}, at most {limit} are supported")
            }
            Self::MissingDevices { first, last } => write!(
                f,
                "Unsupported topology. Devices with IDs {first} and {last} are part of topology but devices with those IDs are missing"
            ),
            Self::DeviceCount { found } => {
                write!(f, "Unsupported topology. Communicator expects 1, 4, 8, or 16 local devices but got {found}")
            }
            Self::BadVariable { name, value, expected } => {
                write!(f, "{name}='{value}' cannot be used: {expected} was expected")
            }
            Self::UnknownRank { rank } => {
                write!(f, "rank {rank} is not in the system graph of this node: only local ranks can be asked for")
            }
            Self::NoNet => write!(f, "the system has no network device: the net plug-in offers none on this node"),
            Self::Machine(e) => write!(f, "topology discovery stopped: {e}"),
        }
    }
}

impl std::error::Error for TopoError {}

impl From<XmlError> for TopoError {
    fn from(e: XmlError) -> Self {
        Self::Xml(e)
    }
}

impl From<MachineError> for TopoError {
    fn from(e: MachineError) -> Self {
        Self::Machine(e)
    }
}
