//! Handles that were forged, kept, closed twice, are of another kind, or are another tenant's.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddrV4};

use tests::zoo::{ANSWER, Plugin, REPLY, SCRATCH, TRANSPORT, init_comm, ok_bytes, ok_unit, unique_id};
use wccl::CommOptions;

use crate::floods::LISTEN;
use crate::zoo::{Animal, Group, animal, at_once, opened, said};

fn stopped(cause: &str) -> String {
    format!("plugin animal.wasm stopped in neuronGetUniqueId on tenant hostile: {cause}; data in flight goes on")
}

/// One that stops in `neuronGetUniqueId`.
fn stops(what: &str, cause: &str, body: impl Into<String>) -> Animal {
    let body = body.into();
    at_once(what, &stopped(cause), move |_| body.clone())
}

const LISTENER: &str = "(i32.load (i32.const 2052))";

/// The rank and the world that an init entry is asked for.
const ASKED: &str = "(i32.load offset=12 (local.get 0)) (i32.load (local.get 0))";

pub fn group() -> Group {
    assert_eq!(REPLY, 2048);
    let mut animals = vec![
        stops("a number that is no handle", "unknown handle index 9999", "(drop (call $objects.communicator.id (i32.const 9999)))"),
        stops("a number below zero", "unknown handle index 4294967295", "(drop (call $objects.communicator.id (i32.const -1)))"),
        stops(
            "every number up to 100,000, one after the other",
            "unknown handle index 1",
            "(local $i i32) (loop $next (local.set $i (i32.add (local.get $i) (i32.const 1)))
               (drop (call $objects.communicator.id (local.get $i))) (br_if $next (i32.lt_u (local.get $i) (i32.const 100000))))",
        ),
        stops(
            "a listener where a connection is asked for",
            "handle index 1 used with the wrong type, expected guest-defined resource but found a different guest-defined resource",
            format!(
                "{LISTEN} (call $sockets.send {LISTENER} (i32.const {SCRATCH}) (i32.const 4) (i32.const 10) (i32.const {REPLY}))"
            ),
        ),
        stops(
            "a listener that was closed before",
            "unknown handle index 1",
            format!(
                "{LISTEN} (call $objects.listener.drop {LISTENER}) (call $sockets.local-address {LISTENER} (i32.const {REPLY}))"
            ),
        ),
        stops(
            "a listener that is closed twice",
            "unknown handle index 1",
            format!("{LISTEN} (call $objects.listener.drop {LISTENER}) (call $objects.listener.drop {LISTENER})"),
        ),
        stops(
            "a listener used after it was given to a task",
            "unknown handle index 1",
            format!(
                "(i32.store8 (i32.const {SCRATCH}) (i32.const 97)) {LISTEN} (i32.store8 (i32.const {kind}) (i32.const 97))
                 (call $tasks.spawn (i32.const {kind}) (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 1) {LISTENER} (i32.const {reply}))
                 (call $sockets.local-address {LISTENER} (i32.const {reply}))",
                kind = SCRATCH + 512,
                reply = REPLY + 64,
            ),
        ),
        animal(
            "a communicator that is kept when its call ends",
            "plugin animal.wasm stopped in neuronFreeComm on tenant hostile: borrow handles still remain at the end of the call; data in flight goes on",
            |cage| {
                let mut p = Plugin::lone_rank()?;
                p.body("neuron-free-comm", tests::zoo::ok_unit());
                let runtime = cage.open(&p)?;
                let handle = sandbox::entries::Resource::new_borrow(0);
                said(runtime.forward().free_comm(sandbox::store::EntryCall::library(), handle))
            },
        ),
        animal(
            "a communicator that init answers though it made none",
            "plugin animal.wasm stopped in neuronInitComm on tenant hostile: unknown handle index 77; data in flight goes on",
            |cage| {
                let mut p = Plugin::lone_rank()?;
                let lie = format!(
                    "(i32.store8 (i32.const {ANSWER}) (i32.const 0)) (i32.store (i32.const {}) (i32.const 77)) (i32.const {ANSWER})",
                    ANSWER + 4
                );
                p.body("neuron-init-comm", lie);
                said(cage.open(&p)?.init_comm(CommOptions::with_id([1; 128], 0, 1)))
            },
        ),
        animal(
            "another rank and world than it was asked for",
            "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_INVALID (2): the plugin asked for rank 1 of 2 where rank 0 of 1 joins",
            |cage| {
                let mut p = Plugin::lone_rank()?;
                let wat = init_comm("nop").replace(ASKED, "(i32.const 1) (i32.const 2)");
                p.body("neuron-init-comm", wat);
                said(cage.open(&p)?.init_comm(CommOptions::with_id([1; 128], 0, 1)))
            },
        ),
        animal(
            "a communicator that is made outside of an init entry",
            "neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): a communicator can only be made by an init entry, on a rank's core",
            |cage| {
                let mut p = Plugin::lone_rank()?;
                p.body(
                    "neuron-get-unique-id",
                    format!("(call $objects.communicator.create (i32.const 0) (i32.const 1) (i32.const {REPLY})) {}", crate::zoo::gives_up()),
                );
                said(cage.open(&p)?.unique_id(1))
            },
        ),
    ];
    animals.push(animal(
        "memory of another tenant, with the bytes that let its own ranks in",
        "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): no link from rank 1 to rank 0: the peer refused the link: the memory belongs to another tenant",
        |cage| {
            // The other tenant's plugin tells the bytes, as one with a leak would.
            let leak: RefCell<Vec<u8>> = RefCell::default();
            let mut other = Plugin::lone_rank()?;
            let made = format!("(i32.load (i32.const {}))", REPLY + 4);
            other.body(
                "neuron-bootstrap-recv",
                format!(
                    "(call $links.offer (local.get 0) (i32.const 0) (i32.const {REPLY})) (call $objects.communicator.drop (local.get 0))
                     (memory.copy (i32.const {SCRATCH}) (i32.load (i32.const {})) (i32.const 64)) {}",
                    REPLY + 4,
                    ok_bytes(SCRATCH, 64)
                ),
            );
            let mut c = cage.config(&other)?;
            (c.tenant, c.tenant_id) = ("other".into(), 7);
            let others = opened(c)?;
            let comm = others.init_comm(CommOptions::with_id([1; 128], 0, 1))?;
            leak.replace(comm.bootstrap_recv(0, 64)?);
            let mut p = Plugin::new(TRANSPORT)?;
            p.clone_from(&Plugin::lone_rank()?);
            let bytes: String = leak.borrow().iter().map(|b| format!("\\{b:02x}")).collect();
            p.extra(&format!("(data (i32.const {}) \"{bytes}\")", SCRATCH + 1024));
            let connect = format!(
                "(call $links.connect {made} (i32.const 0) (i32.const 0) (i32.const 1) (i32.const {}) (i32.const 64) (i32.const 500) (i32.const {REPLY}))
                 (if (i32.load8_u (i32.const {REPLY})) (then (i32.store8 (i32.const {ANSWER}) (i32.const 1)) (i32.store8 (i32.const {}) (i32.const 28))
                   (i32.store (i32.const {}) (i32.const 1)) (return (i32.const {ANSWER}))))",
                SCRATCH + 1024,
                ANSWER + 4,
                ANSWER + 8
            );
            // As another rank of a group of two: nobody links to itself.
            p.body("neuron-init-comm", init_comm(&connect));
            said(cage.open(&p)?.init_comm(CommOptions::with_id([1; 128], 1, 2)))
        },
    ));
    animals.push(animal(
        "memory of another group of its own tenant, of the same size, with the record that lets that group's rank in",
        "neuronBootstrapSend of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): no link from rank 1 to rank 0: the peer refused the link: it grants the memory to another rank, or in another communicator, than rank 1 that asked rank 0 for it; the plugin has mixed up the connect records of two groups",
        |cage| {
            let mut p = Plugin::lone_rank()?;
            p.gathers(&[SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9); 2]);
            p.body(
                "neuron-bootstrap-recv",
                format!(
                    "(call $links.offer (local.get 0) (local.get 1) (i32.const {REPLY})) (call $objects.communicator.drop (local.get 0))
                     (memory.copy (i32.const {SCRATCH}) (i32.load (i32.const {})) (i32.const 64)) {}",
                    REPLY + 4,
                    ok_bytes(SCRATCH, 64)
                ),
            );
            p.body(
                "neuron-bootstrap-send",
                format!(
                    "(call $links.connect (local.get 0) (local.get 1) (i32.const 0) (i32.const 1) (local.get 2) (local.get 3) (i32.const 1500) (i32.const {REPLY}))
                     (call $objects.communicator.drop (local.get 0))
                     (if (i32.load8_u (i32.const {REPLY})) (then (return (block (result i32) {})))) {}",
                    crate::zoo::gives_up(),
                    ok_unit()
                ),
            );
            let runtime = cage.open(&p)?;
            let joins = |secret, rank| {
                let by_id = CommOptions::with_id(unique_id(secret), rank, 2);
                runtime.init_comm(CommOptions { graph: false, ..by_id })
            };
            let (one, other) = (joins(1, 0)?, joins(2, 1)?);
            let record = one.bootstrap_recv(1, 64)?;
            // It lets its own group's rank in.
            joins(1, 1)?.bootstrap_send(0, &record)?;
            said(other.bootstrap_send(0, &record))
        },
    ));
    Group { title: "Handles that are not theirs", animals }
}
