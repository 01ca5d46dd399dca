//! Waiting: spin briefly, give the core away, then sleep on a futex.
//!
//! A [`Bell`] lives in shared memory. Whoever waits sleeps on its *own* bell; whoever publishes something looks whether
//! a peer sleeps and rings. The order that makes this safe: the waiter announces its sleep, then looks once more; the
//! publisher publishes, then looks for sleepers; both with a full fence between, so at least one sees the other.
//!
//! A fence after every publication costs a publisher the time until its line has come over from the peer that polls it,
//! for a sleeper that is hardly ever there. So where the kernel can (`membarrier`), the sleeper has the fence executed on
//! every core that runs a registered process, before it looks for the last time; publishers then need only keep their
//! program order ([`Fence::Light`]). Both sides must take part: each process says in its control segment whether it does.
//!
//! The increment registers of the device model (INV-12) are in [`crate::model`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence, fence};
use std::time::{Duration, Instant};

use rustix::thread::{MembarrierCommand, MembarrierQuery, futex, membarrier, membarrier_query};

/// Futex word and its sleepers' count, in shared memory, written by the owner and its peers.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Bell {
    rung: AtomicU32,
    sleeping: AtomicU32,
}

impl Bell {
    /// Wakes the owner if it sleeps. Call after publishing and after one [`publish_fence`].
    #[inline]
    pub fn ring_if_sleeping(&self) {
        if self.sleeping.load(Ordering::Relaxed) != 0 {
            self.ring();
        }
    }

    /// Wakes the owner.
    #[cold]
    pub fn ring(&self) {
        self.rung.fetch_add(1, Ordering::SeqCst);
        // Waking nobody is not an error, and there is nothing else that can go wrong with a valid word.
        let _ = futex::wake(&self.rung, futex::Flags::empty(), u32::MAX >> 1);
    }

    /// Sleeps until rung, at most `nap`, unless `ready` already holds. Answers whether it was the whole nap; whoever waits looks
    /// again either way.
    pub(crate) fn sleep(&self, nap: Duration, ready: &mut impl FnMut() -> bool) -> bool {
        let before = self.rung.load(Ordering::SeqCst);
        // Several may sleep on one: threads of a rank that wait for messages, all who wait for a ballot.
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        heavy_fence();
        let mut whole = false;
        if !ready() {
            let timeout = futex::Timespec { tv_sec: nap.as_secs() as i64, tv_nsec: i64::from(nap.subsec_nanos()) };
            // The other ends are EAGAIN (rung meanwhile) and EINTR.
            let ended = futex::wait(&self.rung, futex::Flags::empty(), before, Some(&timeout));
            whole = ended == Err(rustix::io::Errno::TIMEDOUT);
        }
        self.sleeping.fetch_sub(1, Ordering::Relaxed);
        whole
    }
}

/// What a publisher executes between publishing and looking for sleepers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fence {
    /// Sleepers may not pay for us.
    Full,
    /// All sleepers have the fence executed here when they go to sleep.
    Light,
}

/// The fence between publishing and looking for sleepers.
#[inline]
pub fn publish_fence(kind: Fence) {
    match kind {
        Fence::Full => fence(Ordering::SeqCst),
        Fence::Light => compiler_fence(Ordering::SeqCst),
    }
}

/// The other side of [`Fence::Light`]: a fence here and, where publishers have none, on every core that runs one.
pub(crate) fn heavy_fence() {
    fence(Ordering::SeqCst);
    if asymmetric() {
        // It was registered, and then it does not fail.
        let _ = membarrier(MembarrierCommand::GlobalExpedited);
    }
}

/// Whether this process has its fences executed by those who go to sleep, and does so itself. Decided once.
pub fn asymmetric() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| {
        let wanted = MembarrierQuery::GLOBAL_EXPEDITED | MembarrierQuery::REGISTER_GLOBAL_EXPEDITED;
        membarrier_query().contains(wanted) && membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
    })
}

/// How long to spin and to yield before sleeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitPolicy {
    /// Looks with a pause instruction between.
    pub spins: u32,
    /// Looks with a yield of the core between.
    pub yields: u32,
    /// Whether to sleep after that, or to go on looking.
    pub sleeps: bool,
}

/// What a waiting rank does with its core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WaitMode {
    /// Spins with a core for each rank, gives the core away soon with fewer; sleeps after some milliseconds at most.
    #[default]
    Auto,
    /// Spins for long, whoever else wants the core: for cores that nobody else uses.
    Latency,
    /// Sleeps at once: for machines with other work, and jobs whose ranks wait long.
    Cpu,
}

impl std::str::FromStr for WaitMode {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(WaitMode::Auto),
            "latency" => Ok(WaitMode::Latency),
            "cpu" => Ok(WaitMode::Cpu),
            _ => Err(format!("unknown way to wait `{s}`; known are auto, latency, cpu")),
        }
    }
}

impl WaitPolicy {
    /// While other tenants are at work: the core is soon given away, whoever waits.
    pub const CROWDED: WaitPolicy = WaitPolicy { spins: 60, yields: 100, sleeps: true };

    /// The policy of a mode for `ranks` ranks on this machine that share `cpus` cores.
    pub fn of(mode: WaitMode, ranks: usize, cpus: usize) -> WaitPolicy {
        match mode {
            WaitMode::Auto => WaitPolicy::for_ranks(ranks, cpus),
            WaitMode::Latency => WaitPolicy { spins: 20_000, yields: 20, sleeps: false },
            WaitMode::Cpu => WaitPolicy { spins: 0, yields: 0, sleeps: true },
        }
    }

    /// For `ranks` ranks on this machine that share `cpus` cores: with a core for each, spinning is cheapest; with
    /// fewer, the peer we wait for may need the core we would spin on.
    pub fn for_ranks(ranks: usize, cpus: usize) -> WaitPolicy {
        if ranks <= cpus { WaitPolicy { spins: 20_000, yields: 20, sleeps: true } } else { WaitPolicy::CROWDED }
    }
}

/// Spins between two offers of the core.
const SPINS_A_YIELD: u32 = 256;

/// Waits until `ready`, calling `check` at least every [`crate::limits::NAP`] once it sleeps. `check` decides about deadlines, deaths and
/// aborts; its error ends the wait.
#[inline]
pub fn wait<E>(
    bell: &Bell,
    policy: WaitPolicy,
    mut ready: impl FnMut() -> bool,
    check: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    for spin in 1..=policy.spins {
        if ready() {
            return Ok(());
        }
        std::hint::spin_loop();
        // The kernel may have put the rank we wait for on this very core.
        if spin % SPINS_A_YIELD == 0 {
            std::thread::yield_now();
        }
    }
    wait_slowly(bell, policy, ready, check)
}

#[cold]
fn wait_slowly<E>(
    bell: &Bell,
    policy: WaitPolicy,
    mut ready: impl FnMut() -> bool,
    mut check: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    for _ in 0..policy.yields {
        if ready() {
            return Ok(());
        }
        std::thread::yield_now();
    }
    let mut last_check: Option<Instant> = None;
    loop {
        if ready() {
            return Ok(());
        }
        // Bells may ring often for others' steps; deaths are looked for on the clock, not per wake-up.
        if last_check.is_none_or(|t| t.elapsed() >= crate::limits::NAP / 2) {
            check()?;
            last_check = Some(Instant::now());
        }
        if policy.sleeps {
            bell.sleep(crate::limits::NAP, &mut ready);
            continue;
        }
        for _ in 0..SPINS_A_YIELD {
            if ready() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_sleeper_is_woken_by_a_ring() {
        let shared = Arc::new((Bell::default(), AtomicBool::new(false)));
        let other = shared.clone();
        let t = std::thread::spawn(move || {
            let policy = WaitPolicy { spins: 1, yields: 1, sleeps: true };
            wait::<()>(&other.0, policy, || other.1.load(Ordering::Acquire), || Ok(()))
        });
        while shared.0.sleeping.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        shared.1.store(true, Ordering::Release);
        publish_fence(Fence::Full);
        shared.0.ring_if_sleeping();
        assert_eq!(t.join().unwrap(), Ok(()));
    }

    /// Sleeper and publisher meet many times at the worst moment. A wake-up that is lost costs a whole nap, at the end of which
    /// what was waited for is there; so does a publisher that loses its core between the two, which is rare.
    #[test]
    fn no_wake_up_is_lost_without_the_publishers_fence() {
        use std::sync::atomic::AtomicU64;
        if !asymmetric() {
            eprintln!("this kernel has no membarrier: publishers use the full fence, which the other tests cover");
            return;
        }
        let shared = Arc::new((Bell::default(), AtomicU64::new(0), AtomicU64::new(0)));
        let other = shared.clone();
        const ROUNDS: u64 = 20_000;
        let sleeper = std::thread::spawn(move || {
            let mut lost = 0;
            for i in 1..=ROUNDS {
                let mut ready = || other.1.load(Ordering::Acquire) >= i;
                while !ready() {
                    let whole = other.0.sleep(crate::limits::NAP, &mut ready);
                    lost += u64::from(whole && ready());
                }
                other.2.store(i, Ordering::Release);
            }
            lost
        });
        for i in 1..=ROUNDS {
            shared.1.store(i, Ordering::Release);
            publish_fence(Fence::Light);
            shared.0.ring_if_sleeping();
            while shared.2.load(Ordering::Acquire) < i {
                std::thread::yield_now();
            }
        }
        let lost = sleeper.join().unwrap();
        assert!(lost < ROUNDS / 100, "{lost} of {ROUNDS}");
    }

    #[test]
    fn a_wait_that_never_gets_ready_ends_when_the_check_says_so() {
        let mut looks = 0;
        let r = wait(
            &Bell::default(),
            WaitPolicy { spins: 3, yields: 3, sleeps: true },
            || false,
            || {
                looks += 1;
                if looks == 3 { Err("enough") } else { Ok(()) }
            },
        );
        assert_eq!(r, Err("enough"));
        assert_eq!(looks, 3);
    }

    #[test]
    fn one_that_never_sleeps_looks_at_deadlines_all_the_same() {
        let (mut looks, begun) = (0, Instant::now());
        let r = wait(
            &Bell::default(),
            WaitPolicy::of(WaitMode::Latency, 8, 2),
            || false,
            || {
                looks += 1;
                if looks == 3 { Err(begun.elapsed()) } else { Ok(()) }
            },
        );
        assert!(r.unwrap_err() < Duration::from_secs(10));
    }

    #[test]
    fn more_ranks_than_cores_spin_less() {
        assert!(WaitPolicy::for_ranks(4, 2).spins < WaitPolicy::for_ranks(2, 2).spins);
    }
}
