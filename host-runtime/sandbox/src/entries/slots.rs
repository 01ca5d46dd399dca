//! The 37 entries: one row each gives slot, names, type and wrapper.
//!
//! A wrapper is a method of [`Forward`]: the guard first, then the slot, in the instance that its [`EntryCall`] names (a
//! communicator's, or the library instance), for as long as that one says. Statuses pass verbatim. Slots 14 and 15 take no communicator, but a
//! routing id is one of a communicator's device maps: only the instance of one can answer them.

use wasmtime::component::{ComponentExportIndex, Resource};

use crate::bindings::exports::neuron::nccom::collectives::{
    CommInfo, EncPattern, NetConnectProgress, NetConnectivity, NetDestAddr, NetOpsInfo, NetSrcAddr, NeuronDeviceInfo,
    OfiCommType, PtrType, VersionInfo,
};
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::entries::Forward;
use crate::error::Error;
use crate::objects::{
    CommunicatorObject, ConnectorObject, NetCommObject, RegionObject, RegistrationObject, RequestObject,
};
use crate::status::Status;
use crate::store::{EntryCall, Instance, Patience};

type Comm = Resource<CommunicatorObject>;
type NetComm = Resource<NetCommObject>;
type Region = Resource<RegionObject>;
type Registration = Resource<RegistrationObject>;
type Request = Resource<RequestObject>;
type Answer<T> = Result<T, NrtStatus>;

macro_rules! slots {
    (
        0 $wit0:literal $orig0:literal ;
        $($guard:ident $n:literal $wit:literal $orig:literal $wrapper:ident ($($p:ident : $t:ty),*) -> $r:ty ;)*
    ) => {
        /// Export names in slot order.
        pub const NAMES: [&str; 37] = [$wit0, $($wit),*];
        /// The originals' names in slot order.
        pub const ORIGINALS: [&str; 37] = [$orig0, $($orig),*];

        /// Type-checks the export found for `slot`.
        pub(super) fn check(instance: &Instance, slot: usize, index: &ComponentExportIndex) -> Result<(), String> {
            match slot {
                0 => instance.typed::<(u32,), VersionInfo>($orig0, Patience::Usual, index),
                $($n => instance.typed::<($($t,)*), Answer<$r>>($orig, Patience::Usual, index),)*
                _ => Err("there is no such slot".into()),
            }
        }

        impl Forward {
            $(
                #[doc = concat!("Slot ", stringify!($n), ": the wrapper of `", $orig, "`.")]
                #[allow(clippy::too_many_arguments)]
                pub fn $wrapper(&self, call: EntryCall<'_> $(, $p: $t)*) -> Result<$r, Error> {
                    let loaded = self.$guard($orig)?;
                    let instance = call.instance.unwrap_or(&loaded.instance);
                    let index = index(instance, $n, $orig)?;
                    let params = ($($p,)*);
                    let answer =
                        instance.call::<($($t,)*), Answer<$r>>($orig, call.patience, call.group, index, params)?;
                    finish($orig, instance, answer)
                }
            )*

            /// Asks the guard of every wrapper, in slot order from 1: `None` where it would go on to the slot. After a failed
            /// load all answer NRT_FAILURE (INV-06).
            pub fn guards(&self) -> Vec<(&'static str, Option<Status>)> {
                vec![$(($orig, self.$guard($orig).err().map(|e| e.status()))),*]
            }
        }
    };
}

/// The two wrappers without a guard.
pub const EXEMPT: [&str; 2] = ["neuronGetVersionInfo", "neuronNetworkProxyProgress"];

/// The entry of an instance's own library: after a swap an old instance is still called through the old indices.
pub(super) fn index<'a>(
    instance: &'a Instance,
    slot: usize,
    entry: &'static str,
) -> Result<&'a ComponentExportIndex, Error> {
    let missing =
        || Error::NotLoaded { entry, sentinel: format!("slot {slot} of {} is empty", instance.library().name) };
    instance.library().slot(slot).ok_or_else(missing)
}

fn finish<T>(entry: &'static str, instance: &Instance, answer: (Answer<T>, Vec<String>)) -> Result<T, Error> {
    let (answer, causes) = answer;
    answer.map_err(|status| {
        let tenant = instance.tenant();
        // A client of a service causes one with each request that fails.
        if tenant.may_log() {
            let plugin = &instance.library().name;
            tracing::error!(tenant = %tenant.name, plugin = %plugin, "failed {entry} request to NCCL");
        }
        let tenant = tenant.name.clone();
        // An error of "success" is a contradiction; it must not look like one to the caller.
        let status = if status.eq_success() { Status::FAILURE } else { Status::from(&status) };
        Error::Entry { entry, plugin: instance.library().name.clone(), tenant, status, causes }
    })
}

impl NrtStatus {
    fn eq_success(&self) -> bool {
        matches!(self, NrtStatus::Success | NrtStatus::Other(0))
    }
}

slots! {
    0 "neuron-get-version-info" "neuronGetVersionInfo";
    guarded 1 "neuron-get-unique-id" "neuronGetUniqueId" get_unique_id(rank_n: i32, hint: &str) -> Vec<u8>;
    guarded 2 "neuron-init-global-comm" "neuronInitGlobalComm" init_global_comm(g_dev_id: i32, g_dev_count: i32, dev: &NeuronDeviceInfo, root: Option<&str>, hint: &str) -> Comm;
    guarded 3 "neuron-init-comm" "neuronInitComm" init_comm(rank_n: i32, id: &[u8], rank: i32, dev: &NeuronDeviceInfo, bypass_graph: bool) -> Comm;
    guarded 4 "neuron-build-graph-comm" "neuronBuildGraphComm" build_graph_comm(comm: Comm) -> ();
    guarded 5 "neuron-get-comm-info" "neuronGetCommInfo" get_comm_info(comm: Comm, want_peers: bool) -> CommInfo;
    guarded 6 "neuron-free-comm" "neuronFreeComm" free_comm(comm: Comm) -> ();
    guarded 7 "neuron-expand-connectivity" "neuronExpandConnectivity" expand_connectivity(comm: Comm, kind: NetConnectivity) -> ();
    guarded 8 "neuron-start-network-proxy" "neuronStartNetworkProxy" start_network_proxy(comm: Comm, stream: u32, bb: u32, ops: &[NetOpsInfo], src: &[NetSrcAddr], dst: &[NetDestAddr]) -> ();
    guarded 9 "neuron-stop-network-proxy" "neuronStopNetworkProxy" stop_network_proxy(comm: Comm, stream: u32) -> ();
    exempt 10 "neuron-network-proxy-progress" "neuronNetworkProxyProgress" network_proxy_progress(comm: Comm, stream: u32, bb: u32, idle: bool, done: bool) -> (bool, bool);
    guarded 11 "neuron-bootstrap-send" "neuronBootstrapSend" bootstrap_send(comm: Comm, peer: i32, data: &[u8], hint: &str) -> ();
    guarded 12 "neuron-bootstrap-recv" "neuronBootstrapRecv" bootstrap_recv(comm: Comm, peer: i32, bytes: u64, hint: &str) -> Vec<u8>;
    guarded 13 "neuron-bootstrap-all-gather" "neuronBootstrapAllGather" bootstrap_all_gather(comm: Comm, data: &[u8], hint: &str) -> Vec<u8>;
    guarded 14 "neuron-preferred-nc-rid-nic" "neuronPreferredNcRidNic" preferred_nc_rid_nic(nc: u32, rid: u32) -> i32;
    guarded 15 "neuron-preferred-nc-rid-nic-bdf" "neuronPreferredNcRidNicBdf" preferred_nc_rid_nic_bdf(nc: u32, rid: u32) -> String;
    guarded 16 "neuron-net-reg-mr" "neuronNetRegMr" net_reg_mr(comm: Comm, pattern: EncPattern, channel: i32, is_send: bool, which: OfiCommType, data: Region, offset: u64, bytes: u64, kind: PtrType) -> Registration;
    guarded 17 "neuron-net-dereg-mr" "neuronNetDeregMr" net_dereg_mr(comm: Comm, pattern: EncPattern, channel: i32, is_send: bool, which: OfiCommType, mhandle: Registration) -> ();
    guarded 18 "neuron-get-peer-device-id" "neuronGetPeerDeviceId" get_peer_device_id(comm: Comm, peer: i32) -> i32;
    guarded 19 "neuron-set-affinity" "neuronSetAffinity" set_affinity(comm: Comm, mask: Option<&[u64]>, core: i32) -> Vec<u64>;
    guarded 20 "neuron-get-net-connector" "neuronGetNetConnector" get_net_connector(comm: Comm, pattern: EncPattern, channel: i32, is_send: bool) -> Resource<ConnectorObject>;
    guarded 21 "neuron-init-net" "neuronInitNet" init_net(root: Option<&str>) -> ();
    guarded 22 "neuron-fini-plugin" "neuronFiniPlugin" fini_plugin() -> ();
    guarded 23 "neuron-get-ofi-handle" "neuronGetOFIHandle" get_ofi_handle() -> u64;
    guarded 24 "neuron-net-listen" "neuronNetListen" net_listen(dev: i32) -> (Vec<u8>, NetComm);
    guarded 25 "neuron-net-connect" "neuronNetConnect" net_connect(dev: i32, handle: &[u8]) -> NetConnectProgress;
    guarded 26 "neuron-net-accept" "neuronNetAccept" net_accept(listen: NetComm) -> Option<NetComm>;
    guarded 27 "neuron-net-reg-mr-og" "neuronNetRegMrOG" net_reg_mr_og(comm: NetComm, data: Region, offset: u64, bytes: u64, kind: PtrType) -> Registration;
    guarded 28 "neuron-net-dereg-mr-og" "neuronNetDeregMrOG" net_dereg_mr_og(comm: NetComm, mhandle: Registration) -> ();
    guarded 29 "neuron-net-get-mr-key" "neuronNetGetMrKey" net_get_mr_key(mhandle: Registration) -> u64;
    guarded 30 "neuron-net-isend" "neuronNetIsend" net_isend(comm: NetComm, data: Region, offset: u64, bytes: u64, mhandle: Registration) -> Option<Request>;
    guarded 31 "neuron-net-irecv" "neuronNetIrecv" net_irecv(comm: NetComm, data: Region, offset: u64, bytes: u64, mhandle: Registration) -> Option<Request>;
    guarded 32 "neuron-net-iflush" "neuronNetIflush" net_iflush(comm: NetComm, data: Region, offset: u64, bytes: u64, mhandle: Registration) -> Option<Request>;
    guarded 33 "neuron-net-test" "neuronNetTest" net_test(request: Request) -> (bool, u64);
    guarded 34 "neuron-net-close-send" "neuronNetCloseSend" net_close_send(comm: NetComm) -> ();
    guarded 35 "neuron-net-close-recv" "neuronNetCloseRecv" net_close_recv(comm: NetComm) -> ();
    guarded 36 "neuron-net-close-listen" "neuronNetCloseListen" net_close_listen(comm: NetComm) -> ();
}
