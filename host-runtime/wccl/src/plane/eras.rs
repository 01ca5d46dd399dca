//! What a runtime counts, by the plugin that served meanwhile.

use std::collections::BTreeMap;

use crate::plane::host::Host;
use hw_bridge::os::lock::lock;
use sandbox::limits::MAX_ERAS;
use sandbox::tenant::Tenant;

/// Name, type and meaning of what is reported.
pub const FAMILIES: [(&str, &str, &str); 15] = [
    ("wccl_component_calls_total", "counter", "Crossings between host and plugin, both ways"),
    ("wccl_host_calls_total", "counter", "Of these, from a plugin to the host"),
    ("wccl_entries_total", "counter", "Library entries called"),
    ("wccl_traps_total", "counter", "Instances that trapped, ran out of time or over a limit"),
    ("wccl_tasks_total", "counter", "Background tasks started"),
    ("wccl_tasks", "gauge", "Background tasks alive"),
    ("wccl_communicators", "gauge", "Communicators alive, one a rank"),
    ("wccl_instances", "gauge", "Instances of plugins alive"),
    ("wccl_instance_memory_bytes", "gauge", "Linear memory of these"),
    ("wccl_sockets", "gauge", "Bootstrap sockets open"),
    ("wccl_published_names", "gauge", "Names published on this machine"),
    ("wccl_operations_total", "counter", "Operations that ranks completed"),
    ("wccl_moved_bytes_total", "counter", "Bytes that ranks copied or read for reductions"),
    ("wccl_waits_total", "counter", "Waits of ranks that did not find their condition at once"),
    ("wccl_operation_failures_total", "counter", "Operations that failed"),
];

/// Values of [`FAMILIES`], in that order.
pub type Values = [u64; FAMILIES.len()];

/// A runtime's counters by the plugin that served while they grew, so that none of them goes back when another takes over.
#[derive(Debug, Default)]
pub(crate) struct Eras {
    /// File and version of the plugin that serves, and what the counters were when it began.
    serving: Option<(Plugin, Values)>,
    past: BTreeMap<Plugin, Values>,
    /// The most that each has been seen at.
    seen: Values,
}

/// File and version.
pub(crate) type Plugin = (String, String);

impl Eras {
    /// Takes a look: `plugin` serves, and the counters are at `now`.
    fn look(&mut self, plugin: Plugin, now: Values) {
        for (seen, now) in self.seen.iter_mut().zip(now) {
            *seen = now.max(*seen);
        }
        let changed = self.serving.take_if(|(serves, _)| *serves != plugin);
        if let Some((before, began)) = changed {
            let known = self.past.len() < MAX_ERAS || self.past.contains_key(&before);
            let sum = self.past.entry(if known { before } else { Plugin::default() }).or_default();
            *sum = std::array::from_fn(|i| sum[i] + (self.seen[i] - began[i]));
        }
        // What was counted before the first look was counted while the first one was loaded.
        let began = if self.past.is_empty() { Values::default() } else { self.seen };
        self.serving.get_or_insert((plugin, began));
    }

    /// What was counted while each served.
    pub(crate) fn all(&self) -> Vec<(String, String, Values)> {
        let mut all = self.past.clone();
        if let Some((plugin, began)) = &self.serving {
            let sum = all.entry(plugin.clone()).or_default();
            *sum = std::array::from_fn(|i| sum[i] + (self.seen[i] - began[i]));
        }
        all.into_iter().map(|((plugin, version), values)| (plugin, version, values)).collect()
    }
}

/// Notes which plugin serves, where that has just changed: what was counted so far is the other one's.
pub(crate) fn note(host: &Host) {
    look(host, &mut lock(&host.eras));
}

/// Which plugin serves, and the values now.
pub(crate) fn look(host: &Host, eras: &mut Eras) -> (Plugin, Values) {
    let loaded = host.forward.loaded().ok();
    let plugin = loaded.map_or_else(Plugin::default, |l| (l.library.name.clone(), l.library.version().into()));
    let values = values(&host.tenant);
    eras.look(plugin.clone(), values);
    (plugin, values)
}

fn values(tenant: &Tenant) -> Values {
    let (counters, moved, holds) = (&tenant.counters, tenant.moved(), tenant.holds());
    [
        counters.component_calls(),
        counters.host_calls(),
        counters.entries(),
        counters.traps(),
        counters.tasks(),
        tenant.tasks_alive() as u64,
        tenant.communicators() as u64,
        holds.instances as u64,
        holds.memory as u64,
        holds.sockets as u64,
        holds.names as u64,
        moved.ops,
        moved.copied.wrapping_add(moved.reduced),
        moved.waits,
        moved.failures,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_never_goes_back_and_is_whose_it_is() {
        let (old, new) = (("old.wasm".to_string(), "1".to_string()), ("new.wasm".to_string(), "2".to_string()));
        let mut eras = Eras::default();
        let of = |eras: &Eras, plugin: &Plugin| {
            let all = eras.all();
            all.iter().find(|(file, version, _)| (file, version) == (&plugin.0, &plugin.1)).map(|e| e.2[0])
        };
        let look = |eras: &mut Eras, plugin: &Plugin, n: u64| eras.look(plugin.clone(), [n; FAMILIES.len()]);
        look(&mut eras, &old, 6);
        look(&mut eras, &old, 9);
        assert_eq!((of(&eras, &old), of(&eras, &new)), (Some(9), None));
        // What was counted up to the swap is the old one's.
        look(&mut eras, &new, 10);
        assert_eq!((of(&eras, &old), of(&eras, &new)), (Some(10), Some(0)));
        // A communicator that is just ending may be in no sum for a moment.
        look(&mut eras, &new, 14);
        look(&mut eras, &new, 12);
        assert_eq!((of(&eras, &old), of(&eras, &new)), (Some(10), Some(4)));
        look(&mut eras, &old, 15);
        look(&mut eras, &old, 17);
        assert_eq!((of(&eras, &old), of(&eras, &new)), (Some(12), Some(5)));
        for i in 0..2 * MAX_ERAS as u64 {
            look(&mut eras, &(format!("{i}.wasm"), String::new()), 17 + i);
        }
        assert!(eras.all().len() <= MAX_ERAS + 2);
        assert_eq!(eras.all().iter().map(|e| e.2[0]).sum::<u64>(), 17 + 2 * MAX_ERAS as u64 - 1);
    }
}
