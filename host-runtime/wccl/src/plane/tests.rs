use std::sync::Barrier;

use super::*;
use crate::api::Runtime;
use crate::config::RuntimeConfig;
use crate::error::PluginError;
use crate::plane::join::Rendezvous;
use sandbox::entries::Holder;
use sandbox::key::GroupKey;

/// A group of one rank.
fn group_of_one(runtime: &Runtime) -> Joining {
    // A key, as an id, is of one group.
    let key = GroupKey::of_id(&sandbox::id::draw().unwrap(), 0);
    Joining {
        rendezvous: Rendezvous::Id(runtime.host().start_root(1, key).unwrap()),
        key,
        rank: 0,
        nranks: 1,
        on: None,
    }
}

/// A runtime with the plugin that `cargo xtask guests` builds, and a group of one rank.
fn alone() -> (Runtime, Joining) {
    let mut c = RuntimeConfig { control: false, hbm_bytes: 1 << 20, ..RuntimeConfig::default() };
    c.vars.insert("CCOM_SOCKET_IFNAME".into(), "lo".into());
    c.limits.entry = Duration::from_secs(20);
    let runtime = Runtime::open(c).unwrap();
    let joining = group_of_one(&runtime);
    (runtime, joining)
}

#[test]
fn a_call_waits_at_shut_doors_no_longer_than_its_deadline() {
    let (runtime, joining) = alone();
    let (seat, ..) = Seat::join(runtime.host(), &joining, &AbortToken::new().unwrap(), None).unwrap();
    let _shut = runtime.host().doors.shut(Instant::now() + FREE_PATIENCE, false).unwrap();
    for patience in [Patience::Waits, Patience::Operation] {
        match seat.ask(Ask::Info, patience(Instant::now() + Duration::from_millis(20))).unwrap_err() {
            Error::Frozen { waited, .. } => assert!(waited < runtime.host().tenant.limits.entry, "{waited:?}"),
            e => panic!("{e}"),
        }
    }
}

/// Nor does it wait longer for another call, or change what that one waits for.
#[test]
fn a_call_waits_behind_another_no_longer_than_its_deadline() {
    let (runtime, joining) = alone();
    let (seat, ..) = Seat::join(runtime.host(), &joining, &AbortToken::new().unwrap(), None).unwrap();
    let (instance, _) = seat.control().unwrap();
    let (inside, entered) = std::sync::mpsc::channel();
    let (done, asked) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|s| {
        s.spawn(|| {
            let waits = move |_: &mut _, _| {
                inside.send(()).unwrap();
                // It ends all the same if it is waited for.
                let _ = asked.recv_timeout(Duration::from_secs(10));
                Ok(())
            };
            instance.with("slow", Patience::Usual, None, waits).unwrap();
        });
        entered.recv().unwrap();
        for patience in [Patience::Waits, Patience::Operation] {
            match seat.ask(Ask::Info, patience(Instant::now() + Duration::from_millis(20))) {
                Err(Error::Plugin(PluginError::Busy { inside: "slow", .. })) => {}
                other => panic!("{other:?}"),
            }
        }
        let _ = done.send(());
    });
    seat.ask(Ask::Info, Patience::Usual).unwrap();
}

/// Stops the instance as a trap would.
fn stop(seat: &Seat) {
    let (instance, _) = seat.control().unwrap();
    let traps = |_: &mut _, _| Err::<(), _>(std::io::Error::other("a trap").into());
    instance.with("trap", Patience::Usual, None, traps).unwrap_err();
}

/// Neither for the restart itself, nor for another caller's.
#[test]
fn a_call_waits_for_a_restart_no_longer_than_its_deadline() {
    let (runtime, joining) = alone();
    let (seat, ..) = Seat::join(runtime.host(), &joining, &AbortToken::new().unwrap(), None).unwrap();
    seat.keep_checkpoint(Patience::Usual);
    stop(&seat);
    std::thread::sleep(runtime.host().tenant.limits.restart_pause);
    let late = |patience: Patience| match seat.ask(Ask::Info, patience) {
        Err(Error::Plugin(PluginError::Busy { inside: "restart", .. })) => {}
        other => panic!("{other:?}"),
    };
    let restarts = || runtime.host().tenant.supervisor.standing()[0].restarts;
    // Which is the deadline that has passed before it begins.
    late(Patience::Operation(Instant::now()));
    assert_eq!(restarts(), 0);
    let restarting = seat.checkpoint.enter(&mut Wait::until(Instant::now())).unwrap();
    for patience in [Patience::Waits, Patience::Operation] {
        late(patience(Instant::now() + Duration::from_millis(20)));
    }
    drop(restarting);
    seat.ask(Ask::Info, Patience::Operation(Instant::now() + FREE_PATIENCE)).unwrap();
    assert_eq!(restarts(), 1);
}

/// Nor for another stream, which has more time.
#[test]
fn an_operation_waits_for_who_connects_no_longer_than_its_deadline() {
    let (runtime, joining) = alone();
    let (seat, ..) = Seat::join(runtime.host(), &joining, &AbortToken::new().unwrap(), None).unwrap();
    let connecting = seat.expanding.enter(&mut Wait::until(Instant::now())).unwrap();
    let e = seat.expand_connectivity("barrier", Duration::from_millis(20)).unwrap_err();
    assert!(matches!(e, Error::Connecting { own: true, .. }), "{e}");
    assert!(e.to_string().ends_with("another stream of this rank is still connecting them"), "{e}");
    drop(connecting);
    seat.expand_connectivity("barrier", Duration::from_secs(20)).unwrap();
}

/// A swap that does not wait for a rank that joins leaves no communicator of the library before.
#[test]
fn who_joined_with_a_library_that_was_replaced_meanwhile_has_no_communicator() {
    let (runtime, joining) = alone();
    let (doors, both) = (&runtime.host().doors, Barrier::new(2));
    std::thread::scope(|s| {
        let joins = s.spawn(|| {
            let _inside = doors.enter("a call", Duration::ZERO).unwrap();
            both.wait();
            both.wait();
            Seat::join(runtime.host(), &joining, &AbortToken::new().unwrap(), None).map(|_| ())
        });
        both.wait();
        let shut = doors.shut(Instant::now(), true).unwrap();
        both.wait();
        while runtime.tenant().communicators() == 0 && !joins.is_finished() {
            std::thread::yield_now();
        }
        let plugin = runtime.config().plugin.clone().unwrap();
        let source = sandbox::entries::read(runtime.tenant(), &plugin).unwrap();
        let new = sandbox::entries::load(runtime.tenant(), &source, &[]).unwrap();
        runtime.host().forward.replace(new).unwrap();
        drop(shut);
        let e = joins.join().unwrap().unwrap_err().to_string();
        assert!(e.contains("has replaced plugin nccom.wasm") && e.contains("are to join again"), "{e}");
    });
    assert!(runtime.0.swaps.status().ranks.is_empty());
    // Who joins again has one.
    let joining = group_of_one(&runtime);
    let _made = Seat::join(runtime.host(), &joining, &AbortToken::new().unwrap(), None).unwrap();
    assert_eq!(runtime.0.swaps.status().ranks, [(0, 1)]);
}

/// A plan of `rings` rings of one rank.
fn plan_of(seat: &Seat, rings: usize) -> Plan {
    use sandbox::bindings::exports::neuron::nccom::collectives::RingInfo;
    let ring = RingInfo { prev: 0, next: 0, user_ranks: vec![0], duplicate: false };
    seat.check_plan(info_with(vec![ring; rings])).unwrap()
}

/// Streams and schedules go by the first one.
#[test]
fn a_graph_that_is_built_stays() {
    let (runtime, joining) = alone();
    let (seat, ..) = Seat::join(runtime.host(), &joining, &AbortToken::new().unwrap(), None).unwrap();
    let build = |rings| seat.take_over("build", &seat.serves(), plan_of(&seat, rings));
    build(1).unwrap();
    build(1).unwrap();
    let e = build(2).unwrap_err().to_string();
    assert!(e.contains("planned other rings for rank 0 than before"), "{e}");
    assert_eq!(seat.plan().rings.len(), 1);
    seat.core.endpoint.usable().unwrap();
}

/// A swap that does not wait for a graph that is being built leaves no rings of the library before on this rank alone.
#[test]
fn what_a_replaced_library_planned_is_not_taken_over() {
    let (runtime, joining) = alone();
    let (host, abort) = (runtime.host(), AbortToken::new().unwrap());
    let (seat, ..) = Seat::join(host, &joining, &abort, None).unwrap();
    let (serves, plan) = (seat.serves(), plan_of(&seat, 1));
    let source = sandbox::entries::read(&host.tenant, &host.config.plugin.clone().unwrap()).unwrap();
    let new = sandbox::entries::load(&host.tenant, &source, &[]).unwrap();
    let holder = Holder { core: seat.logical_core(), key: joining.key, seat: None, client: None };
    let instance = new.instantiate(&host.tenant, &abort, holder, Patience::Usual).unwrap();
    seat.set_control((instance, 0));
    let e = seat.take_over("build", &serves, plan).unwrap_err().to_string();
    assert!(e.contains("rank 0 has no rings: a hot swap (--force) has replaced the plugin"), "{e}");
    assert!(seat.plan().rings.is_empty());
    // Its peers are not left waiting.
    seat.core.endpoint.usable().unwrap_err();
}

/// What a plugin plans is an allegation: a ring that no walk round all ranks goes by is refused before anything is moved.
#[test]
fn a_plan_that_is_no_ring_of_all_ranks_is_refused() {
    use sandbox::bindings::exports::neuron::nccom::collectives::RingInfo;
    let planned = |prev: i32, next: i32, user_ranks: &[i32]| {
        let ring = RingInfo { prev, next, user_ranks: user_ranks.to_vec(), duplicate: false };
        check_rings(&info_with(vec![ring]), 1, 4)
    };
    assert_eq!(planned(3, 2, &[1, 2, 0, 3]).unwrap(), [[0, 3, 1, 2]]);
    let not_each_once = "is not every rank of 4 once";
    let wrong_neighbours = "do not fit [1, 2, 0, 3]";
    for (what, ring, says) in [
        ("a rank twice", planned(3, 2, &[1, 2, 2, 3]), not_each_once),
        ("one rank twice beside all others", planned(3, 2, &[1, 2, 0, 2, 3]), not_each_once),
        ("one missing", planned(3, 2, &[1, 2, 3]), not_each_once),
        ("no rank at all", planned(1, 1, &[]), not_each_once),
        ("a rank that is none", planned(4, 2, &[1, 2, 0, 4]), not_each_once),
        ("a negative one beside all others", planned(3, 2, &[1, 2, -1, 0, 3]), not_each_once),
        ("another rank first", planned(0, 1, &[2, 1, 3, 0]), "does not begin with this rank"),
        ("another one before", planned(0, 2, &[1, 2, 0, 3]), wrong_neighbours),
        ("another one after", planned(3, 0, &[1, 2, 0, 3]), wrong_neighbours),
    ] {
        let e = ring.expect_err(what).to_string();
        assert!(e.contains("planned ring 0 of rank 1 wrongly") && e.contains(says), "{what}: {e}");
    }
    // A good one before does not help a bad one.
    let good = RingInfo { prev: 0, next: 0, user_ranks: vec![0], duplicate: false };
    let bad = RingInfo { prev: 1, ..good.clone() };
    let e = check_rings(&info_with(vec![good, bad]), 0, 1).unwrap_err().to_string();
    assert!(e.contains("planned ring 1 of rank 0 wrongly"), "{e}");
}

fn info_with(rings: Vec<sandbox::bindings::exports::neuron::nccom::collectives::RingInfo>) -> CommInfo {
    CommInfo {
        cluster_id: 0,
        epoch: 0,
        neuron_dev: 0,
        rank: 0,
        rank_n: 0,
        local_rank_n: 0,
        node: 0,
        node_n: 0,
        enable_pod: false,
        pod: 0,
        pod_n: 0,
        pod_node: 0,
        pod_node_n: 0,
        peers: Vec::new(),
        rings,
        kangaring_paths: Vec::new(),
        mla_cycles: Vec::new(),
    }
}
