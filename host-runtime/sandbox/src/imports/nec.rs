//! The reverse leg: the 16 `nec` and 4 `nrt` host functions (reverse-abi 3, 4). The list is
//! [`crate::served::CALLBACKS`].
//!
//! No function here calls a library entry (INV-10), and none could: an instance on the stack is never entered again.
//! Most return no status (INV-11). What the original asserts ends the calling instance with the sentence of the assert.

use crate::text::line;
use hw_bridge::model::{
    MapError, MapFault, PodType, enc_get_recv_post_offset_bytes, enc_get_send_count_size_bytes,
    enc_get_send_offset_bytes, enc_set_recv_size_bytes, nec_inc_semaphore,
};
use wasmtime::component::Resource;

use crate::bindings::neuron::nrt::types::{InstanceInfo, NecPodType, NrtStatus, NrtVersion, PciBdf};
use crate::bindings::neuron::nrt::{nec, nrt};
use crate::objects::{HostMemObject, NetLibraryObject, SemaphoreObject};
use crate::status::Status;
use crate::store::HostState;
use hw_bridge::os::lock::lock;

/// The original's non-zero int for a bad argument.
const EINVAL: i32 = 22;

type Trap<T> = wasmtime::Result<T>;

/// An assert of the original: ends the caller.
fn assert_failed<T>(callback: &str, why: impl std::fmt::Display) -> Trap<T> {
    Err(wasmtime::format_err!("{callback}: {why}"))
}

impl nec::Host for HostState {
    fn nec_inc_semaphore(&mut self, sem_inc_addr: Resource<SemaphoreObject>, val: u32) -> Trap<()> {
        nec_inc_semaphore(&*self.table.get(&sem_inc_addr)?.0, val);
        Ok(())
    }

    fn nec_get_device_count(&mut self, array_size: u32) -> Trap<(i32, Vec<i32>)> {
        let all = self.tenant.device.available_devices();
        let shown = all.iter().take(array_size as usize).copied().collect();
        Ok((all.len() as i32, shown))
    }

    fn nec_get_device_pci_bdf(&mut self, neuron_dev: i32) -> Trap<Result<PciBdf, i32>> {
        Ok(match self.tenant.device.device_pci_bdf(neuron_dev) {
            Ok(b) => Ok(PciBdf { domain: b.domain, bus: b.bus, slot: b.slot, func: b.func }),
            Err(e) => {
                self.note(e.to_string());
                Err(-EINVAL)
            }
        })
    }

    fn nec_get_virtual_core_size(&mut self) -> Trap<Result<u32, NrtStatus>> {
        Ok(Ok(self.tenant.device.virtual_core_size()))
    }

    fn nec_build_port_and_rid_map(&mut self, dev: i32, mla: Vec<i32>, host: Vec<i32>) -> Trap<Result<(), NrtStatus>> {
        let built = lock(&self.tenant.maps).build(dev, &mla, &host);
        self.map_answer("nec_build_port_and_rid_map", built)
    }

    fn nec_is_mla_available(&mut self, dev: i32, mla: i32) -> Trap<bool> {
        let asked = lock(&self.tenant.maps).is_mla_available(dev, mla);
        asked.or_else(|e| assert_failed("nec_is_mla_available", e))
    }

    fn nec_mla_idx_to_rid(&mut self, dev: i32, mla: i32) -> Trap<i32> {
        let asked = lock(&self.tenant.maps).mla_idx_to_rid(dev, mla);
        asked.or_else(|e| assert_failed("nec_mla_idx_to_rid", e))
    }

    fn nec_rid_to_mla_idx(&mut self, dev: i32, rid: i32) -> Trap<i32> {
        let asked = lock(&self.tenant.maps).rid_to_mla_idx(dev, rid);
        asked.or_else(|e| assert_failed("nec_rid_to_mla_idx", e))
    }

    /// Re-enters the query API once, as the original does; that call asks nothing further, so the re-entry is bounded.
    fn nec_get_peer_mla_idx(&mut self, dev: i32, mla: i32, port: i32) -> Trap<i32> {
        if nrt::Host::nrt_get_instance_info(self)?.is_err() {
            return assert_failed("nec_get_peer_mla_idx", "the instance is not known");
        }
        let asked = lock(&self.tenant.maps).get_peer_mla_idx(dev, mla, port);
        asked.or_else(|e| assert_failed("nec_get_peer_mla_idx", e))
    }

    fn nec_get_p2p_pod_peer_node(&mut self, dev: u32, node: i32, distance: u32) -> Trap<Result<i32, i32>> {
        Ok(self.tenant.device.p2p_pod_peer_node(dev, node, distance).map_err(|e| {
            self.note(e.to_string());
            -EINVAL
        }))
    }

    fn nec_pod_node_can_access_peer_node(
        &mut self,
        pod_type: NecPodType,
        local_rid: u32,
        local_node: u32,
        remote_rid: u32,
        remote_node: u32,
    ) -> Trap<Result<i32, NrtStatus>> {
        let pod = PodType::from_number(pod_type as u32);
        let asked =
            self.tenant.device.pod_node_can_access_peer_node(pod, local_rid, local_node, remote_rid, remote_node);
        Ok(asked.map(i32::from).map_err(|e| self.fail(Status::INVALID, e.to_string())))
    }

    fn nec_ndl_printk(&mut self, str: String, action: u32) -> Trap<()> {
        if self.may_log() {
            tracing::info!(target: "NDL", tenant = %self.tenant.name, action, "{}", line(&str));
        }
        Ok(())
    }

    /// The one reshaped callback: `rank_n` is dropped, size and rank change places (INV-13).
    fn nec_get_dynamic_send_size_bytes(
        &mut self,
        mem: Resource<HostMemObject>,
        size: u64,
        dst: i32,
        _rank_n: i32,
    ) -> Trap<u64> {
        let mem = self.table.get(&mem)?.0.clone();
        let asked = enc_get_send_count_size_bytes(&lock(&mem), dst, size);
        asked.or_else(|e| assert_failed("nec_get_dynamic_send_size_bytes", e))
    }

    fn nec_get_dynamic_send_offset_bytes(
        &mut self,
        mem: Resource<HostMemObject>,
        size: u64,
        dst: i32,
        n: i32,
    ) -> Trap<u64> {
        let mem = self.table.get(&mem)?.0.clone();
        let asked = enc_get_send_offset_bytes(&lock(&mem), size, dst, n);
        asked.or_else(|e| assert_failed("nec_get_dynamic_send_offset_bytes", e))
    }

    fn nec_get_dynamic_recv_offset_bytes(
        &mut self,
        mem: Resource<HostMemObject>,
        size: u64,
        src: i32,
        n: i32,
    ) -> Trap<u64> {
        let mem = self.table.get(&mem)?.0.clone();
        let asked = enc_get_recv_post_offset_bytes(&lock(&mem), size, src, n);
        asked.or_else(|e| assert_failed("nec_get_dynamic_recv_offset_bytes", e))
    }

    fn nec_set_recv_size_bytes(
        &mut self,
        mem: Resource<HostMemObject>,
        bytes: u64,
        size: u64,
        src: i32,
        n: i32,
    ) -> Trap<()> {
        let mem = self.table.get(&mem)?.0.clone();
        let set = enc_set_recv_size_bytes(&lock(&mem), bytes, size, src, n);
        set.or_else(|e| assert_failed("nec_set_recv_size_bytes", e))
    }
}

impl HostState {
    fn map_answer(&mut self, callback: &str, answer: Result<(), MapError>) -> Trap<Result<(), NrtStatus>> {
        let e = match answer {
            Ok(()) => return Ok(Ok(())),
            Err(e) => e,
        };
        let status = match e.fault() {
            MapFault::Assertion => return assert_failed(callback, e),
            MapFault::Invalid => Status::INVALID,
            MapFault::Failure => Status::FAILURE,
        };
        Ok(Err(self.fail(status, e.to_string())))
    }
}

impl nrt::Host for HostState {
    fn nrt_get_total_vnc_count(&mut self) -> Trap<Result<u32, NrtStatus>> {
        Ok(Ok(self.tenant.device.total_vnc_count()))
    }

    fn nrt_get_instance_info(&mut self) -> Trap<Result<InstanceInfo, NrtStatus>> {
        let info = self.tenant.device.instance_info();
        Ok(Ok(InstanceInfo {
            family: info.family.number(),
            size: info.size.number(),
            arch_name: info.arch_name.clone(),
            device_revision: info.device_revision.clone(),
        }))
    }

    fn nrt_get_version(&mut self) -> Trap<Result<NrtVersion, NrtStatus>> {
        let v = self.tenant.device.version();
        Ok(Ok(NrtVersion {
            rt_major: v.rt_major,
            rt_minor: v.rt_minor,
            rt_patch: v.rt_patch,
            rt_maintenance: v.rt_maintenance,
            rt_detail: v.rt_detail.into(),
            git_hash: v.git_hash.into(),
        }))
    }

    fn nrt_get_libnccl_net(&mut self) -> Trap<Result<Resource<NetLibraryObject>, (i32, String)>> {
        Ok(crate::imports::net::handle(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MAX_LOG_LINE;
    use std::sync::{Arc, Mutex};

    use crate::abort::AbortToken;
    use crate::limits::Limits;
    use crate::tenant::limited;
    use hw_bridge::model::{HostMem, IncrementRegister};

    /// The host's own words about a guest's are as long as a guest's.
    #[test]
    fn a_line_is_one_and_has_an_end() {
        let long = "é".repeat(MAX_LOG_LINE);
        assert_eq!(line(&long).len(), MAX_LOG_LINE);
        assert_eq!(line("a\r\nERROR forged\u{2028}b"), "a  ERROR forged b");
    }

    fn state() -> HostState {
        HostState::new(limited(Limits::default()), None, AbortToken::new().unwrap(), None)
    }

    /// Proves INV-13.
    #[test]
    fn only_the_send_size_is_reshaped() {
        let mut s = state();
        let mem = HostMem::new(4).unwrap();
        for r in 0..4i32 {
            mem.set_send(r, 10 + r as u32, 100 + r as u32).unwrap();
            mem.set_recv_offset(r, 200 + r as u32).unwrap();
        }
        let shared = Arc::new(Mutex::new(mem));
        let handle = s.add(HostMemObject(shared.clone())).unwrap();
        let borrow = || Resource::<HostMemObject>::new_borrow(handle.rep());
        // Size 2, rank 3: with the operands in the callback's order the answer would be count[2] * 3 = 36.
        assert_eq!(nec::Host::nec_get_dynamic_send_size_bytes(&mut s, borrow(), 2, 3, 4).unwrap(), 13 * 2);
        // The world size is dropped: a wrong one changes nothing.
        assert_eq!(nec::Host::nec_get_dynamic_send_size_bytes(&mut s, borrow(), 2, 3, 99).unwrap(), 13 * 2);
        assert_eq!(nec::Host::nec_get_dynamic_send_offset_bytes(&mut s, borrow(), 2, 3, 4).unwrap(), 103 * 2);
        assert_eq!(nec::Host::nec_get_dynamic_recv_offset_bytes(&mut s, borrow(), 2, 3, 4).unwrap(), 203 * 2);
        // The offset getters pass all four on: a wrong world size is noticed.
        assert!(nec::Host::nec_get_dynamic_send_offset_bytes(&mut s, borrow(), 2, 3, 99).is_err());
        nec::Host::nec_set_recv_size_bytes(&mut s, borrow(), 40, 8, 1, 4).unwrap();
        assert_eq!(lock(&shared).recv_count(1).unwrap(), 5);
    }

    /// Proves INV-12.
    #[test]
    fn the_semaphore_callback_only_stores() {
        let mut s = state();
        let register = Arc::new(IncrementRegister::recording(8));
        let handle = s.add(SemaphoreObject(register.clone())).unwrap();
        for v in [3, 4] {
            nec::Host::nec_inc_semaphore(&mut s, Resource::new_borrow(handle.rep()), v).unwrap();
        }
        assert_eq!(register.recorded(), [3, 4]);
        assert_eq!(register.value(), 7);
    }

    #[test]
    fn what_the_original_asserts_ends_the_caller() {
        let mut s = state();
        let e = nec::Host::nec_mla_idx_to_rid(&mut s, 0, 40).unwrap_err().to_string();
        assert!(e.contains("nec_mla_idx_to_rid"), "{e}");
        assert!(nec::Host::nec_is_mla_available(&mut s, -1, 0).is_err());
        // A bad argument of a callback with a status is an answer, with its sentence.
        assert!(nec::Host::nec_build_port_and_rid_map(&mut s, 0, vec![0], vec![0, 1]).unwrap().is_err());
        assert!(nec::Host::nec_get_device_pci_bdf(&mut s, 99).unwrap().is_err());
        assert_eq!(s.take_causes().0.len(), 2);
    }
}
