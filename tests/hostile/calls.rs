//! Calls that do not come back: loops, traps, memory and stack, in every entry.

use anyhow::Result;
use sandbox::bindings::exports::neuron::nccom::collectives::{
    EncPattern, HistogramConfig, NetConnectivity, NeuronDeviceInfo, OfiCommType, PtrType,
};
use sandbox::bindings::neuron::nrt::types::NecPodType;
use sandbox::entries::{NAMES, ORIGINALS, Resource};
use sandbox::error::Error;
use sandbox::store::EntryCall;
use tests::zoo::{Body, Plugin, REPLY, SCRATCH, probe};
use wccl::{CommOptions, Runtime};

use crate::zoo::{Animal, Group, animal, gives_up, said};

fn device() -> NeuronDeviceInfo {
    NeuronDeviceInfo {
        nec_dev_id: 0,
        mla_idx: 0,
        tpb_idx: 0,
        host_device_id: 0,
        routing_id: 0,
        pod_id: 0,
        pod_type: NecPodType::None,
        pod_node_id: 0,
        virtual_server_id: 0,
        histogram: HistogramConfig {
            enable: false,
            bucket_usecs: 0,
            num_buckets: 0,
            per_neff_warmup: 0,
            warmup: 0,
            output_path: String::new(),
        },
    }
}

/// Calls the entry of a slot, with anything; the handles name nothing that exists.
fn enter(rt: &Runtime, slot: usize) -> Result<(), Error> {
    let f = rt.forward();
    fn borrow<T: 'static>() -> Resource<T> {
        Resource::new_borrow(0)
    }
    let ring = EncPattern::Ring;
    let (bytes, call) = ([0; 128], EntryCall::library());
    match slot {
        0 => f.version_info().map(drop),
        1 => f.get_unique_id(call, 1, "").map(drop),
        2 => f.init_global_comm(call, 0, 1, &device(), None, "").map(drop),
        3 => f.init_comm(call, 1, &bytes, 0, &device(), false).map(drop),
        4 => f.build_graph_comm(call, borrow()),
        5 => f.get_comm_info(call, borrow(), true).map(drop),
        6 => f.free_comm(call, borrow()),
        7 => f.expand_connectivity(call, borrow(), NetConnectivity::Mesh),
        8 => f.start_network_proxy(call, borrow(), 0, 0, &[], &[], &[]),
        9 => f.stop_network_proxy(call, borrow(), 0),
        10 => f.network_proxy_progress(call, borrow(), 0, 0, true, true).map(drop),
        11 => f.bootstrap_send(call, borrow(), 0, &[], ""),
        12 => f.bootstrap_recv(call, borrow(), 0, 0, "").map(drop),
        13 => f.bootstrap_all_gather(call, borrow(), &[], "").map(drop),
        14 => f.preferred_nc_rid_nic(call, 0, 0).map(drop),
        15 => f.preferred_nc_rid_nic_bdf(call, 0, 0).map(drop),
        16 => f
            .net_reg_mr(call, borrow(), ring, 0, true, OfiCommType::NetSendComm, borrow(), 0, 0, PtrType::Host)
            .map(drop),
        17 => f.net_dereg_mr(call, borrow(), ring, 0, true, OfiCommType::NetSendComm, Resource::new_own(0)),
        18 => f.get_peer_device_id(call, borrow(), 0).map(drop),
        19 => f.set_affinity(call, borrow(), None, 0).map(drop),
        20 => f.get_net_connector(call, borrow(), ring, 0, true).map(drop),
        21 => f.init_net(call, None),
        22 => f.fini_plugin(call),
        23 => f.get_ofi_handle(call).map(drop),
        24 => f.net_listen(call, 0).map(drop),
        25 => f.net_connect(call, 0, &bytes).map(drop),
        26 => f.net_accept(call, borrow()).map(drop),
        27 => f.net_reg_mr_og(call, borrow(), borrow(), 0, 0, PtrType::Host).map(drop),
        28 => f.net_dereg_mr_og(call, borrow(), Resource::new_own(0)),
        29 => f.net_get_mr_key(call, borrow()).map(drop),
        30 => f.net_isend(call, borrow(), borrow(), 0, 0, borrow()).map(drop),
        31 => f.net_irecv(call, borrow(), borrow(), 0, 0, borrow()).map(drop),
        32 => f.net_iflush(call, borrow(), borrow(), 0, 0, borrow()).map(drop),
        33 => f.net_test(call, Resource::new_own(0)).map(drop),
        34 => f.net_close_send(call, Resource::new_own(0)),
        35 => f.net_close_recv(call, Resource::new_own(0)),
        36 => f.net_close_listen(call, Resource::new_own(0)),
        _ => unreachable!("there are 37 slots"),
    }
}

/// The same crime in each entry but the probe, which must let the plugin in.
fn everywhere(what: &str, crime: &'static str, cause: &str) -> Animal {
    let cases = (1..NAMES.len()).map(|slot| {
        let attack = move |cage: &crate::zoo::Cage| {
            let mut p = Plugin::lone_rank()?;
            p.extra(DEEP);
            p.set(NAMES[slot], Body::Wat(format!("{crime} unreachable")));
            said(enter(&cage.open(&p)?, slot))
        };
        let attack: crate::zoo::Attack = Box::new(attack);
        (vec![("entry", ORIGINALS[slot].to_string())], attack)
    });
    Animal {
        what: format!("an entry that {what}"),
        sentence: format!("plugin animal.wasm stopped in {{entry}} on tenant hostile: {cause}; data in flight goes on"),
        cases: cases.collect(),
    }
}

const DEEP: &str = "(func $deep (call $deep) (drop (i32.load (i32.const 0))))";

pub fn group() -> Group {
    let mut animals = vec![
        everywhere("traps", "", "wasm trap: wasm `unreachable` instruction executed"),
        everywhere("runs for ever", "(loop $again (br $again))", "the call used more than its 60ms of guest time"),
        everywhere(
            "takes memory without end",
            "(loop $more (br_if $more (i32.ne (memory.grow (i32.const 16)) (i32.const -1))))",
            "the instance asked for 4325376 bytes of memory, its limit is 4194304",
        ),
        everywhere("calls itself without end", "(call $deep)", "the instance used more than its 524288 bytes of stack"),
    ];
    animals.push(animal(
        "a probe that lets itself in, and runs for ever when it is asked again",
        "plugin animal.wasm stopped in neuronGetVersionInfo on tenant hostile: the call used more than its 60ms of guest time; data in flight goes on",
        |cage| {
            let mut p = Plugin::lone_rank()?;
            p.extra("(global $asked (mut i32) (i32.const 0))");
            let again = "(if (global.get $asked) (then (loop $again (br $again)))) (global.set $asked (i32.const 1))";
            p.body(NAMES[0], format!("{again} {}", probe(Some(89))));
            said(enter(&cage.open(&p)?, 0))
        },
    ));
    animals.push(animal(
        "one that stops again and again: it is started again five times, then never",
        "neuronGetUniqueId of plugin animal.wasm was not called on tenant hostile: it is quarantined: it stopped 6 times in 600s, the last time because wasm trap: wasm `unreachable` instruction executed (in neuronGetUniqueId); replace it (`wccl swap start`), or open the runtime again with a plugin that works; data in flight goes on",
        |cage| {
            let mut p = Plugin::lone_rank()?;
            p.set(NAMES[1], Body::Trap);
            let mut c = cage.config(&p)?;
            c.limits.restart_pause = std::time::Duration::ZERO;
            let rt = crate::zoo::opened(c)?;
            for _ in 0..6 {
                said(rt.unique_id(1))?;
            }
            said(rt.unique_id(1))
        },
    ));
    animals.push(animal(
        "one that is quarantined, and starts a task from an instance that goes on",
        "…plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): no task was started: it is quarantined: it stopped 6 times in 600s, …",
        |cage| {
            let mut p = Plugin::lone_rank()?;
            p.set(NAMES[1], Body::Trap);
            let spawn = format!(
                "(call $objects.communicator.drop (local.get 0)) (i32.store8 (i32.const {SCRATCH}) (i32.const 97))
                 (call $tasks.spawn (i32.const {SCRATCH}) (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const {REPLY}))"
            );
            p.body("neuron-bootstrap-send", format!("{spawn} {}", gives_up()));
            let mut c = cage.config(&p)?;
            c.limits.restart_pause = std::time::Duration::ZERO;
            let rt = crate::zoo::opened(c)?;
            let comm = rt.init_comm(CommOptions::with_id([1; 128], 0, 1))?;
            for _ in 0..6 {
                said(rt.unique_id(1))?;
            }
            said(comm.bootstrap_send(0, b"x"))
        },
    ));
    Group { title: "Calls that do not come back", animals }
}
