//! Plugins that misbehave when one takes over from another: the one that runs, or the one that comes.

use std::time::Duration;

use anyhow::{Context, Result};
use tests::zoo;
use wccl::CommOptions;
use wccl::swap::{Order, coordinate};

use crate::zoo::{Animal, Attack, Cage, Group, animal, opened};

/// The library of this project with other life-cycle entries.
fn edited(edits: &[(&str, &str)]) -> Result<Vec<u8>> {
    let full: Vec<(String, &str)> =
        edits.iter().map(|(f, body)| (format!("neuron:lifecycle/lifecycle@1.0.0#{f}"), *body)).collect();
    let edits: Vec<(&str, &str)> = full.iter().map(|(f, b)| (f.as_str(), *b)).collect();
    zoo::described(&zoo::rewrite(&zoo::built("nccom.core.wasm")?, &edits)?)
}

/// Has `new` take over from `old` on a communicator, which must be refused, and leaves the old one at work.
fn swap(cage: &Cage, old: &[(&str, &str)], new: &[(&str, &str)]) -> Result<String> {
    swap_within(cage, 1 << 20, old, new)
}

/// The same where a plan may have so many bytes.
fn swap_within(cage: &Cage, plan: usize, old: &[(&str, &str)], new: &[(&str, &str)]) -> Result<String> {
    let (old, new) = (cage.put("animal.wasm", &edited(old)?)?, cage.put("next.wasm", &edited(new)?)?);
    let mut c = cage.limited(old);
    // Other cages are open at the same time.
    c.tenant = format!("hostile.{}", cage.number());
    // What the library of this project needs.
    (c.limits.memory, c.limits.call) = (64 << 20, Duration::from_millis(300));
    (c.limits.hostcall_bytes, c.limits.state) = (16 << 20, plan);
    let tenant = c.tenant.clone();
    let runtime = opened(c)?;
    let mut comm = runtime.init_comm(CommOptions::with_id(runtime.unique_id(1)?, 0, 1))?;
    // The plugin's own limits are to end it, on a busy machine too.
    let quiesce = Duration::from_secs(60);
    let report = coordinate(&Order { timeout: 2 * quiesce, quiesce, ..Order::transport(&tenant, &new) })?;
    anyhow::ensure!(!report.committed, "it took over");
    comm.barrier().context("an operation after the swap that was refused")?;
    Ok(report.reason.replace(&tenant, "hostile"))
}

/// The same crime in some entries of the old or the new plugin.
fn each(what: &str, entries: &'static [&'static str], old: bool, crime: &'static str, cause: &str) -> Animal {
    let cases = entries.iter().map(|entry| {
        let attack: Attack = Box::new(move |cage| {
            let edits = [(*entry, crime)];
            if old { swap(cage, &edits, &[]) } else { swap(cage, &[], &edits) }
        });
        (vec![("entry", entry.to_string())], attack)
    });
    let plugin = if old { "animal.wasm" } else { "next.wasm" };
    Animal {
        what: what.into(),
        sentence: format!(
            "pid …: …plugin {plugin} stopped in {{entry}} on tenant hostile: {cause}; data in flight goes on…"
        ),
        cases: cases.collect(),
    }
}

const TRAP: &str = "unreachable";
const LOOP: &str = "(loop $again (br $again)) unreachable";
const TRAPPED: &str = "wasm trap: wasm `unreachable` instruction executed";
const LOOPED: &str = "the call used more than its 300ms of guest time";

pub fn group() -> Group {
    let comes: &[&str] = &["describe", "import-state", "resume"];
    // Its plan is asked for when the rings are built, too, for a restart.
    let before = |cause: &str| {
        format!(
            "pid …: describe of plugin animal.wasm was not called on tenant hostile: its instance stopped before: {cause} (in \
             export-state); data in flight goes on; `stateless` would leave the plans of the old plugin behind"
        )
    };
    let animals = vec![
        each("one that traps when it is to come to rest", &["quiesce"], true, TRAP, TRAPPED),
        each("one that hangs when it is to come to rest", &["quiesce"], true, LOOP, LOOPED),
        animal("one that traps when it is to hand over", before(TRAPPED), |cage| {
            swap(cage, &[("export-state", TRAP)], &[])
        }),
        animal("one that hangs when it is to hand over", before(LOOPED), |cage| {
            swap(cage, &[("export-state", LOOP)], &[])
        }),
        each("one that traps when it takes over", comes, false, TRAP, TRAPPED),
        each("one that hangs when it takes over", comes, false, LOOP, LOOPED),
        animal(
            "one that hands over more than a plan may have",
            "pid …: communicator 1 of rank 0: `export-state` of animal.wasm answered … bytes, 64 are allowed…",
            |cage| swap_within(cage, 64, &[], &[]),
        ),
        animal(
            "one that hands over a list that lies outside its memory",
            "pid …: …list pointer/length out of bounds of memory…",
            |cage| {
                let lie = "(local i32) (local.set 1 (call $original (local.get 0)))
                  (i32.store offset=8 (local.get 1) (i32.const 0x7fffffff)) (local.get 1)";
                swap(cage, &[("export-state", lie)], &[])
            },
        ),
        animal(
            "one that hands over a plan that is none",
            "pid …: …`import-state` of next.wasm answered …",
            |cage| {
                let none = "(local i32) (local.set 1 (call $original (local.get 0)))
                  (i32.store (i32.load offset=4 (local.get 1)) (i32.const 0)) (local.get 1)";
                swap(cage, &[("export-state", none)], &[])
            },
        ),
        animal(
            "one that says it writes a schema that nobody reads",
            "pid …: the old plugin writes state of schema `nccom-plan` 9, the new one reads `nccom-plan` [1, 2]…",
            |cage| {
                let nine = "(local i32) (local.set 0 (call $original)) (i32.store offset=24 (local.get 0) (i32.const 9)) (local.get 0)";
                swap(cage, &[("describe", nine)], &[])
            },
        ),
        animal(
            "one that reads the plans of another library under the same number",
            "pid …: the old plugin writes state of schema `nccom-plan` 1, the new one reads `nccom` [1, 2]…",
            |cage| {
                let other = "(local i32) (local.set 0 (call $original)) (i32.store offset=40 (local.get 0) (i32.const 5)) (local.get 0)";
                swap(cage, &[], &[("describe", other)])
            },
        ),
        animal(
            "one that says it speaks something else on the wire",
            "pid …: the connections that are handed over speak `nccom-bootstrap-3` and the new plugin `nccom`…",
            |cage| {
                let other = "(local i32) (local.set 0 (call $original)) (i32.store offset=20 (local.get 0) (i32.const 5)) (local.get 0)";
                swap(cage, &[], &[("describe", other)])
            },
        ),
    ];
    Group { title: "When one takes over from another", animals }
}
