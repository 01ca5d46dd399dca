//! A name that is published on this machine.

use std::os::fd::OwnedFd;

use crate::accounts::Counted;

/// A published name; dropping it withdraws it.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) stop: OwnedFd,
    pub(crate) thread: Option<std::thread::JoinHandle<()>>,
    pub(crate) _counted: Counted,
}

impl Drop for Published {
    fn drop(&mut self) {
        // Our own event: the write cannot fail in a way that matters.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}
