//! The tenant that must not notice: two ranks that reduce and check without a pause, for as long as the process lives.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use wccl::{CommOptions, DataType, Io, ReduceOp, Runtime};

use crate::zoo::{config, port};

/// What it has done so far.
#[derive(Debug)]
pub struct Victim {
    right: AtomicU64,
    wrong: AtomicU64,
    failed: AtomicBool,
    traps: AtomicU64,
}

static VICTIM: Victim = Victim {
    right: AtomicU64::new(0),
    wrong: AtomicU64::new(0),
    failed: AtomicBool::new(false),
    traps: AtomicU64::new(0),
};

/// The victim, which the first caller sets to work.
pub fn victim() -> &'static Victim {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let root = format!("127.0.0.1:{}", port());
        for rank in 0..2 {
            let root = root.clone();
            std::thread::Builder::new().name(format!("victim-{rank}")).spawn(move || work(rank, root)).unwrap();
        }
    });
    &VICTIM
}

fn work(rank: usize, root: String) {
    /// A rank that panics has failed.
    struct Fails;
    impl Drop for Fails {
        fn drop(&mut self) {
            VICTIM.failed.store(true, Ordering::SeqCst);
        }
    }
    let _fails = Fails;
    let mut c = config(None);
    c.tenant = "victim".into();
    c.tenant_id = 1;
    let runtime = Runtime::open(c).unwrap();
    let mut comm = runtime.init_comm(CommOptions::with_root(root, rank, 2)).unwrap();
    let t = comm.allocate(4096).unwrap();
    let mut out = vec![0; 4096];
    for round in 0u32.. {
        let mine: Vec<u8> = (0..1024u32)
            .flat_map(|i| (round.wrapping_mul(7) ^ i).wrapping_mul(rank as u32 + 1).to_le_bytes())
            .collect();
        t.write(0, &mine).unwrap();
        comm.raw().all_reduce(Io::in_place(&t), 1024, DataType::Uint32, ReduceOp::Sum).unwrap();
        t.read(0, &mut out).unwrap();
        let expected = (0..1024u32).flat_map(|i| (round.wrapping_mul(7) ^ i).wrapping_mul(3).to_le_bytes());
        let as_it_should_be = out.iter().copied().eq(expected);
        (if as_it_should_be { &VICTIM.right } else { &VICTIM.wrong }).fetch_add(1, Ordering::SeqCst);
        VICTIM.traps.fetch_add(runtime.tenant().counters.traps(), Ordering::SeqCst);
        // The zoo needs the cores too.
        std::thread::sleep(Duration::from_micros(200));
    }
}

impl Victim {
    /// Waits until both ranks have completed something after this call, and that nothing went wrong before.
    #[track_caller]
    pub fn check(&self) {
        let (before, begun) = (self.right.load(Ordering::SeqCst), Instant::now());
        while self.right.load(Ordering::SeqCst) < before + 4 {
            assert!(!self.failed.load(Ordering::SeqCst), "the victim has failed");
            assert!(begun.elapsed() < Duration::from_secs(240), "the victim is starved");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.wrong.load(Ordering::SeqCst), 0, "the victim has wrong results");
        assert_eq!(self.traps.load(Ordering::SeqCst), 0, "the victim's plugin stopped");
    }
}
