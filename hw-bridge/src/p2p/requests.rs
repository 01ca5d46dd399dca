//! Sends and receives in the background, which own their memory meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::matching::{Id, Operation};
use super::{Deadline, Mailbox, P2pError, Received};
use crate::exec::sequencer::{LocalMem, OpError};
use crate::limits::NAP;
use crate::memory::hbm::HbmBuf;

/// Memory that an operation in the background owns.
#[derive(Debug)]
pub enum Owned {
    /// Private memory of the process.
    Private(Vec<u8>),
    /// Bytes of a piece of device memory: which piece, first byte, how many.
    Device(Arc<HbmBuf>, u64, u64),
}

impl Owned {
    /// The memory; `what` is it for.
    fn memory(&mut self, what: &'static str, rank: usize) -> Result<LocalMem<'_>, P2pError> {
        match self {
            Owned::Private(bytes) => Ok(LocalMem::output(bytes)),
            Owned::Device(buf, offset, len) => {
                let (have, offset, len) = (buf.len(), *offset, *len);
                LocalMem::hbm(buf, offset, len).ok_or(P2pError::Buffer { rank, what, have, offset, len })
            }
        }
    }
}

/// How an operation ended.
#[derive(Debug)]
pub struct Finished {
    /// The memory that was handed over.
    pub buffer: Owned,
    /// What a receive got; of a send whom it went to, its tag and its bytes.
    pub result: Result<Received, P2pError>,
}

/// An operation in the background, which has its buffer meanwhile. Its deadline counts from when it was issued, and is looked at by
/// who waits for it or tests it. One that is dropped goes on whenever another of the mailbox is waited for or tested; its buffer
/// is freed when it has ended.
#[derive(Debug)]
pub struct Request {
    mailbox: Arc<Mailbox>,
    begun: Begun,
    deadline: Deadline,
    /// When it was last looked whether it can still be done.
    checked: Option<Instant>,
}

/// What a request stands for.
#[derive(Debug)]
enum Begun {
    Operation(Id),
    /// A call that was wrong, which is all that will come of it.
    Refused(P2pError, Owned),
    /// What it was has been answered.
    Over,
}

impl Mailbox {
    /// As [`Mailbox::send`], in the background. What is wrong with the call comes with the request.
    pub fn isend(self: &Arc<Mailbox>, to: usize, tag: u32, buffer: Owned, timeout: Duration) -> Request {
        self.issue(buffer, timeout, "a send", |mailbox, mem| mailbox.sending(to, tag, mem))
    }

    /// As [`Mailbox::recv`], in the background; it is posted when this comes back. What is wrong with the call comes with the
    /// request.
    pub fn irecv(
        self: &Arc<Mailbox>,
        from: Option<usize>,
        tag: Option<u32>,
        buffer: Owned,
        timeout: Duration,
    ) -> Request {
        self.issue(buffer, timeout, "a receive", |mailbox, mem| mailbox.receiving(from, tag, mem))
    }

    fn issue(
        self: &Arc<Mailbox>,
        mut buffer: Owned,
        timeout: Duration,
        what: &'static str,
        op: impl FnOnce(&Mailbox, &LocalMem<'_>) -> Result<Operation, P2pError>,
    ) -> Request {
        let since = Some(Instant::now());
        let begun = match buffer.memory(what, self.endpoint.rank()).and_then(|mem| op(self, &mem)) {
            Ok(mut op) => {
                // Moving a Vec or an Arc leaves the bytes where they are.
                op.owned = Some(buffer);
                Begun::Operation(self.begin(op))
            }
            Err(e) => Begun::Refused(e, buffer),
        };
        Request { mailbox: self.clone(), begun, deadline: Deadline { timeout, since, wait: None }, checked: None }
    }
}

impl Request {
    /// The operation, if there is anything to wait for in this process.
    fn running(&self) -> Option<Id> {
        match self.begun {
            Begun::Operation(id) if !crate::os::fork::in_child() => Some(id),
            _ => None,
        }
    }

    /// Moves on what can be moved on, and answers whether this one has ended: [`Request::wait`] says how, at once.
    pub fn test(&mut self) -> bool {
        let Some(id) = self.running() else { return true };
        if self.mailbox.advance(id) {
            return true;
        }
        if self.checked.is_some_and(|t| t.elapsed() < NAP / 2) {
            return false;
        }
        self.checked = Some(Instant::now());
        self.mailbox.check(id, &mut self.deadline);
        self.mailbox.advance(id)
    }

    /// Waits at most `patience`; whether it has ended.
    pub fn wait_for(&mut self, patience: Duration) -> bool {
        let Some(id) = self.running() else { return true };
        let mut enough = Deadline { timeout: patience, since: Some(Instant::now()), wait: None };
        let deadline = &mut self.deadline;
        self.mailbox.wait(id, || {
            self.mailbox.check(id, deadline);
            !enough.passed(0)
        })
    }

    /// Waits until it has ended, which its deadline sees to.
    pub fn wait(mut self) -> Finished {
        if let Some(id) = self.running() {
            let deadline = &mut self.deadline;
            self.mailbox.wait(id, || {
                self.mailbox.check(id, deadline);
                true
            });
            self.begun = Begun::Over;
            let (result, buffer) = self.mailbox.take(id);
            return Finished { buffer: buffer.unwrap_or(Owned::Private(Vec::new())), result };
        }
        match std::mem::replace(&mut self.begun, Begun::Over) {
            Begun::Refused(e, buffer) => Finished { buffer, result: Err(e) },
            // What the operation has is the parent's.
            Begun::Operation(_) | Begun::Over => {
                let (rank, parent) = (self.mailbox.endpoint.rank(), self.mailbox.endpoint.control().pid());
                let e = OpError::Forked { rank, what: "a message".into(), parent };
                Finished { buffer: Owned::Private(Vec::new()), result: Err(e.into()) }
            }
        }
    }

    /// The same with a deadline that has passed.
    #[cfg(test)]
    pub(super) fn expire(mut self) -> Request {
        self.deadline = Deadline { timeout: Duration::ZERO, since: None, wait: None };
        self
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let Some(id) = self.running() else { return };
        let mut st = self.mailbox.state();
        // What is done is freed; with the lock no longer held, since it is memory.
        let freed = st.is_done(id).then(|| st.remove(id));
        if let Some(op) = st.operation_mut(id).filter(|_| freed.is_none()) {
            op.detached = true;
        }
        drop(st);
        drop(freed);
    }
}
