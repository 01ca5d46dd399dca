//! Background tasks: a new store of the same component on a host thread. A bootstrap root is one.
//!
//! The listener moves: the spawner loses its handle, the task gets the socket itself. A task's waits are bounded by their
//! own deadlines and end at once when the runtime closes. A task is of its spawner's group.

use wasmtime::component::Resource;

use crate::abort::AbortToken;
use crate::bindings::neuron::hw::tasks::Host;
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::imports::{Answer, Trap};
use crate::limits::byte_list;
use crate::objects::ListenerObject;
use crate::status::Status;
use crate::store::{HostState, Instance, Patience};
use crate::tenant::Task;
use hw_bridge::os::lock::lock;

/// Characters of a task's kind.
const MAX_KIND: usize = 32;
/// The exported interface.
const TASK_ENTRY: &str = "neuron:hw/task-entry";

impl HostState {
    fn do_spawn(&mut self, kind: String, state: Vec<u8>, listener: Option<ListenerObject>) -> Answer<()> {
        let most = byte_list("neuron:hw/tasks", "spawn").unwrap_or(0);
        if state.len() as u64 > most {
            return Err(self.fail(
                Status::INVALID,
                format!("a task's state has at most {most} bytes, the plugin gave {}", state.len()),
            ));
        }
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if kind.is_empty() || kind.len() > MAX_KIND || !kind.chars().all(plain) {
            let why = format!("a task's kind has 1 to {MAX_KIND} characters of a to z, 0 to 9 and -");
            return Err(self.fail(Status::INVALID, why));
        }
        if !self.live {
            return Err(self.fail(Status::UNINITIALIZED, "a plugin cannot start tasks while it is instantiated"));
        }
        let Some(library) = self.library.clone() else {
            return Err(self.fail(Status::INVALID, "this plugin cannot start tasks"));
        };
        if let Err(refusal) = self.tenant.supervisor.admit(&library.digest, &self.tenant.limits) {
            return Err(self.fail(Status::RESOURCE, format!("no task was started: {refusal}")));
        }
        let run = library.exported(TASK_ENTRY).and_then(|i| library.function(&i, "run"));
        let Some(run) = run else {
            return Err(self.fail(
                Status::INVALID,
                format!("the plugin does not export {TASK_ENTRY}.run, so it cannot start tasks"),
            ));
        };
        // A task of a communicator ends with it: a retry on the same address must not meet the old one.
        let abort = if self.core.is_some() {
            self.abort.clone()
        } else {
            match AbortToken::new() {
                Ok(a) => a,
                Err(e) => {
                    let limit = hw_bridge::os::exhausted::limit_behind(&e);
                    let why = format!("a task's abort event could not be made: {e}{limit}");
                    return Err(self.fail(Status::RESOURCE, why));
                }
            }
        };
        let tenant = self.tenant.clone();
        let mut tasks = lock(&tenant.tasks);
        tasks.running.retain(|t| !t.thread.is_finished());
        if tasks.closing {
            let why = format!("tenant {} is closing and starts no background tasks", tenant.name);
            return Err(self.fail(Status::RESOURCE, why));
        }
        if tasks.running.len() >= self.grant.tasks {
            let most = self.grant.tasks;
            return Err(self.refuse(Status::RESOURCE, "limits.tasks", "asked for one more background task", most));
        }
        let (owner, weak, key, root_name) = (tenant.clone(), abort.downgrade(), self.key, self.root_name.clone());
        let body = move || {
            let tenant = owner.clone();
            let ended = |why: &str| {
                if tenant.may_log() {
                    tracing::warn!(tenant = %tenant.name, task = %kind, "a background task ended: {why}");
                }
            };
            // Instantiated here and not by the spawner, whose locks guest code must not run under.
            let mut state_of = HostState::new(owner, Some(library.clone()), abort, None);
            (state_of.key, state_of.root_name) = (key, root_name);
            let instance = match Instance::new(&library, state_of, Patience::Usual) {
                Ok(i) => i,
                Err(why) => return ended(&format!("its instance could not be made: {why}")),
            };
            let handle = match listener.map(|l| instance.peek(|s| s.add(l))).transpose() {
                Ok(h) => h,
                Err(s) => return ended(&format!("it could not take its listener over: {}", Status::from(&s))),
            };
            type Params<'a> = (&'a str, &'a [u8], Option<Resource<ListenerObject>>);
            let params: Params<'_> = (&kind, &state, handle);
            let usual = Patience::Usual;
            match instance.call::<_, Result<(), NrtStatus>>("task-entry.run", usual, None, &run, params) {
                Ok((Ok(()), _)) => {
                    // A line that nobody hears costs nothing of the rate.
                    if tracing::enabled!(tracing::Level::DEBUG) && tenant.may_log() {
                        tracing::debug!(tenant = %tenant.name, task = %kind, "task ended");
                    }
                }
                Ok((Err(s), causes)) => ended(&format!("{}: {}", Status::from(&s), causes.join("; "))),
                Err(e) => ended(&e.to_string()),
            }
        };
        match std::thread::Builder::new().name("wccl-task".into()).spawn(body) {
            Ok(thread) => {
                tenant.counters.task();
                tasks.running.push(Task { abort: weak, thread });
                Ok(())
            }
            Err(e) => {
                let limit = hw_bridge::os::exhausted::limit_of_threads(&e);
                Err(self.fail(Status::RESOURCE, format!("a task's thread could not be started: {e}{limit}")))
            }
        }
    }
}

impl Host for HostState {
    fn spawn(&mut self, kind: String, state: Vec<u8>, listener: Option<Resource<ListenerObject>>) -> Trap<Answer<()>> {
        let moved = match listener {
            None => None,
            Some(handle) => match self.remove(handle) {
                Some(l) => Some(l),
                None => {
                    return Ok(Err(
                        self.fail(Status::INVALID_HANDLE, "the listener handed to a task is not the plugin's")
                    ));
                }
            },
        };
        Ok(self.do_spawn(kind, state, moved))
    }
}
