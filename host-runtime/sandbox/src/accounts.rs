//! What a tenant has used: counters, and how many it has of what is bounded.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hw_bridge::group::flight;
use hw_bridge::memory::links::LinkServer;
use hw_bridge::os::lock::lock;

/// What a communicator has of its tenant.
#[derive(Debug, Clone)]
pub struct Account {
    /// The tenant's number; links between different ones are refused.
    pub tenant: u64,
    /// Where its memory is granted to peers.
    pub links: Arc<LinkServer>,
    /// What it counts.
    pub counters: Arc<TenantCounters>,
}

/// Counters of one tenant. `component_calls` counts every crossing between host and guest, in both directions.
#[derive(Debug, Default)]
pub struct TenantCounters {
    component_calls: AtomicU64,
    host_calls: AtomicU64,
    traps: AtomicU64,
    throttled: AtomicU64,
    entries: AtomicU64,
    tasks: AtomicU64,
    refused: Mutex<BTreeMap<&'static str, u64>>,
    /// What the data planes of communicators that are gone counted.
    moved: Mutex<flight::Counters>,
}

impl TenantCounters {
    pub(crate) fn entering(&self) {
        self.component_calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn calling_host(&self) {
        self.component_calls.fetch_add(1, Ordering::Relaxed);
        self.host_calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn trapped(&self) {
        self.traps.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn throttled(&self) {
        self.throttled.fetch_add(1, Ordering::Relaxed);
    }

    /// Times that a plugin had used up its tenant's share of a core and slept.
    pub fn throttles(&self) -> u64 {
        self.throttled.load(Ordering::Relaxed)
    }

    pub(crate) fn entry(&self) {
        self.entries.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn task(&self) {
        self.tasks.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a refusal by the policy's key, such as `network.listen`.
    pub(crate) fn refused(&self, limit: &'static str) {
        *lock(&self.refused).entry(limit).or_default() += 1;
    }

    /// Refusals so far, by the policy's key.
    pub fn refusals(&self) -> BTreeMap<&'static str, u64> {
        lock(&self.refused).clone()
    }

    pub(crate) fn moved(&self, by: flight::Counters) {
        let mut sum = lock(&self.moved);
        *sum = *sum + by;
    }

    /// What the data planes of communicators that are gone counted.
    pub(crate) fn gone(&self) -> flight::Counters {
        *lock(&self.moved)
    }

    /// Background tasks started.
    pub fn tasks(&self) -> u64 {
        self.tasks.load(Ordering::Relaxed)
    }

    /// Crossings so far, host to guest and guest to host.
    pub fn component_calls(&self) -> u64 {
        self.component_calls.load(Ordering::Relaxed)
    }

    /// Of these, guest to host.
    pub fn host_calls(&self) -> u64 {
        self.host_calls.load(Ordering::Relaxed)
    }

    /// Instances that trapped, ran out of time or over a limit.
    pub fn traps(&self) -> u64 {
        self.traps.load(Ordering::Relaxed)
    }

    /// Library entries called.
    pub fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }
}

/// How many of something a tenant has, in all its instances together. Clones are one count.
#[derive(Debug, Clone, Default)]
pub struct Quota(Arc<AtomicUsize>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub struct Counted(Quota);

impl Quota {
    /// Counts one more, unless there are `most` already.
    pub fn take(&self, most: usize) -> Option<Counted> {
        let more = |n| (n < most).then_some(n + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Counted(self.clone()))
    }

    /// Counts one more, however many there are.
    pub(crate) fn count(&self) -> Counted {
        self.0.fetch_add(1, Ordering::Relaxed);
        Counted(self.clone())
    }

    /// How many there are now.
    pub(crate) fn alive(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
