//! The WASI interfaces that a policy grants, one by one, and no other: without variables, arguments and files.
//!
//! The one that waits is `wasi:io/poll`. It is ours: a wait ends with the abort and the deadlines of the call that it is in.

use std::collections::BTreeSet;
use std::time::Duration;

use wasmtime::component::{HasSelf, Linker, Resource};
use wasmtime_wasi::cli::{WasiCli, WasiCliView};
use wasmtime_wasi::clocks::{WasiClocks, WasiClocksView};
use wasmtime_wasi::p2::DynPollable;
use wasmtime_wasi::p2::bindings::sync::io::poll;
use wasmtime_wasi::p2::bindings::{cli, clocks, random};
use wasmtime_wasi::random::WasiRandom;
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};

use crate::imports::Trap;
use crate::store::{Ended, HostState, Waited};

/// Random bytes of one call.
const MAX_RANDOM: u64 = 64 << 10;
/// Pollables of one poll: each is looked at in every round.
const MAX_POLLED: usize = 1024;
/// Pause between two looks at them: the grain of a guest's sleep.
const ROUND: Duration = Duration::from_millis(1);

/// Adds what is granted. A name is one of [`crate::served::WASI`].
pub(crate) fn add_to_linker(linker: &mut Linker<HostState>, granted: &BTreeSet<String>) -> wasmtime::Result<()> {
    for name in granted {
        match name.as_str() {
            "wasi:cli/environment" => cli::environment::add_to_linker::<_, WasiCli>(linker, HostState::cli),
            "wasi:cli/exit" => cli::exit::add_to_linker::<_, WasiCli>(linker, HostState::cli),
            "wasi:clocks/monotonic-clock" => {
                clocks::monotonic_clock::add_to_linker::<_, WasiClocks>(linker, HostState::clocks)
            }
            "wasi:clocks/wall-clock" => clocks::wall_clock::add_to_linker::<_, WasiClocks>(linker, HostState::clocks),
            "wasi:io/poll" => poll::add_to_linker::<_, HasSelf<_>>(linker, |s| s),
            "wasi:random/insecure" => {
                random::insecure::add_to_linker::<_, WasiRandom>(linker, |s| s.ctx().ctx.random())
            }
            "wasi:random/insecure-seed" => {
                random::insecure_seed::add_to_linker::<_, WasiRandom>(linker, |s| s.ctx().ctx.random())
            }
            "wasi:random/random" => random::random::add_to_linker::<_, WasiRandom>(linker, |s| s.ctx().ctx.random()),
            other => Err(wasmtime::format_err!("{other} is granted and not served")),
        }?;
    }
    Ok(())
}

impl WasiView for HostState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        let ctx = self.wasi.get_or_insert_with(|| Box::new(WasiCtx::builder().max_random_size(MAX_RANDOM).build()));
        WasiCtxView { ctx, table: &mut self.table }
    }
}

impl HostState {
    /// Waits until one is ready, and answers which are.
    fn wait_for_any(&mut self, pollables: &[Resource<DynPollable>]) -> Trap<Vec<u32>> {
        if pollables.is_empty() || pollables.len() > MAX_POLLED {
            let n = pollables.len();
            return Err(wasmtime::format_err!("a poll is of 1 to {MAX_POLLED} pollables, the plugin gave {n}"));
        }
        let until = self.deadline(u32::MAX);
        loop {
            let mut ready = Vec::new();
            for (i, p) in (0..).zip(pollables) {
                if poll::HostPollable::ready(&mut self.table, Resource::new_borrow(p.rep()))? {
                    ready.push(i);
                }
            }
            if !ready.is_empty() {
                return Ok(ready);
            }
            match self.pause(ROUND, until) {
                Waited::Ready => {}
                Waited::Ended if self.abort.aborted() => {
                    self.ended = Ended::ForCaller;
                    return Err(wasmtime::format_err!("a poll was aborted: {}", self.abort.reason()));
                }
                // WASI has no answer for this; a guest that was given one would poll again.
                Waited::Ended | Waited::Late => {
                    return Err(self.out_of_time("a poll waited until the call had no time left"));
                }
            }
        }
    }
}

impl poll::Host for HostState {
    fn poll(&mut self, pollables: Vec<Resource<DynPollable>>) -> Trap<Vec<u32>> {
        self.wait_for_any(&pollables)
    }
}

impl poll::HostPollable for HostState {
    fn ready(&mut self, pollable: Resource<DynPollable>) -> Trap<bool> {
        poll::HostPollable::ready(&mut self.table, pollable)
    }

    fn block(&mut self, pollable: Resource<DynPollable>) -> Trap<()> {
        self.wait_for_any(&[pollable]).map(drop)
    }

    fn drop(&mut self, pollable: Resource<DynPollable>) -> Trap<()> {
        poll::HostPollable::drop(&mut self.table, pollable)
    }
}
