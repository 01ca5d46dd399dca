//! Too much of everything the host hands out.

use std::time::Duration;

use tests::zoo::{ANSWER, Plugin, REPLY, SCRATCH, init_comm};

use wccl::{CommOptions, Runtime};

use crate::zoo::{Animal, Group, animal, at_once, gives_up, opened, said};

/// Writes 127.0.0.1 and any port to 4096, and listens there; the answer stands at 2048.
pub const LISTEN: &str =
    "(i32.store (i32.const 4096) (i32.const 2)) (i32.store (i32.const 4100) (i32.const 0x0100007f))
  (memory.fill (i32.const 4104) (i32.const 0) (i32.const 20))
  (call $sockets.listen (i32.const 4096) (i32.const 28) (i32.const 50) (i32.const 2048))";

/// Repeats a call that answers at [`REPLY`] until it is refused.
fn until_refused(call: &str) -> String {
    format!("(loop $more {call} (br_if $more (i32.eqz (i32.load8_u (i32.const {REPLY})))))")
}

fn refused(cause: &str) -> String {
    format!("neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): {cause}")
}

fn stopped(cause: &str) -> String {
    format!("plugin animal.wasm stopped in neuronGetUniqueId on tenant hostile: {cause}; data in flight goes on")
}

/// The same where the plugin or the host had said something before.
fn stopped_after(cause: &str, sentence: &str) -> String {
    stopped(cause) + ": " + sentence
}

/// One that goes on until it is refused.
fn flood(what: &str, cause: &str, call: impl Into<String>) -> Animal {
    let call = call.into();
    at_once(what, &refused(cause), move |_| until_refused(&call))
}

/// One that does not stop when it is refused, and is stopped.
fn endless(what: &str, sentence: &str, call: impl Into<String>) -> Animal {
    let call = call.into();
    at_once(what, sentence, move |_| format!("(loop $again {call} (br $again))"))
}

const GUEST_TIME: &str = "the call used more than its 60ms of guest time";

/// The same for what an init entry can reach: `call` finds the communicator's handle at 2052, and answers at 2176.
fn of_a_communicator(what: &str, sentence: &str, call: impl Into<String>) -> Animal {
    let call = call.into();
    animal(what, sentence, move |cage| {
        let mut p = Plugin::lone_rank()?;
        let (at, status) = (ANSWER + 4, ANSWER + 8);
        let then = format!(
            "(loop $more {call} (br_if $more (i32.eqz (i32.load8_u (i32.const 2176)))))
             (i32.store8 (i32.const {ANSWER}) (i32.const 1)) (i32.store8 (i32.const {at}) (i32.const 28))
             (i32.store (i32.const {status}) (i32.const 1)) (return (i32.const {ANSWER}))"
        );
        p.body("neuron-init-comm", init_comm(&then));
        said(cage.open(&p)?.init_comm(CommOptions::with_id([1; 128], 0, 1)))
    })
}

pub fn group() -> Group {
    let comm = "(i32.load (i32.const 2052))";
    let text = |bytes: u32| format!("(i32.const 65536) (i32.const {bytes})");
    let spawn = format!(
        "(i32.store8 (i32.const {SCRATCH}) (i32.const 97))
         (call $tasks.spawn (i32.const {SCRATCH}) (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const {REPLY}))"
    );
    let animals = vec![
        flood("listening sockets without end", "tenant hostile asked for one more socket; limits.connections grants 8", LISTEN),
        flood(
            "connections without end, to a listener of its own that never accepts",
            "tenant hostile asked for one more socket; limits.connections grants 8",
            format!(
                "(if (i32.eqz (i32.load (i32.const 4200))) (then {LISTEN} (i32.store (i32.const 4200) (i32.const 1))
                   (call $sockets.local-address (i32.load (i32.const 2052)) (i32.const 2100))
                   (memory.copy (i32.const 4300) (i32.load (i32.const 2100)) (i32.const 28))))
                 (call $sockets.connect (i32.const 4300) (i32.const 28) (i32.const 50) (i32.const {REPLY}))"
            ),
        ),
        at_once(
            "background tasks without end, which never end",
            &refused("tenant hostile asked for one more background task; limits.tasks grants 2"),
            move |p| {
                p.body("run", "(loop $again (br $again)) unreachable");
                until_refused(&spawn)
            },
        ),
        at_once("the state of a task, larger than a task's may be", &refused("a task's state has at most 4096 bytes, the plugin gave 4097"), |_| {
            format!(
                "(i32.store8 (i32.const {SCRATCH}) (i32.const 97))
                 (call $tasks.spawn (i32.const {SCRATCH}) (i32.const 1) (i32.const 65536) (i32.const 4097) (i32.const 0) (i32.const 0) (i32.const {REPLY}))"
            )
        }),
        endless("log lines without end", &stopped(GUEST_TIME), format!("(call $log.write (i32.const 2) {})", text(40))),
        endless("error lines without end: the first eight are told", &stopped_after(GUEST_TIME, "…"), format!("(call $log.write (i32.const 0) {})", text(40))),
        at_once(
            "one log line of 2 MiB",
            &stopped("the instance handed over more than its 1048576 bytes in one host call"),
            move |_| format!("(drop (memory.grow (i32.const 40))) (call $log.write (i32.const 2) {})", text(2 << 20)),
        ),
        at_once(
            "a log line that is not text",
            &stopped("invalid utf-8 sequence of 1 bytes from index 0"),
            |_| format!("(i32.store (i32.const {SCRATCH}) (i32.const -1)) (call $log.write (i32.const 2) (i32.const {SCRATCH}) (i32.const 4))"),
        ),
        at_once(
            "an error line that ends, and begins one of its own",
            &refused("it is late  ERROR tenant=other forged it"),
            |p| {
                let forged = p.text("it is late\r\nERROR tenant=other forged\u{2028}it");
                format!("(call $log.write (i32.const 0) {forged})")
            },
        ),
        at_once("a log level that does not exist", &stopped("unexpected discriminant: 99"), move |_| format!("(call $log.write (i32.const 99) {})", text(4))),
        endless("names looked up without end", &stopped_after("…", "…looking up host name aaaaaaa…"), format!(
            "(i64.store (i32.const {SCRATCH}) (i64.const 0x61616161616161)) (call $sockets.resolve (i32.const {SCRATCH}) (i32.const 7) (i32.const 80) (i32.const 1) (i32.const {REPLY}))"
        )),
        endless("questions for the time without end", &stopped(GUEST_TIME), "(drop (call $clock.monotonic-ns))"),
        endless("random numbers without end", &stopped(GUEST_TIME), "(drop (call $random.get-u64))"),
        endless("lists of interfaces without end", &stopped("the …"), format!("(call $sockets.interfaces (i32.const {REPLY}))")),
        endless("variables without end", &stopped(GUEST_TIME), format!("(call $config.get {} (i32.const {REPLY}))", text(100))),
        of_a_communicator(
            "communicators without end",
            "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): tenant hostile asked for one more communicator; limits.communicators grants 4",
            "(call $objects.communicator.create (i32.const 0) (i32.const 1) (i32.const 2176))",
        ),
        of_a_communicator(
            "a communicator of more ranks than there can be",
            "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): the plugin asked for rank 0 of 2147483647; a communicator has at most 64 ranks here",
            "(call $objects.communicator.create (i32.const 0) (i32.const 0x7fffffff) (i32.const 2176))",
        ),
        of_a_communicator(
            "a register that does not exist",
            "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): communicator 1 has no register 1",
            format!("(call $proxy.register {comm} (i64.const 1) (i32.const 2176))"),
        ),
        of_a_communicator(
            "a name that is published again and again",
            "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): tenant hostile asked to publish one more name; limits.names grants 4",
            "(i32.store (i32.const 4200) (i32.add (i32.load (i32.const 4200)) (i32.const 1)))
             (i32.store (i32.const 4096) (i32.const 2)) (i32.store16 offset=2 (i32.const 4096) (i32.const 0x5000)) (i32.store (i32.const 4100) (i32.const 0x0100007f))
             (call $rendezvous.publish (i32.const 4200) (i32.const 128) (i32.const 4196) (i32.const 3) (i32.const 4096) (i32.const 28) (i32.const 2176))",
        ),
        of_a_communicator(
            "sockets without end, each left with the host for a successor that never comes",
            "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): tenant hostile asked for one more socket; limits.connections grants 8",
            format!(
                "(i32.store (i32.const 4096) (i32.const 2)) (i32.store (i32.const 4100) (i32.const 0x0100007f))
                 (call $sockets.listen (i32.const 4096) (i32.const 28) (i32.const 50) (i32.const 2176))
                 (if (i32.eqz (i32.load8_u (i32.const 2176))) (then
                   (i32.store (i32.const 4200) (i32.add (i32.load (i32.const 4200)) (i32.const 1)))
                   (call $sockets.park-listener {comm} (i32.load (i32.const 4200)) (i32.load (i32.const 2180)) (i32.const 2176))))"
            ),
        ),
        of_a_communicator(
            "a rank that is not of the communicator",
            "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): the plugin named peer 5, the communicator has 1 ranks",
            format!("(call $links.offer {comm} (i32.const 5) (i32.const 2176))"),
        ),
        of_a_communicator(
            "operations for the proxy, all of them noise",
            "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): the network operations of block 0 cannot be started: this communicator has no network connector; every rank is on one server, or no net plugin is bound",
            format!(
                "(memory.fill (i32.const 65536) (i32.const 0xa5) (i32.const 960))
                 (call $proxy.start {comm} (i32.const 0) (i32.const 0) (i32.const 65536) (i32.const 960) (i32.const 65536) (i32.const 0) (i32.const 65536) (i32.const 0) (i32.const 2176))"
            ),
        ),
        animal(
            "communicators that each take as much memory as one may, until the tenant has no more",
            "plugin animal.wasm stopped in instantiate on tenant hostile: tenant hostile asked for 3 MiB of plugin memory beyond the … it has; limits.memory-in-all grants 10 MiB; data in flight goes on",
            |cage| {
                let mut p = Plugin::lone_rank()?;
                p.pages = 48;
                let mut c = cage.config(&p)?;
                c.limits.memory_in_all = 10 << 20;
                let runtime = crate::zoo::opened(c)?;
                let join = |id| runtime.init_comm(CommOptions::with_id([id; 128], 0, 1));
                let held = (join(1)?, join(2)?);
                let refused = said(join(3))?;
                // What another one leaves is there again.
                drop(held.0);
                join(4)?;
                Ok(refused)
            },
        ),
        animal(
            "a plugin of few bytes that stands for much work of the compiler: locals",
            "Error opening libnccom.so, cannot use collective operations! plugin …/animal.wasm: it would cost too much to compile: it has 10001 locals in one function or more; limits.function-locals grants 10000",
            |cage| {
                let mut p = Plugin::lone_rank()?;
                p.extra(&format!("(func (local {}))", "i64 ".repeat(10_001)));
                let runtime = Runtime::open(cage.config(&p)?)?;
                Ok(runtime.load_error().ok_or_else(|| anyhow::anyhow!("it loaded"))?.sentinel)
            },
        ),
        animal(
            "a wait of 49 days for a connection that never comes",
            "plugin animal.wasm stopped in neuronGetUniqueId on tenant hostile: the call took more than 2s in all, waits included; data in flight goes on: Timeout waiting for incoming connection on 127.0.0.1:…",
            |cage| {
                let mut p = Plugin::lone_rank()?;
                let accept = format!(
                    "{LISTEN} (loop $again (call $sockets.accept (i32.load (i32.const 2052)) (i32.const -1) (i32.const 2100)) (br $again))"
                );
                p.body("neuron-get-unique-id", format!("{accept} {}", gives_up()));
                let mut c = cage.config(&p)?;
                c.limits.wall = Duration::from_secs(2);
                said(opened(c)?.unique_id(1))
            },
        ),
    ];
    Group { title: "Floods", animals }
}
