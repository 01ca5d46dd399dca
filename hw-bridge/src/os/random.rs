//! Random bytes.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// `N` random bytes of the kernel.
///
/// # Errors
/// The kernel's.
pub fn bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    let (mut bytes, mut done) = ([0; N], 0);
    while done < N {
        match getrandom(&mut bytes[done..], GetRandomFlags::empty()) {
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(bytes)
}
