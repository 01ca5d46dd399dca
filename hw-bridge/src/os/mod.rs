//! What is asked of the operating system, each thing in one place.
//!
//! | room | owns |
//! |---|---|
//! | [`bell`] | waiting: spin, yield, futex |
//! | [`clock`] | the monotonic clock, and the counter of cycles |
//! | [`control_group`] | limits of control groups of either version, and kills for want of memory |
//! | [`credentials`] | who is behind a unix socket |
//! | [`mod@dial`] | connecting to one |
//! | [`exhausted`] | which limit of the process is behind an error, and how to raise it |
//! | [`fork`] | whether this process is a forked child |
//! | [`lock`] | a mutex that a panic does not poison |
//! | [`log_rate`] | lines of the log that others can cause, within a rate |
//! | [`patience`] | deadlines, by a clock that does not run while the process is stopped |
//! | [`process`] | what the system tells of other processes |
//! | [`random`] | random bytes |
//! | [`shown`] | what others say, made fit to stand in a line |
//! | [`signals`] | waiting for signals; what a process inherits of them |

pub mod bell;
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "the cycle counter"))]
pub mod clock;
pub mod control_group;
#[expect(unsafe_code, reason = "socket options that rustix does not have")]
pub mod credentials;
pub mod dial;
pub mod exhausted;
#[expect(unsafe_code, reason = "a page that the kernel wipes in a child")]
pub mod fork;
pub mod lock;
pub mod log_rate;
pub mod patience;
pub mod process;
pub mod random;
pub mod shown;
#[expect(unsafe_code, reason = "masks, dispositions, and what runs between fork and exec")]
pub mod signals;
