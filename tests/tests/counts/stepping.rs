//! Instructions that a thread executes in user space, counted one by one.
//!
//! With the trap flag set the processor raises an exception behind each instruction, which the kernel hands to the thread as
//! SIGTRAP. So a thread counts itself: no second process, no counter of the processor (which a virtual machine may not have), no
//! right that a container may lack. An instruction that repeats itself (`rep movsb`) counts once for each time; what the
//! kernel does in a system call counts nothing. Each trap takes microseconds: whoever is counted is very slow.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Traps so far. One thread is counted at a time.
static TRAPS: AtomicU64 = AtomicU64::new(0);
static ONE: Mutex<()> = Mutex::new(());

extern "C" fn on_trap(_: c_int) {
    TRAPS.fetch_add(1, Ordering::Relaxed);
}

/// The trap flag of this thread, set until this is dropped.
struct Stepping;

impl Stepping {
    #[inline(always)]
    fn begin() -> Stepping {
        // SAFETY: sets one flag of this thread, for which the caller has a handler; pushes and pops as much.
        unsafe { std::arch::asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
        Stepping
    }
}

impl Drop for Stepping {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: clears that flag; pushes and pops as much.
        unsafe { std::arch::asm!("pushfq", "and qword ptr [rsp], -0x101", "popfq") };
    }
}

/// How many instructions `f` takes on this thread, and what it answers. A few more or less than are in it, as the compiler passes
/// what it needs.
pub fn instructions<R>(f: impl FnOnce() -> R) -> (u64, R) {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the handler only adds to an atomic number, which may be done at any time; it stays for good.
    let before = unsafe { libc::signal(libc::SIGTRAP, on_trap as *const () as libc::sighandler_t) };
    assert_ne!(before, libc::SIG_ERR, "{}", std::io::Error::last_os_error());
    TRAPS.store(0, Ordering::Relaxed);
    let stepping = Stepping::begin();
    let answer = f();
    drop(stepping);
    // The three that clear the flag are counted too.
    (TRAPS.load(Ordering::Relaxed) - 3, answer)
}

#[test]
fn each_instruction_of_this_thread_counts_once() {
    // SAFETY: counts a register down.
    let looped = |n: u32| unsafe { std::arch::asm!("2:", "dec {0:e}", "jnz 2b", inout(reg) n => _) };
    let (few, ()) = instructions(|| looped(100));
    let (many, ()) = instructions(|| looped(350));
    assert_eq!(many - few, 500);
    assert!((200..220).contains(&few), "{few}");
    let other = std::thread::spawn(move || looped(1 << 30));
    assert_eq!(instructions(|| looped(100)).0, few);
    other.join().unwrap();
    // Behind it nothing is counted any more.
    let after = TRAPS.load(Ordering::Relaxed);
    looped(100);
    assert_eq!(TRAPS.load(Ordering::Relaxed), after);
}
