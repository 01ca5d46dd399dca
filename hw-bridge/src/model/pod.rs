//! Pods: several servers joined by accelerator links (reverse-abi.md §3.5).
//!
//! The spec records the validity rule and leaves arithmetic and predicate open. The model: a P2P pod is a ring of its
//! nodes, closed at each position of the server, so equal routing ids reach one another across any two nodes; in a
//! SWITCH pod everything reaches everything; a NONE pod reaches nothing. The predicate is symmetric by construction.

use thiserror::Error;

/// Nodes of a SWITCH pod: hard-coded in the original.
pub const SWITCH_POD_NODES: u32 = 4;

/// `nec_pod_type_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum PodType {
    /// 0: the server is in no pod.
    #[default]
    None = 0,
    /// 1: accelerators are linked to those of other servers directly.
    P2p = 1,
    /// 2: accelerators of all servers hang on a switch.
    Switch = 2,
    /// 3: not a pod type; the original's marker for a bad one.
    Invalid = 3,
}

impl PodType {
    /// The type of a number; everything above 2 is [`PodType::Invalid`].
    pub fn from_number(number: u32) -> PodType {
        match number {
            0 => PodType::None,
            1 => PodType::P2p,
            2 => PodType::Switch,
            _ => PodType::Invalid,
        }
    }

    /// The original's number.
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// This server's place in its pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodConfig {
    /// What kind of pod.
    pub pod_type: PodType,
    /// Which pod.
    pub pod_id: u64,
    /// This server's node id in the pod.
    pub node_id: u32,
    /// `pod_sz`: nodes of the pod.
    pub pod_size: u32,
}

/// Why a pod query has no answer. The first two texts are the original's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PodError {
    /// The type is above 2.
    #[error("Invalid pod_type: {pod_type}; expected 0 (none), 1 (P2P) or 2 (switch)")]
    InvalidType {
        /// The type.
        pod_type: u32,
    },
    /// The node is not in the pod.
    #[error("Invalid pod_node_id: {node} (pod_size: {pod_size}) pod_type:{pod_type}; expected a node id below {limit}")]
    InvalidNode {
        /// The node id.
        node: i64,
        /// The pod's nodes.
        pod_size: u32,
        /// The pod's type.
        pod_type: u32,
        /// The first id that is too large.
        limit: u32,
    },
    /// A neighbour along a pod port was asked for where there are no such ports.
    #[error("the server has no P2P pod ports (pod_type:{pod_type}); ask for a pod's peer node only in a P2P pod")]
    NotP2p {
        /// The pod's type.
        pod_type: u32,
    },
    /// The accelerator does not exist.
    #[error("device {nec_dev_id} does not exist on this server; pass an id that nec_get_device_count lists")]
    NoSuchDevice {
        /// The device id.
        nec_dev_id: u32,
    },
}

impl PodConfig {
    /// The runtime's validity rule for this server's own node id.
    ///
    /// # Errors
    /// [`PodError::InvalidType`] or [`PodError::InvalidNode`].
    pub fn validate(&self) -> Result<(), PodError> {
        self.check_node(self.pod_type, i64::from(self.node_id))
    }

    /// P2P: below `pod_sz`; SWITCH: below 4; NONE: not checked.
    fn check_node(&self, pod_type: PodType, node: i64) -> Result<(), PodError> {
        let limit = match pod_type {
            PodType::None => return Ok(()),
            PodType::P2p => self.pod_size,
            PodType::Switch => SWITCH_POD_NODES,
            PodType::Invalid => {
                return Err(PodError::InvalidType { pod_type: pod_type.number() });
            }
        };
        if (0..i64::from(limit)).contains(&node) {
            Ok(())
        } else {
            Err(PodError::InvalidNode { node, pod_size: self.pod_size, pod_type: pod_type.number(), limit })
        }
    }

    /// The node at `port_distance` from `node` along a pod port: `(node + port_distance) mod pod_sz`.
    ///
    /// # Errors
    /// [`PodError::NotP2p`] outside a P2P pod, [`PodError::InvalidNode`] for a node that is not in it.
    pub fn p2p_peer_node(&self, node: i32, port_distance: u32) -> Result<i32, PodError> {
        if self.pod_type != PodType::P2p {
            return Err(PodError::NotP2p { pod_type: self.pod_type.number() });
        }
        self.check_node(PodType::P2p, i64::from(node))?;
        let peer = (i64::from(node) + i64::from(port_distance)) % i64::from(self.pod_size);
        // Below pod_sz; a pod of more than 2^31 nodes has no int for it.
        let pod_type = self.pod_type.number();
        i32::try_from(peer).map_err(|_| PodError::InvalidNode {
            node: peer,
            pod_size: self.pod_size,
            pod_type,
            limit: i32::MAX.unsigned_abs(),
        })
    }

    /// Whether an accelerator of one node reaches an accelerator of another over pod links. Symmetric; never in a NONE
    /// pod.
    ///
    /// # Errors
    /// [`PodError::InvalidType`]; [`PodError::InvalidNode`] if either node is not in the pod.
    pub fn can_access_peer_node(
        &self,
        pod_type: PodType,
        local_rid: u32,
        local_node_id: u32,
        remote_rid: u32,
        remote_node_id: u32,
    ) -> Result<bool, PodError> {
        self.check_node(pod_type, i64::from(local_node_id))?;
        self.check_node(pod_type, i64::from(remote_node_id))?;
        Ok(match pod_type {
            PodType::None | PodType::Invalid => false,
            PodType::P2p => local_node_id == remote_node_id || local_rid == remote_rid,
            PodType::Switch => true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pod(pod_type: PodType, node_id: u32, pod_size: u32) -> PodConfig {
        PodConfig { pod_type, pod_id: 1, node_id, pod_size }
    }

    #[test]
    fn pod_types_have_the_original_numbers() {
        for (number, kind) in [(0, PodType::None), (1, PodType::P2p), (2, PodType::Switch), (3, PodType::Invalid)] {
            assert_eq!((PodType::from_number(number), kind.number()), (kind, number));
        }
        assert_eq!(PodType::from_number(77), PodType::Invalid);
    }

    #[test]
    fn the_validity_rule_is_the_original_one() {
        assert_eq!(pod(PodType::None, 99, 0).validate(), Ok(()), "NONE is not checked");
        assert_eq!(pod(PodType::P2p, 7, 8).validate(), Ok(()));
        assert_eq!(
            pod(PodType::P2p, 8, 8).validate().unwrap_err().to_string(),
            "Invalid pod_node_id: 8 (pod_size: 8) pod_type:1; expected a node id below 8"
        );
        // A switch pod has 4 nodes whatever its size says.
        assert_eq!(pod(PodType::Switch, 3, 2).validate(), Ok(()));
        assert_eq!(
            pod(PodType::Switch, 4, 16).validate().unwrap_err().to_string(),
            "Invalid pod_node_id: 4 (pod_size: 16) pod_type:2; expected a node id below 4"
        );
        assert_eq!(
            pod(PodType::Invalid, 0, 4).validate().unwrap_err().to_string(),
            "Invalid pod_type: 3; expected 0 (none), 1 (P2P) or 2 (switch)"
        );
    }

    #[test]
    fn a_p2p_pod_is_a_ring_of_nodes() {
        let four = pod(PodType::P2p, 0, 4);
        assert_eq!([0, 1, 2, 3].map(|node| four.p2p_peer_node(node, 1)), [Ok(1), Ok(2), Ok(3), Ok(0)]);
        assert_eq!(four.p2p_peer_node(3, u32::MAX), Ok(2), "3 + 2^32 - 1 = 2 mod 4");
        assert!(matches!(four.p2p_peer_node(4, 1), Err(PodError::InvalidNode { node: 4, limit: 4, .. })));
        assert!(matches!(four.p2p_peer_node(-1, 1), Err(PodError::InvalidNode { node: -1, .. })));
        assert_eq!(pod(PodType::None, 0, 4).p2p_peer_node(0, 1), Err(PodError::NotP2p { pod_type: 0 }));
        assert!(pod(PodType::P2p, 0, 0).p2p_peer_node(0, 1).is_err());
    }

    #[test]
    fn access_depends_on_the_type_of_pod() {
        let four = pod(PodType::P2p, 0, 4);
        assert_eq!(four.can_access_peer_node(PodType::P2p, 5, 0, 5, 3), Ok(true));
        assert_eq!(four.can_access_peer_node(PodType::P2p, 5, 0, 6, 3), Ok(false));
        assert_eq!(four.can_access_peer_node(PodType::P2p, 5, 1, 6, 1), Ok(true));
        assert_eq!(four.can_access_peer_node(PodType::Switch, 5, 0, 6, 3), Ok(true));
        assert_eq!(four.can_access_peer_node(PodType::None, 5, 0, 5, 1), Ok(false));
        assert!(four.can_access_peer_node(PodType::P2p, 5, 0, 5, 4).is_err());
        assert!(four.can_access_peer_node(PodType::Invalid, 5, 0, 5, 1).is_err());
    }

    proptest! {
        #[test]
        fn access_is_symmetric_and_none_never_reaches(
            kind in 0u32..5, size in 0u32..6, a in (0u32..16, 0u32..6), b in (0u32..16, 0u32..6),
        ) {
            let kind = PodType::from_number(kind);
            let config = pod(kind, 0, size);
            let there = config.can_access_peer_node(kind, a.0, a.1, b.0, b.1);
            let back = config.can_access_peer_node(kind, b.0, b.1, a.0, a.1);
            prop_assert_eq!(there.ok(), back.ok());
            if kind == PodType::None {
                prop_assert_eq!(there, Ok(false));
            }
        }
    }
}
