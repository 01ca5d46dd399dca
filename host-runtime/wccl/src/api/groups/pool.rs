//! Communicators of replica groups, kept by the bytes of their bootstrap participants (INV-28).
//!
//! The pool knows a communicator as long as somebody holds it; the last [`PooledComm`] that is dropped frees it. What all
//! ranks of a group do to it (ask, drop) they do in the same order, as with every collective.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::api::communicator::Communicator;
use hw_bridge::os::lock::lock;

/// The key of a group: its bootstrap participants, u32 each, in order.
pub(super) fn key(bootstrap_participants: &[usize]) -> Vec<u8> {
    bootstrap_participants.iter().flat_map(|p| (*p as u32).to_le_bytes()).collect()
}

#[derive(Debug)]
struct Node {
    comm: Mutex<Communicator>,
    key: Vec<u8>,
    id: u32,
    stream: u32,
}

/// A pooled communicator. Clones, and further requests for the same bootstrap participants, are handles of the same one.
#[derive(Debug, Clone)]
pub struct PooledComm(Arc<Node>);

impl PooledComm {
    /// The communicator, for one caller at a time.
    pub fn lock(&self) -> MutexGuard<'_, Communicator> {
        lock(&self.0.comm)
    }

    /// The group's number on this rank, for messages; counted from 0.
    pub fn group_id(&self) -> u32 {
        self.0.id
    }

    /// The stream it was first asked for, 0 to 3.
    pub fn stream(&self) -> u32 {
        self.0.stream
    }

    /// The key: bytes of the bootstrap participants.
    pub fn key(&self) -> &[u8] {
        &self.0.key
    }

    /// Handles of it alive.
    pub fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Whether both are handles of one communicator.
    pub fn same(&self, other: &PooledComm) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The pool of one communicator.
#[derive(Debug, Default)]
pub(super) struct Pool {
    nodes: HashMap<Vec<u8>, Weak<Node>>,
    next: u32,
}

impl Pool {
    pub(super) fn find(&self, key: &[u8]) -> Option<PooledComm> {
        self.nodes.get(key).and_then(Weak::upgrade).map(PooledComm)
    }

    /// A number for a group that is not there yet.
    pub(super) fn next_id(&mut self) -> u32 {
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        id
    }

    pub(super) fn add(&mut self, key: Vec<u8>, id: u32, stream: u32, comm: Communicator) -> PooledComm {
        self.nodes.retain(|_, n| n.strong_count() > 0);
        let node = Arc::new(Node { comm: Mutex::new(comm), key, id, stream });
        self.nodes.insert(node.key.clone(), Arc::downgrade(&node));
        PooledComm(node)
    }

    /// Communicators alive.
    pub(super) fn alive(&self) -> usize {
        self.nodes.values().filter(|n| n.strong_count() > 0).count()
    }
}
