//! Messages between two ranks of a communicator, without the others: `send`, `recv`, and both in the background.
//!
//! The data plane has them ([`hw_bridge::p2p`]: matching, order, bounds); here are the buffers of programs, and the links. Ranks
//! that are no neighbours of a ring are linked when one of the two first names the other: each rank hands out an invitation in
//! the init, once, to all, and by it any of them maps the other's memory later on, without the library, the other ranks, or a
//! call of the other one.
//!
//! Nothing of this passes a gate: a hot swap goes on under messages, and messages under a hot swap.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hw_bridge::exec::sequencer::LocalMem;
use hw_bridge::memory::links::IPC_BYTES;
use hw_bridge::p2p::{self, Mailbox, Received, Request};

use crate::api::buffer::{Buffer, BufferMut, View, ViewMut};
use crate::api::communicator::Communicator;
use crate::api::memory::DeviceMemory;
use crate::error::Error;
use crate::plane::Seat;
use crate::plane::ask::{Answer, Ask};
use crate::plane::host::bad;
use sandbox::status::Status;
use sandbox::store::Patience;

/// How long another rank's host may take to answer who links it, at least.
const MOMENT: Duration = Duration::from_secs(1);

/// What is sent.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'a> {
    /// Private memory of the process.
    Host(&'a [u8]),
    /// A stretch of device memory.
    Device {
        /// The tensor.
        tensor: &'a DeviceMemory,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
}

/// All elements of a typed buffer.
impl<'a, B: Buffer + ?Sized> From<&'a B> for Payload<'a> {
    fn from(buffer: &'a B) -> Payload<'a> {
        match buffer.view() {
            View::Device(memory) => memory.into(),
            View::Private(bytes) => Payload::Host(bytes),
        }
    }
}

/// All of it.
impl<'a> From<&'a DeviceMemory> for Payload<'a> {
    fn from(tensor: &'a DeviceMemory) -> Payload<'a> {
        Payload::Device { tensor, offset: 0, bytes: tensor.len() }
    }
}

/// Where a message is received: a shorter one leaves the rest as it is.
#[derive(Debug)]
pub enum Room<'a> {
    /// Private memory of the process.
    Host(&'a mut [u8]),
    /// A stretch of device memory.
    Device {
        /// The tensor.
        tensor: &'a DeviceMemory,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
}

/// All elements of a typed buffer.
impl<'a, B: BufferMut + ?Sized> From<&'a mut B> for Room<'a> {
    fn from(buffer: &'a mut B) -> Room<'a> {
        match buffer.view_mut() {
            ViewMut::Device(memory) => memory.into(),
            ViewMut::Private(bytes) => Room::Host(bytes),
        }
    }
}

/// All of it.
impl<'a> From<&'a DeviceMemory> for Room<'a> {
    fn from(tensor: &'a DeviceMemory) -> Room<'a> {
        Room::Device { tensor, offset: 0, bytes: tensor.len() }
    }
}

/// What a message in the background owns meanwhile.
#[derive(Debug)]
pub enum MessageBuffer {
    /// Private memory of the process.
    Host(Vec<u8>),
    /// A stretch of device memory.
    Device {
        /// The tensor.
        tensor: Arc<DeviceMemory>,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
}

impl From<Vec<u8>> for MessageBuffer {
    fn from(bytes: Vec<u8>) -> MessageBuffer {
        MessageBuffer::Host(bytes)
    }
}

/// All of it.
impl From<Arc<DeviceMemory>> for MessageBuffer {
    fn from(tensor: Arc<DeviceMemory>) -> MessageBuffer {
        let bytes = tensor.len();
        MessageBuffer::Device { tensor, offset: 0, bytes }
    }
}

/// How a message in the background ended.
#[derive(Debug)]
pub struct Delivered {
    /// The buffer that was handed over.
    pub buffer: MessageBuffer,
    /// What a receive got; of a send whom it went to, its tag and its bytes.
    pub result: Result<Received, Error>,
}

/// A send or a receive in the background, which has its buffer meanwhile.
///
/// All of a rank's messages move on while the rank waits for one or tests one, and not otherwise. Its deadline counts from the
/// call. One that is dropped goes on all the same; its buffer is freed when it has ended.
#[derive(Debug)]
pub struct Message {
    request: Request,
    /// The tensor of the buffer.
    tensor: Option<Arc<DeviceMemory>>,
    /// The rank stays in its group.
    _seat: Arc<Seat>,
}

impl Message {
    /// Whether it has ended; [`Message::wait`] answers at once then.
    pub fn test(&mut self) -> bool {
        self.request.test()
    }

    /// Waits at most `patience`; whether it has ended.
    pub fn wait_for(&mut self, patience: Duration) -> bool {
        self.request.wait_for(patience)
    }

    /// Waits until it has ended, which its deadline sees to.
    pub fn wait(self) -> Delivered {
        let done = self.request.wait();
        let buffer = match (done.buffer, self.tensor) {
            (p2p::Owned::Device(_, offset, bytes), Some(tensor)) => MessageBuffer::Device { tensor, offset, bytes },
            (p2p::Owned::Private(bytes), _) => MessageBuffer::Host(bytes),
            // Only with a tensor is there a buffer in device memory.
            (p2p::Owned::Device(..), None) => MessageBuffer::Host(Vec::new()),
        };
        Delivered { buffer, result: done.result.map_err(Error::from) }
    }
}

/// A communicator's messages.
#[derive(Debug, Default)]
pub(super) struct Messages {
    mailbox: OnceLock<Arc<Mailbox>>,
    /// Of all ranks, by which they can be linked.
    invitations: OnceLock<Vec<u8>>,
}

impl Messages {
    /// Hands this rank's invitation to all and takes theirs; once, in the init, by every rank.
    pub(super) fn prepare(&self, comm: &Communicator) -> Result<(), Error> {
        if comm.nranks() > 1 {
            let mine = match comm.plane.ask(Ask::Invite, Patience::Usual)? {
                Answer::Bytes(bytes) => bytes,
                other => return Err(other.unexpected("an invitation")),
            };
            // The first ones stay, and these are the first.
            let _ = self.invitations.set(comm.bootstrap_all_gather(&mine)?);
        }
        Ok(())
    }
}

/// The memory of a call.
fn device<'a>(tensor: &'a DeviceMemory, offset: u64, bytes: u64, what: &str) -> Result<LocalMem<'a>, Error> {
    LocalMem::hbm(&tensor.0, offset, bytes).ok_or_else(|| {
        let have = tensor.len();
        bad(format!("{what}: {bytes} bytes from byte {offset} on are not inside a tensor of {have} bytes"))
    })
}

impl Communicator {
    /// Sends a message to rank `to`, which may be this one; no other rank need do anything. One of up to 8 KiB is sent when it
    /// is on its way, a larger one when the other rank has received it. Messages to one rank are received in the order of the
    /// calls, as far as a receive would take either.
    ///
    /// The deadline of operations bounds the wait for the other rank, for which up to 32 messages (up to 1,088 of at most 32
    /// bytes) can be on their way. If it passes, the message is taken back, and the communicator is as before.
    ///
    /// # Errors
    /// [`Error::Message`], after which only this message was not sent; [`Error::Usage`] for bytes that are not inside the
    /// tensor; [`Error::Link`] if the two could not be linked; [`Error::Op`] if the communicator has failed before.
    pub fn send<'a>(&self, to: usize, tag: u32, payload: impl Into<Payload<'a>>) -> Result<(), Error> {
        let mem = match payload.into() {
            Payload::Host(bytes) => LocalMem::input(bytes),
            Payload::Device { tensor, offset, bytes } => device(tensor, offset, bytes, "send")?,
        };
        self.reach(to)?;
        Ok(self.mailbox().send(to, tag, mem, self.timeout())?)
    }

    /// Receives the next message of rank `from`, or of any (`None`), with this tag, or any. Messages of one rank are looked
    /// through in the order in which they were sent, the ranks in turn. It may be shorter than the room.
    ///
    /// The deadline of operations bounds the wait; if it passes, the receive is taken back, and the communicator is as before.
    ///
    /// # Errors
    /// As [`Communicator::send`]. A message that is longer than the room is lost, and an error of this call alone. One from any
    /// rank fails for want of senders when all other ranks have left.
    pub fn recv<'a>(
        &self,
        from: Option<usize>,
        tag: Option<u32>,
        room: impl Into<Room<'a>>,
    ) -> Result<Received, Error> {
        let mem = match room.into() {
            Room::Host(bytes) => LocalMem::output(bytes),
            Room::Device { tensor, offset, bytes } => device(tensor, offset, bytes, "recv")?,
        };
        self.reach_sender(from)?;
        Ok(self.mailbox().recv(from, tag, mem, self.timeout())?)
    }

    /// As [`Communicator::send`], in the background; any number can be.
    ///
    /// # Errors
    /// [`Error::Link`]; whatever else is wrong comes with the message.
    pub fn isend(&self, to: usize, tag: u32, buffer: impl Into<MessageBuffer>) -> Result<Message, Error> {
        self.reach(to)?;
        let (tensor, buffer) = parts(buffer.into());
        Ok(self.message(self.mailbox().isend(to, tag, buffer, self.timeout()), tensor))
    }

    /// As [`Communicator::recv`], in the background: it is posted when this comes back. Any number can be.
    ///
    /// # Errors
    /// As [`Communicator::isend`].
    pub fn irecv(
        &self,
        from: Option<usize>,
        tag: Option<u32>,
        buffer: impl Into<MessageBuffer>,
    ) -> Result<Message, Error> {
        self.reach_sender(from)?;
        let (tensor, buffer) = parts(buffer.into());
        Ok(self.message(self.mailbox().irecv(from, tag, buffer, self.timeout()), tensor))
    }

    fn message(&self, request: Request, tensor: Option<Arc<DeviceMemory>>) -> Message {
        Message { request, tensor, _seat: self.plane.clone() }
    }

    fn mailbox(&self) -> &Arc<Mailbox> {
        let direct = self.runtime().config().direct;
        self.messages.mailbox.get_or_init(|| Arc::new(Mailbox::new(self.core().endpoint.clone(), direct)))
    }

    /// Links whoever a receive may have a message from. From a rank that is gone none comes, which is no error of a receive that
    /// takes those of others.
    fn reach_sender(&self, from: Option<usize>) -> Result<(), Error> {
        let unless_gone = |p| self.reach(p).or_else(|e| if e.status() == Status::CLOSED { Ok(()) } else { Err(e) });
        match from {
            Some(p) => self.reach(p),
            None => (0..self.nranks()).try_for_each(unless_gone),
        }
    }

    /// Has rank `peer` linked, if it exists.
    fn reach(&self, peer: usize) -> Result<(), Error> {
        let endpoint = &self.core().endpoint;
        if peer >= self.nranks() || endpoint.linked(peer) {
            return Ok(());
        }
        endpoint.usable()?;
        let all = self.messages.invitations.get();
        let invitation = all.and_then(|all| all.get(peer * IPC_BYTES..(peer + 1) * IPC_BYTES)).unwrap_or_default();
        let ask = Ask::Link { peer, invitation: invitation.to_vec() };
        // The other host answers by itself, within a moment, which any deadline leaves; one beyond what the clock can say is
        // the library's.
        let until = Instant::now().checked_add(self.timeout().max(MOMENT));
        self.plane.ask(ask, until.map_or(Patience::Usual, Patience::Waits))?;
        self.plane.check_members()
    }
}

/// The tensor of a buffer, and what the data plane has of it.
fn parts(buffer: MessageBuffer) -> (Option<Arc<DeviceMemory>>, p2p::Owned) {
    match buffer {
        MessageBuffer::Host(bytes) => (None, p2p::Owned::Private(bytes)),
        MessageBuffer::Device { tensor, offset, bytes } => {
            let buf = tensor.0.clone();
            (Some(tensor), p2p::Owned::Device(buf, offset, bytes))
        }
    }
}
