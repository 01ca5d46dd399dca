//! The monotonic clock, and the counter of cycles beside it.

/// The counter of cycles, or nanoseconds where there is none that all cores share.
#[inline]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86-64 processor has RDTSC; it reads a counter and nothing else.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        clock_ns()
    }
}

/// Nanoseconds of the monotonic clock.
pub fn clock_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// This moment: nanoseconds of the monotonic clock, and ticks.
pub fn now() -> (u64, u64) {
    (clock_ns(), ticks())
}
