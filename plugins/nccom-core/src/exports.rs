//! The 37 entries, the task entry and the life cycle. Thin: each finds the plan and calls the room that knows.
//!
//! A failure's sentence is logged once, here; the host shows it with the status. Entries of the net path answer
//! NRT_FAILURE with a sentence while no network is bound (C-31), never a trap.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;

use crate::bindings::exports::neuron::hw::task_entry;
use crate::bindings::exports::neuron::lifecycle::lifecycle;
use crate::bindings::exports::neuron::nccom::collectives::*;
use crate::bindings::neuron::hw::{affinity, log, net, proxy};
use crate::bindings::neuron::nrt::nrt;
use crate::connect::ConnectorKey;
use crate::fail::{Code, Failure, invalid};
use crate::host::{HostSockets, info, interface, socket_timeout};
use crate::plan::{self, CommPlan, Init};
use crate::sources;
use crate::{Release, state};

/// The exports of a release.
#[derive(Debug)]
pub struct Exports<R>(PhantomData<R>);

// A component has one thread: these are what its instance keeps from one call to the next.
thread_local! {
    static PLANS: RefCell<BTreeMap<u64, CommPlan>> = const { RefCell::new(BTreeMap::new()) };
    static NET: RefCell<NetState> = const { RefCell::new(NetState::Untried) };
}

/// The library's one attempt to bind the net plug-in (INV-90).
#[derive(Clone, Copy, PartialEq, Eq)]
enum NetState {
    Untried,
    None,
    Bound,
}

type Status<T> = Result<T, NrtStatus>;

/// Logs a failure and gives its status.
fn answer<T>(entry: &str, r: Result<T, Failure>) -> Status<T> {
    r.map_err(|f| {
        if !f.text.is_empty() {
            log::write(log::Level::Error, &format!("{entry}: {f}"));
        }
        f.code.status()
    })
}

fn with_plan<T>(comm: &Communicator, f: impl FnOnce(&mut CommPlan) -> Result<T, Failure>) -> Result<T, Failure> {
    let id = comm.id();
    PLANS.with_borrow_mut(|plans| match plans.get_mut(&id) {
        Some(p) => f(p),
        None => Err(Failure::new(Code::InvalidHandle, format!("this library has no plan of communicator {id}"))),
    })
}

/// The two entries that make a communicator: `entry` keeps its plan.
fn init(entry: &str, i: &Init<'_>) -> Status<Communicator> {
    init_net();
    let made = plan::init(i).map(|(comm, plan)| {
        PLANS.with_borrow_mut(|plans| plans.insert(comm.id(), plan));
        comm
    });
    answer(entry, made)
}

/// Binds the net plug-in if there is one; without one the library goes on (transports 5).
fn init_net() {
    let tried = NET.with_borrow(|n| *n != NetState::Untried);
    if tried {
        return;
    }
    let state = match nrt::nrt_get_libnccl_net() {
        Err((code, text)) => {
            info(&format!("NET/Plugin: libnccom-net.so load returned {code} : {text}"));
            NetState::None
        }
        Ok(handle) => {
            let bound = net::bind(&handle).and_then(|()| net::init()).and_then(|()| net::devices());
            match bound {
                Ok(n) if n > 0 => {
                    info(&format!("NET/Plugin: {} with {n} devices", net::name().unwrap_or_default()));
                    NetState::Bound
                }
                _ => {
                    info("OFI plugin initNet() failed is EFA enabled?");
                    NetState::None
                }
            }
        }
    };
    NET.with_borrow_mut(|n| *n = state);
}

fn no_network<T>(entry: &str) -> Status<T> {
    let text = match NET.with_borrow(|n| *n) {
        NetState::Bound => {
            "the network data path is not part of this library's release; every rank must be on one server"
        }
        _ => "no net plug-in is bound; every rank must be on one server, or install one",
    };
    answer(entry, Err(Failure::new(Code::Failure, text)))
}

fn version_info<R: Release>(n: u32) -> VersionInfo {
    let mut numbers = R::VERSION.split('.').map(|p| p.parse::<u64>().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    VersionInfo {
        major: next(),
        minor: next(),
        patch: next(),
        maintenance: next(),
        // Written only into a buffer that has room for them (INV-07).
        git_hash: (n > 0x2F).then(|| vec![0; 16]),
        compatibility_version: (n > 0x37).then_some(89),
    }
}

fn comm_info(i: crate::rings::CommInfo, p: &CommPlan) -> CommInfo {
    CommInfo {
        cluster_id: p.head.cluster_id,
        epoch: p.head.epoch,
        neuron_dev: i.neuron_dev,
        rank: i.rank,
        rank_n: i.rank_n,
        local_rank_n: i.local_rank_n,
        node: i.node,
        node_n: i.node_n,
        enable_pod: i.enable_pod,
        pod: i.pod,
        pod_n: i.pod_n,
        pod_node: i.pod_node,
        pod_node_n: i.pod_node_n,
        peers: i
            .peers
            .iter()
            .map(|p| PeerInfo {
                neuron_dev: p.neuron_dev,
                rid: p.rid,
                tpb_index: p.tpb_index,
                pod_node_id: p.pod_node_id,
            })
            .collect(),
        rings: i
            .rings
            .into_iter()
            .map(|r| RingInfo { prev: r.prev, next: r.next, user_ranks: r.user_ranks, duplicate: r.duplicate })
            .collect(),
        kangaring_paths: i.kangaring_paths,
        mla_cycles: i.mla_cycles,
    }
}

/// The original's packed layouts (reverse-abi 5.5, 5.6): what the native proxy reads.
fn pack_ops(ops: &[NetOpsInfo]) -> Vec<u8> {
    let mut all = Vec::with_capacity(ops.len() * 96);
    for o in ops {
        let mut b = [0u8; 96];
        b[..2].copy_from_slice(&o.sema_shift_offset.to_le_bytes());
        b[2] = u8::from(o.early_send_completion);
        b[3] = u8::from(o.early_recv_posting);
        for (at, v) in [
            (8, o.inc_send_handshake),
            (16, o.inc_send_complete),
            (24, o.inc_recv_handshake),
            (32, o.inc_recv_complete),
            (64, o.data_type_sz),
            (88, o.enc_channel),
        ] {
            b[at..at + 8].copy_from_slice(&v.to_le_bytes());
        }
        for (at, v) in [
            (40, o.tx_entry_cnt),
            (44, o.rx_entry_cnt),
            (48, o.net_idx_loop_size),
            (52, o.initial_send_credits),
            (56, o.ending_recv_credits),
            (76, o.basic_block_id),
            (80, o.func_rel_op_idx),
            (84, o.unrolled_count),
        ] {
            b[at..at + 4].copy_from_slice(&v.to_le_bytes());
        }
        b[72] = u8::from(o.is_dynamic_send_recv_sz);
        b[73] = u8::from(o.variable_peer);
        b[74] = u8::from(o.add_to_histogram);
        all.extend_from_slice(&b);
    }
    all
}

fn pack_entry(b: &mut [u8], net_op_idx: u32, complete: i32, addresses: [u64; 3], size: u32, mark: NetAddrMark) {
    b[..4].copy_from_slice(&net_op_idx.to_le_bytes());
    b[4..8].copy_from_slice(&complete.to_le_bytes());
    for (at, v) in [8, 16, 24].into_iter().zip(addresses) {
        b[at..at + 8].copy_from_slice(&v.to_le_bytes());
    }
    b[32..36].copy_from_slice(&size.to_le_bytes());
    b[36..40].copy_from_slice(&(mark as u32).to_le_bytes());
}

fn pack_src(src: &[NetSrcAddr]) -> Vec<u8> {
    let mut all = Vec::with_capacity(src.len() * 72);
    for e in src {
        let mut b = [0u8; 72];
        pack_entry(&mut b, e.net_op_idx, e.complete, [e.dev_addr, e.host_addr, e.nccl_mhandle], e.size, e.mark);
        b[40..48].copy_from_slice(&e.proxy_histogram_tag.to_le_bytes());
        b[48..52].copy_from_slice(&e.dst_rank.to_le_bytes());
        b[56..64].copy_from_slice(&e.dst_addr.to_le_bytes());
        b[64..72].copy_from_slice(&e.dst_nccl_mhandle.to_le_bytes());
        all.extend_from_slice(&b);
    }
    all
}

fn pack_dst(dst: &[NetDestAddr]) -> Vec<u8> {
    let mut all = Vec::with_capacity(dst.len() * 48);
    for e in dst {
        let mut b = [0u8; 48];
        pack_entry(&mut b, e.net_op_idx, e.complete, [e.dev_addr, e.host_addr, e.nccl_mhandle], e.size, e.mark);
        b[40..44].copy_from_slice(&e.src_rank.to_le_bytes());
        all.extend_from_slice(&b);
    }
    all
}

/// Passes a host function's status on; the host has kept its sentence.
fn passed<T>(r: Result<T, NrtStatus>) -> Result<T, Failure> {
    r.map_err(Failure::from)
}

impl<R: Release> Guest for Exports<R> {
    fn neuron_get_version_info(n: u32) -> VersionInfo {
        version_info::<R>(n)
    }

    fn neuron_get_unique_id(rank_n: i32, _hint: String) -> Status<Vec<u8>> {
        init_net();
        answer("neuronGetUniqueId", plan::unique_id(rank_n).map(|id| id.to_vec()))
    }

    fn neuron_init_global_comm(
        g_dev_id: i32,
        g_dev_count: i32,
        dev: NeuronDeviceInfo,
        root_comm_id: Option<String>,
        _hint: String,
    ) -> Status<Communicator> {
        let root = Ok(root_comm_id.as_deref());
        init(
            "neuronInitGlobalComm",
            &Init { rank: g_dev_id, nranks: g_dev_count, dev: &dev, sources: sources::tag::<R>(), root },
        )
    }

    fn neuron_init_comm(
        rank_n: i32,
        id: Vec<u8>,
        rank: i32,
        dev: NeuronDeviceInfo,
        _bypass_graph: bool,
    ) -> Status<Communicator> {
        init("neuronInitComm", &Init { rank, nranks: rank_n, dev: &dev, sources: sources::tag::<R>(), root: Err(&id) })
    }

    fn neuron_build_graph_comm(comm: &Communicator) -> Status<()> {
        answer("neuronBuildGraphComm", with_plan(comm, |p| p.build_graph::<R>(comm)))
    }

    fn neuron_get_comm_info(comm: &Communicator, want_peers: bool) -> Status<CommInfo> {
        answer("neuronGetCommInfo", with_plan(comm, |p| Ok(comm_info(p.comm_info(want_peers)?, p))))
    }

    fn neuron_free_comm(comm: &Communicator) -> Status<()> {
        let id = comm.id();
        let gone = PLANS.with_borrow_mut(|plans| plans.remove(&id));
        let r = gone.map(drop).ok_or_else(|| {
            Failure::new(Code::InvalidHandle, format!("communicator {id} is not known or already freed"))
        });
        answer("neuronFreeComm", r)
    }

    fn neuron_expand_connectivity(comm: &Communicator, kind: NetConnectivity) -> Status<()> {
        let r = match kind {
            NetConnectivity::Default => Ok(()),
            NetConnectivity::Mesh | NetConnectivity::Rdh => with_plan(comm, |p| p.expand(comm)),
        };
        answer("neuronExpandConnectivity", r)
    }

    fn neuron_start_network_proxy(
        comm: &Communicator,
        stream_id: u32,
        basic_block_id: u32,
        ops: Vec<NetOpsInfo>,
        src: Vec<NetSrcAddr>,
        dst: Vec<NetDestAddr>,
    ) -> Status<()> {
        let r = proxy::start(comm, stream_id, basic_block_id, &pack_ops(&ops), &pack_src(&src), &pack_dst(&dst));
        answer("neuronStartNetworkProxy", passed(r))
    }

    fn neuron_stop_network_proxy(comm: &Communicator, stream_id: u32) -> Status<()> {
        answer("neuronStopNetworkProxy", passed(proxy::stop(comm, stream_id)))
    }

    fn neuron_network_proxy_progress(
        comm: &Communicator,
        stream_id: u32,
        basic_block_id: u32,
        idle: bool,
        done: bool,
    ) -> Status<(bool, bool)> {
        // ANDed, never overwritten (INV-67, C-17).
        let r = proxy::progress(comm, stream_id, basic_block_id).map(|(i, d)| (idle && i, done && d));
        answer("neuronNetworkProxyProgress", passed(r).map_err(|f| Failure { code: Code::Other(1206), ..f }))
    }

    fn neuron_bootstrap_send(comm: &Communicator, peer: i32, data: Vec<u8>, hint: String) -> Status<()> {
        answer("neuronBootstrapSend", with_plan(comm, |p| p.group(comm)?.send(&HostSockets, peer, &data, &hint)))
    }

    fn neuron_bootstrap_recv(comm: &Communicator, peer: i32, bytes: u64, hint: String) -> Status<Vec<u8>> {
        let r = with_plan(comm, |p| {
            let most = crate::bootstrap::MAX_MESSAGE;
            let n = usize::try_from(bytes).ok().filter(|n| *n <= most);
            let n = n.ok_or_else(|| {
                invalid(format!("a bootstrap message has at most {most} bytes, {bytes} were asked for"))
            })?;
            p.group(comm)?.recv(&HostSockets, peer, n, &hint)
        });
        answer("neuronBootstrapRecv", r)
    }

    fn neuron_bootstrap_all_gather(comm: &Communicator, data: Vec<u8>, hint: String) -> Status<Vec<u8>> {
        answer("neuronBootstrapAllGather", with_plan(comm, |p| p.group(comm)?.all_gather(&HostSockets, &data, &hint)))
    }

    fn neuron_preferred_nc_rid_nic(nc: u32, rid: u32) -> Status<i32> {
        answer("neuronPreferredNcRidNic", preferred(nc, rid).map(|n| n.0))
    }

    fn neuron_preferred_nc_rid_nic_bdf(nc: u32, rid: u32) -> Status<String> {
        answer("neuronPreferredNcRidNicBdf", preferred(nc, rid).map(|n| n.1))
    }

    fn neuron_net_reg_mr(
        _comm: &Communicator,
        _pattern: EncPattern,
        _channel: i32,
        _is_send: bool,
        _which: OfiCommType,
        _data: &Region,
        _offset: u64,
        _bytes: u64,
        _kind: PtrType,
    ) -> Status<Registration> {
        no_network("neuronNetRegMr")
    }

    fn neuron_net_dereg_mr(
        _comm: &Communicator,
        _pattern: EncPattern,
        _channel: i32,
        _is_send: bool,
        _which: OfiCommType,
        _mhandle: Registration,
    ) -> Status<()> {
        no_network("neuronNetDeregMr")
    }

    fn neuron_get_peer_device_id(comm: &Communicator, peer: i32) -> Status<i32> {
        let r = with_plan(comm, |p| {
            let found = usize::try_from(peer).ok().and_then(|i| p.records.get(i));
            found
                .map(|r| r.dev)
                .ok_or_else(|| invalid(format!("rank {peer} is not one of the {} ranks", p.head.nranks)))
        });
        answer("neuronGetPeerDeviceId", r)
    }

    fn neuron_set_affinity(comm: &Communicator, override_mask: Option<Vec<u64>>, core: i32) -> Status<Vec<u64>> {
        let r = with_plan(comm, |p| {
            let saved = affinity::get();
            let near = p.near_cpus()?;
            // Near the device, but never outside what the thread may use: unless the caller names the CPUs.
            let inside: Vec<u64> =
                saved.iter().zip(near.iter().chain(std::iter::repeat(&0))).map(|(a, b)| a & b).collect();
            let mut mask = match override_mask {
                Some(m) => m,
                None if inside.iter().any(|w| *w != 0) => inside,
                None => saved.clone(),
            };
            if let Ok(nth) = usize::try_from(core) {
                let cpus: Vec<usize> = (0..mask.len() * 64).filter(|c| mask[c / 64] >> (c % 64) & 1 == 1).collect();
                if let Some(cpu) = cpus.get(nth % cpus.len().max(1)) {
                    mask = vec![0; mask.len()];
                    mask[cpu / 64] = 1 << (cpu % 64);
                }
            }
            passed(affinity::set(&mask))?;
            Ok(saved)
        });
        answer("neuronSetAffinity", r)
    }

    fn neuron_get_net_connector(
        comm: &Communicator,
        pattern: EncPattern,
        channel: i32,
        is_send: bool,
    ) -> Status<Connector> {
        let r = with_plan(comm, |p| {
            let none = || {
                let way = if is_send { "send" } else { "receive" };
                invalid(format!(
                    "rank {} has no {way} connector for pattern {pattern:?}, channel {channel}",
                    p.head.rank
                ))
            };
            let channel = u32::try_from(channel).map_err(|_| none())?;
            let ring = p.channels.as_ref().and_then(|c| c.rings.get(channel as usize)).ok_or_else(none)?;
            let peer = usize::try_from(if is_send { ring.next } else { ring.prev }).map_err(|_| none())?;
            match pattern {
                EncPattern::Ring => {
                    p.connectors.get(&ConnectorKey { peer, channel, is_send }).map(|c| c.duplicate()).ok_or_else(none)
                }
                _ => Err(none()),
            }
        });
        answer("neuronGetNetConnector", r)
    }

    fn neuron_init_net(_root_comm_id: Option<String>) -> Status<()> {
        init_net();
        answer("neuronInitNet", interface(None).and_then(|_| socket_timeout()).map(|_| ()))
    }

    fn neuron_fini_plugin() -> Status<()> {
        let r = match NET.with_borrow(|n| *n) {
            NetState::Bound => passed(net::fini()),
            _ => Ok(()),
        };
        NET.with_borrow_mut(|n| *n = NetState::Untried);
        answer("neuronFiniPlugin", r)
    }

    fn neuron_get_ofi_handle() -> Status<u64> {
        match NET.with_borrow(|n| *n) {
            NetState::Bound => Ok(1),
            _ => no_network("neuronGetOFIHandle"),
        }
    }

    fn neuron_net_listen(_dev: i32) -> Status<(Vec<u8>, NetComm)> {
        no_network("neuronNetListen")
    }

    fn neuron_net_connect(_dev: i32, _handle: Vec<u8>) -> Status<NetConnectProgress> {
        no_network("neuronNetConnect")
    }

    fn neuron_net_accept(_listen_comm: &NetComm) -> Status<Option<NetComm>> {
        no_network("neuronNetAccept")
    }

    fn neuron_net_reg_mr_og(
        _comm: &NetComm,
        _data: &Region,
        _offset: u64,
        _bytes: u64,
        _kind: PtrType,
    ) -> Status<Registration> {
        no_network("neuronNetRegMrOG")
    }

    fn neuron_net_dereg_mr_og(_comm: &NetComm, _mhandle: Registration) -> Status<()> {
        no_network("neuronNetDeregMrOG")
    }

    fn neuron_net_get_mr_key(_mhandle: &Registration) -> Status<u64> {
        no_network("neuronNetGetMrKey")
    }

    fn neuron_net_isend(
        _send_comm: &NetComm,
        _data: &Region,
        _offset: u64,
        _bytes: u64,
        _mhandle: &Registration,
    ) -> Status<Option<Request>> {
        no_network("neuronNetIsend")
    }

    fn neuron_net_irecv(
        _recv_comm: &NetComm,
        _data: &Region,
        _offset: u64,
        _bytes: u64,
        _mhandle: &Registration,
    ) -> Status<Option<Request>> {
        no_network("neuronNetIrecv")
    }

    fn neuron_net_iflush(
        _recv_comm: &NetComm,
        _data: &Region,
        _offset: u64,
        _bytes: u64,
        _mhandle: &Registration,
    ) -> Status<Option<Request>> {
        no_network("neuronNetIflush")
    }

    fn neuron_net_test(_request: &Request) -> Status<(bool, u64)> {
        no_network("neuronNetTest")
    }

    fn neuron_net_close_send(_send_comm: NetComm) -> Status<()> {
        no_network("neuronNetCloseSend")
    }

    fn neuron_net_close_recv(_recv_comm: NetComm) -> Status<()> {
        no_network("neuronNetCloseRecv")
    }

    fn neuron_net_close_listen(_listen_comm: NetComm) -> Status<()> {
        no_network("neuronNetCloseListen")
    }
}

/// The NIC nearest to a core, from the topology of a communicator of this instance. The two entries name none, and a routing id
/// means something only in the maps that `nec_build_port_and_rid_map` makes of the accelerators that take part in a group
/// (reverse-abi 3): maps made here for a group of our own would be what the next communicator of the device finds. So the
/// instance of a communicator answers, and the library instance, which has no group, says whom to ask.
fn preferred(nc: u32, rid: u32) -> Result<(i32, String), Failure> {
    PLANS.with_borrow_mut(|plans| match plans.values_mut().next() {
        Some(p) => p.system()?.preferred_net(nc, rid).map_err(|e| invalid(e.to_string())),
        None => Err(Failure::new(
            Code::Uninitialized,
            "routing ids are those of a communicator's device maps, and this instance has no communicator; ask the instance of one",
        )),
    })
}

impl<R: Release> task_entry::Guest for Exports<R> {
    fn run(kind: String, state: Vec<u8>, listener: Option<task_entry::Listener>) -> Status<()> {
        answer(&format!("task {kind}"), plan::run_task(&kind, &state, listener))
    }
}

impl<R: Release> lifecycle::Guest for Exports<R> {
    fn describe() -> lifecycle::Description {
        lifecycle::Description {
            name: R::NAME.into(),
            version: R::VERSION.into(),
            wire_compat: "nccom-bootstrap-3".into(),
            state_schema: R::STATE_SCHEMA,
            reads_schemas: state::READ.into(),
            schema_name: state::NAME.into(),
        }
    }

    fn quiesce(comm: &Communicator) -> Status<()> {
        // Entries run to their end before this one begins; there is nothing in the background to wait for.
        answer("quiesce", with_plan(comm, |p| p.park(comm)))
    }

    fn export_state(comm: &Communicator) -> Status<Vec<u8>> {
        answer("export-state", with_plan(comm, |p| Ok(p.export::<R>())))
    }

    fn import_state(comm: &Communicator, schema: u32, state: Vec<u8>) -> Status<()> {
        let r = CommPlan::import::<R>(comm, schema, &state).map(|plan| {
            PLANS.with_borrow_mut(|plans| plans.insert(comm.id(), plan));
        });
        answer("import-state", r)
    }

    fn resume(comm: &Communicator) -> Status<()> {
        // The sockets are fetched when they are needed: until then the other side could still go on with them.
        answer("resume", with_plan(comm, |_| Ok(())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rings::Ring;

    struct Probe;

    impl Release for Probe {
        const NAME: &'static str = "probe";
        const VERSION: &'static str = "2.31.24.0";
        const SOURCE: &'static str = "";
        const STATE_SCHEMA: u32 = 1;

        fn arrange(_: &[Ring], _: bool) -> Vec<Ring> {
            Vec::new()
        }
    }

    #[test]
    fn the_preferred_nic_is_asked_of_an_instance_with_a_communicator() {
        let e = preferred(0, 0).unwrap_err();
        assert_eq!(e.code, Code::Uninitialized);
        assert!(e.text.contains("this instance has no communicator; ask the instance of one"), "{e}");
    }

    /// Proves INV-07.
    #[test]
    fn the_probe_writes_only_what_fits() {
        for (n, hash, compat) in
            [(0, false, false), (47, false, false), (48, true, false), (55, true, false), (56, true, true)]
        {
            let v = version_info::<Probe>(n);
            assert_eq!((v.git_hash.is_some(), v.compatibility_version), (hash, compat.then_some(89)), "{n}");
            assert_eq!((v.major, v.minor, v.patch, v.maintenance), (2, 31, 24, 0));
            assert!(v.git_hash.is_none_or(|h| h == [0; 16]));
        }
    }
}
