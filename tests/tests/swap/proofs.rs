//! Proofs of the contract: a plugin may trap, be replaced, be aborted or be slow, and data in flight does not notice.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use sandbox::bindings::exports::neuron::nccom::collectives::CommInfo;
use tests::zoo;
use wccl::error::{Error, PluginError};
use wccl::{CommOptions, Communicator, DataType, DeviceMemory, Io, ReduceOp, Runtime};

use crate::common::{HANG, bytes_of, config, plugin_file, values_of, world};

/// One all-reduce of ones over `comm`, checked.
fn reduce_ones(comm: &mut Communicator, t: &DeviceMemory) {
    let count = t.len() / 4;
    t.write(0, &bytes_of(&vec![1.0; count as usize])).unwrap();
    comm.raw().all_reduce(Io::in_place(t), count, DataType::Fp32, ReduceOp::Sum).unwrap();
    let mut out = vec![0; t.len() as usize];
    t.read(0, &mut out).unwrap();
    let n = comm.nranks() as f32;
    assert!(values_of(&out).iter().all(|v| *v == n));
}

fn orders(info: &CommInfo) -> Vec<Vec<i32>> {
    info.rings.iter().map(|r| r.user_ranks.clone()).collect()
}

/// `component_calls` rises during init and stays flat over 100,000 collectives after warm-up.
#[test]
fn no_component_call_in_the_steady_state() {
    world(2, &config(), |mut comm| {
        let t = comm.allocate(64).unwrap();
        let runtime = comm.runtime().clone();
        let after_init = runtime.component_calls();
        assert!(after_init > 20, "init crosses the boundary: {after_init}");
        reduce_ones(&mut comm, &t);
        comm.barrier().unwrap();
        let warm = runtime.component_calls();
        for _ in 0..50_000 {
            comm.raw().all_reduce(Io::in_place(&t), 16, DataType::Fp32, ReduceOp::Max).unwrap();
            comm.barrier().unwrap();
        }
        assert_eq!(runtime.component_calls(), warm);
        assert!(comm.counters().ops >= 100_000);
    });
}

/// The component traps in mid-run: the collectives go on, its communicator's control plane starts again with its last plan,
/// and after too many traps it does not.
#[test]
fn data_in_flight_survives_a_trap_of_the_plugin() {
    let core = zoo::built("nccom.core.wasm").unwrap();
    let trapping =
        zoo::rewrite(&core, &[("neuron:nccom/collectives#neuron-get-peer-device-id", "unreachable")]).unwrap();
    let file = plugin_file("traps-in-slot-18", &zoo::described(&trapping).unwrap());
    let mut c = config();
    c.plugin = Some(file.path().into());
    c.limits.restarts = 2;
    c.limits.restart_pause = Duration::ZERO;
    world(2, &c, |mut comm| {
        let t = comm.allocate(1 << 20).unwrap();
        let planned = comm.query_info().unwrap();
        let id = comm.runtime().unique_id(1).unwrap();
        for round in 0..200 {
            reduce_ones(&mut comm, &t);
            if round % 50 == 25 && round < 150 {
                assert_eq!(orders(&comm.query_info().unwrap()), orders(&planned));
                assert_eq!(comm.control_stopped(), None);
                let e = comm.peer_device_id(0).unwrap_err();
                let text = e.to_string();
                assert!(matches!(e, Error::Plugin(PluginError::Stopped { .. })), "{text}");
                assert!(text.contains("neuronGetPeerDeviceId") && text.contains("unreachable"), "{text}");
                assert!(text.contains("traps-in-slot-18") && text.contains("data in flight goes on"), "{text}");
            }
        }
        assert!(comm.control_stopped().unwrap().contains("neuronGetPeerDeviceId"));
        let e = comm.query_info().unwrap_err();
        assert!(matches!(e, Error::Plugin(PluginError::Supervised { .. })), "{e}");
        assert!(e.to_string().contains("it is quarantined: it stopped 3 times in 600s, the last time because"), "{e}");
        assert!(e.to_string().contains("data in flight goes on"), "{e}");
        let tenant = comm.runtime().tenant();
        assert_eq!(tenant.counters.traps(), 3);
        let standing = tenant.supervisor.standing();
        assert_eq!((standing.len(), standing[0].restarts, standing[0].quarantined), (1, 2, true));
        // Nor is another communicator made of it, or a task started.
        let e = comm.runtime().unique_id(1).unwrap_err().to_string();
        assert!(e.contains("no task was started: it is quarantined"), "{e}");
        let e = comm.runtime().init_comm(CommOptions::with_id(id, 0, 1)).unwrap_err().to_string();
        assert!(e.contains("instantiate of plugin") && e.contains("quarantined"), "{e}");
    });
}

/// A plugin that hangs over the plan it is to begin with: the restart ends with the operation that needs it, which is not blamed on
/// the plugin, and is tried again by the next call.
#[test]
fn a_restart_ends_by_the_deadline_of_the_operation_that_it_is_for() {
    let core = zoo::built("nccom.core.wasm").unwrap();
    let edits = [
        ("neuron:nccom/collectives#neuron-get-peer-device-id", "unreachable"),
        ("neuron:lifecycle/lifecycle@1.0.0#import-state", "(loop br 0) unreachable"),
    ];
    let file = plugin_file("hangs-over-its-plan", &zoo::described(&zoo::rewrite(&core, &edits).unwrap()).unwrap());
    let mut c = config();
    c.plugin = Some(file.path().into());
    c.limits.restarts = 1;
    c.limits.restart_pause = Duration::ZERO;
    c.limits.call = Duration::from_secs(5);
    // More than three, or all are linked by their rings.
    world(4, &c, |mut comm| {
        comm.peer_device_id(0).unwrap_err();
        let runtime = comm.runtime().clone();
        let standing = || runtime.tenant().supervisor.standing().remove(0);
        let e = comm.within(Duration::from_secs(1)).barrier().unwrap_err();
        assert!(matches!(e, Error::Connecting { own: true, .. }), "{e}");
        assert!(e.to_string().contains("restart has kept its instance busy for"), "{e}");
        let after = standing();
        assert_eq!((after.restarts, after.quarantined), (1, false));
        assert!(after.last.contains("the deadline of its operation"), "{}", after.last);
        if comm.rank() == 0 {
            // Which has all the time that the plugin may take.
            let e = comm.query_info().unwrap_err().to_string();
            assert!(e.contains("5s of guest time"), "{e}");
            assert_eq!((standing().restarts, standing().quarantined), (2, true));
        }
    });
}

/// A task runs in a store of its own with the listener that was moved to it: the root of a group made by id.
#[test]
fn a_task_serves_with_a_moved_listener() {
    let runtime = Runtime::open(config()).unwrap();
    let id = runtime.unique_id(2).unwrap();
    assert_eq!(runtime.tenant().tasks_alive(), 1);
    let port = u16::from_be_bytes([id[2], id[3]]);
    assert!(tests::port::is_ours(port), "the moved listener is open");
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let runtime = runtime.clone();
            std::thread::spawn(move || {
                let mut comm = runtime.init_comm(CommOptions::with_id(id, rank, 2)).unwrap();
                let t = comm.allocate(400).unwrap();
                reduce_ones(&mut comm, &t);
            })
        })
        .collect();
    ranks.into_iter().for_each(|t| t.join().unwrap());
    // Served: the task has ended and its listener with it.
    let deadline = Instant::now() + HANG;
    while runtime.tenant().tasks_alive() > 0 {
        assert!(Instant::now() < deadline, "the root's task did not end");
        std::thread::yield_now();
    }
    assert!(!tests::port::is_ours(port));
}

/// The tick through the component and the native one give the same answers, step for step.
#[test]
fn the_tick_through_the_component_and_natively_agree() {
    use hw_bridge::model::IncrementRegister;
    use hw_bridge::proxy::{Entry, NetPath, Proxy, READY};
    use std::collections::HashMap;

    /// Completes a request at its third test; refuses every fourth post.
    #[derive(Debug, Default)]
    struct Wire {
        tests: HashMap<u64, u32>,
        posts: u64,
    }
    impl NetPath for Wire {
        fn post(&mut self, e: &Entry) -> Result<Option<u64>, String> {
            self.posts += 1;
            if e.size == 13 {
                return Err("the wire broke".into());
            }
            if self.posts % 4 == 0 {
                return Ok(None);
            }
            self.tests.insert(self.posts, 0);
            Ok(Some(self.posts))
        }
        fn test(&mut self, r: u64) -> Result<Option<u64>, String> {
            let n = self.tests.get_mut(&r).ok_or("unknown")?;
            *n += 1;
            Ok((*n >= 3).then_some(8))
        }
    }
    let op = |block: u32| {
        let mut b = vec![0u8; 96];
        b[16..24].copy_from_slice(&1u64.to_le_bytes());
        b[76..80].copy_from_slice(&block.to_le_bytes());
        b
    };
    let sources = |sizes: &[u32]| {
        let mut all = Vec::new();
        for (size, mark) in sizes.iter().map(|s| (*s, 0u32)).chain([(0, 2)]) {
            let mut b = vec![0u8; 72];
            b[4] = 1;
            b[32..36].copy_from_slice(&size.to_le_bytes());
            b[36..40].copy_from_slice(&mark.to_le_bytes());
            all.extend(b);
        }
        all
    };
    let prepared = move |p: &mut Proxy| {
        let done = Arc::new(IncrementRegister::recording(64));
        p.attach(Box::new(Wire::default()), HashMap::from([(1, done.clone())]));
        p.start(2, 5, &op(5), &sources(&[8, 8, 0, 8, 8]), &[]).unwrap();
        p.start(2, 6, &op(6), &sources(&[8, 13]), &[]).unwrap();
        done
    };
    world(1, &config(), move |comm| {
        let mut native = Proxy::default();
        let done_native = prepared(&mut native);
        let done_component = prepared(&mut comm.core().proxy.lock().unwrap());
        let raise = |block: u32, value: u32| {
            let index = comm.core().proxy.lock().unwrap().host_index(2, block, true).unwrap();
            index.raise(value);
        };
        // The answer is ANDed with what the caller passes, never written over it (INV-67).
        let idle = world_idle(&comm);
        assert_eq!(idle, Ok((false, false)));
        // (idle, done) or the error's status, after each tick.
        let mut trace = Vec::new();
        let mut block = 5;
        let mut ticks = 0;
        while trace.last().is_none_or(|t: &Result<(bool, bool), u32>| t.is_ok()) {
            if ticks == 1 || ticks == 3 {
                let value = if ticks == 1 { READY } else { 5 };
                raise(block, value);
                native.host_index(2, block, true).unwrap().raise(value);
            }
            let through = comm.proxy_progress_through_component(2, block, true, true).map_err(|e| e.status().0);
            let by_hand = native.progress(2, block).map_err(|_| 1206);
            assert_eq!(through, by_hand, "block {block}, tick {ticks}");
            assert_eq!(done_component.recorded(), done_native.recorded(), "block {block}, tick {ticks}");
            ticks += 1;
            if through.is_ok_and(|(_, done)| done) {
                assert_eq!(block, 5, "only block 5 comes to its end");
                assert_eq!(done_native.value(), 5);
                (block, ticks) = (6, 0);
            }
            trace.push(through);
            assert!(trace.len() < 100, "{trace:?}");
        }
        assert_eq!(trace[0], Ok((true, false)));
        assert_eq!((block, trace.last()), (6, Some(&Err(1206))));
    });

    fn world_idle(comm: &Communicator) -> Result<(bool, bool), u32> {
        comm.proxy_progress_through_component(0, 1, false, false).map_err(|e| e.status().0)
    }
}

/// An operation under way is ended by an abort from another thread; the other rank learns who and why.
#[test]
fn an_abort_ends_an_operation_on_every_rank() {
    let ready = Arc::new(Barrier::new(2));
    let aborted = Arc::new(AtomicBool::new(false));
    let (r, a) = (ready.clone(), aborted.clone());
    let texts = world(2, &config(), move |mut comm| {
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            let token = comm.abort_token().clone();
            r.wait();
            std::thread::sleep(Duration::from_millis(50));
            a.store(true, Ordering::SeqCst);
            token.abort("maintenance");
            // Every later call says so.
            return comm.barrier().unwrap_err().to_string();
        }
        r.wait();
        let e = comm.barrier().unwrap_err().to_string();
        assert!(a.load(Ordering::SeqCst));
        e
    });
    assert!(texts[0].contains("maintenance"), "{}", texts[0]);
    assert!(texts[1].contains("rank 0") && texts[1].contains("aborted: maintenance"), "{}", texts[1]);
}
