//! The floating-point state of a thread: how it rounds, whether it keeps subnormals, which exceptions end it.
//!
//! A thread belongs to the program, and the program, or a library that it loaded, may have changed that state: `gcc -shared
//! -Ofast` links a constructor that makes subnormals zero, and threads inherit it. Results must not depend on that: the ranks of
//! a collective that compute the same element would get different bits, and say nothing. So whatever computes with floats
//! here runs [`in_default_float_state`]: to nearest even, subnormals kept, no exception unmasked.
//!
//! Invariants:
//! * What runs inside sees the default state; that is also what Rust code may assume of it.
//! * A state that was found changed is put back bit by bit, with its exception flags, also when the inside panics.
//! * A state that was not is only read: a few cycles, no write. (Flags may rise then, as in any code that computes.)
//!
//! On x86-64 the state is MXCSR, on aarch64 FPCR and FPSR. Elsewhere nothing is known of it, and the inside runs as it is.

use std::mem::ManuallyDrop;

/// Runs `f` in the default floating-point state, whatever state the calling thread is in, and leaves that as it was.
#[inline(always)]
#[expect(clippy::redundant_closure, reason = "the closure is moved into memory for the second way only")]
pub fn in_default_float_state<R>(f: impl FnOnce() -> R) -> R {
    if register::is_default() { f() } else { changed(move || f()) }
}

/// What [`changed`] runs, and what comes of it.
union Call<F, R> {
    function: ManuallyDrop<F>,
    result: ManuallyDrop<R>,
}

#[cold]
#[inline(never)]
fn changed<F: FnOnce() -> R, R>(f: F) -> R {
    /// Puts the state back, also behind a panic.
    struct Restore(register::State);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: the state that the thread was in when it came here.
            unsafe { register::write(&self.0) }
        }
    }

    /// # Safety
    /// `call` points at a `Call<F, R>` that holds its function; afterwards it holds the result.
    unsafe fn run<F: FnOnce() -> R, R>(call: *mut ()) {
        let call = call.cast::<Call<F, R>>();
        // SAFETY: the caller's contract; the function is taken once, and overwritten by the result.
        unsafe {
            let function = ManuallyDrop::take(&mut (*call).function);
            (*call).result = ManuallyDrop::new(function());
        }
    }

    let mut call = Call { function: ManuallyDrop::new(f) };
    let restore = Restore(register::read());
    // The compiler moves float arithmetic across assembly as it likes, since it knows of no state. So what is to be computed
    // here is behind a call of a function whose address has gone through the assembly that sets the state: it cannot be known
    // before, nothing of it can be inlined or drawn forward, and as a call of something unknown it cannot move behind the
    // assembly that puts the state back.
    // SAFETY: the default state is what Rust code is compiled for.
    let inside = unsafe { register::set_default(run::<F, R>) };
    // SAFETY: `call` holds the function.
    unsafe { inside((&raw mut call).cast()) };
    drop(restore);
    // SAFETY: `run` came back, so that the result is there, and it is taken once.
    unsafe { ManuallyDrop::into_inner(call.result) }
}

#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    /// MXCSR as a process begins with it: to nearest, subnormals kept, every exception masked.
    const DEFAULT: u32 = 0x1F80;
    /// The flags of exceptions that have been: no part of the state that computations depend on.
    const FLAGS: u32 = 0x3F;

    pub(super) struct State(u32);

    #[inline]
    pub(super) fn read() -> State {
        let mut mxcsr = 0u32;
        // SAFETY: stores four bytes to where there is room for them, and does nothing else.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack, preserves_flags)) };
        State(mxcsr)
    }

    #[inline]
    pub(super) fn is_default() -> bool {
        read().0 & !FLAGS == DEFAULT
    }

    /// # Safety
    /// Only a state that [`read`] gave, on the way back to code that was in it.
    pub(super) unsafe fn write(state: &State) {
        // SAFETY: loads four bytes; no bit is set that the processor did not itself show.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const state.0, options(nostack, preserves_flags, readonly)) };
    }

    /// Sets the default state; answers `then`.
    ///
    /// # Safety
    /// The state is to be put back by [`write`].
    pub(super) unsafe fn set_default(then: unsafe fn(*mut ())) -> unsafe fn(*mut ()) {
        let (mxcsr, mut then) = (DEFAULT, then);
        // SAFETY: loads four bytes. The operand goes through unchanged.
        unsafe {
            asm!("ldmxcsr [{}]", "/* {} */", in(reg) &raw const mxcsr, inout(reg) then, options(nostack, preserves_flags));
        }
        then
    }
}

#[cfg(target_arch = "aarch64")]
mod register {
    use std::arch::asm;

    /// The control register, and the flags of exceptions that have been, which are in a register of their own.
    pub(super) struct State {
        fpcr: u64,
        fpsr: u64,
    }

    #[inline]
    fn fpcr() -> u64 {
        let value: u64;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nomem, nostack, preserves_flags)) };
        value
    }

    #[inline]
    pub(super) fn read() -> State {
        let fpsr: u64;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, fpsr", out(reg) fpsr, options(nomem, nostack, preserves_flags)) };
        State { fpcr: fpcr(), fpsr }
    }

    /// Zero is to nearest, subnormals kept, every trap off.
    #[inline]
    pub(super) fn is_default() -> bool {
        fpcr() == 0
    }

    /// # Safety
    /// Only a state that [`read`] gave, on the way back to code that was in it.
    pub(super) unsafe fn write(state: &State) {
        // SAFETY: no bit is set that the processor did not itself show.
        unsafe {
            asm!("msr fpcr, {}", "msr fpsr, {}", in(reg) state.fpcr, in(reg) state.fpsr, options(nostack, preserves_flags));
        }
    }

    /// Sets the default state; answers `then`.
    ///
    /// # Safety
    /// The state is to be put back by [`write`].
    pub(super) unsafe fn set_default(then: unsafe fn(*mut ())) -> unsafe fn(*mut ()) {
        let mut then = then;
        // SAFETY: zero is the state that a process begins with. The operand goes through unchanged.
        unsafe { asm!("msr fpcr, xzr", "/* {} */", inout(reg) then, options(nostack, preserves_flags)) };
        then
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod register {
    pub(super) struct State;

    pub(super) fn read() -> State {
        State
    }

    pub(super) fn is_default() -> bool {
        true
    }

    /// # Safety
    /// None.
    pub(super) unsafe fn write(_: &State) {}

    /// # Safety
    /// None.
    pub(super) unsafe fn set_default(then: unsafe fn(*mut ())) -> unsafe fn(*mut ()) {
        then
    }
}
