//! Every limit of this crate in one place.

use std::time::Duration;

/// Ranks of one communicator inside a server. A wait reads one word per peer, so this bounds the hot path, and it is
/// the size of the pointer tables that an operation keeps on its stack.
pub const MAX_LOCAL_RANKS: usize = 64;
/// Granularity of device memory: a page, so that freed memory can be given back.
pub const HBM_ALIGN: u64 = 4096;
/// Sequences of operations of one communicator: one for blocking calls, the others for streams.
pub const LANES: usize = 5;
/// Arrival records a rank keeps in a lane: it may be this many operations ahead of its slowest reader.
pub const SLOTS: usize = 16;
/// Payload bytes beside an arrival record.
pub const SLOT_BYTES: usize = 8 * 1024;
/// Payloads that are too large for the place beside their record which a rank keeps in a lane: with them it may be only this
/// many operations ahead of its slowest reader.
pub const LARGE_SLOTS: usize = 4;
/// Bytes of such a payload; the largest message that goes in one hop.
pub const LARGE_SLOT_BYTES: usize = 256 * 1024;
/// Operations a lane's flight recorder keeps.
pub const FLIGHT_RECORDS: usize = 64;
/// Payload bytes inside the record's own cache line; such a message costs one line transfer.
pub const INLINE_BYTES: usize = 32;
/// Bytes of one staging half. Private buffers pass through the communicator's segment in pieces of this size; two
/// halves, so that a piece is filled while the one before is read.
pub const STAGE_BYTES: usize = 512 * 1024;
/// From this size of a rank's buffer on, copies between device memories that nothing reads again go past the caches. Measured:
/// equal at 4 MiB, 3 to 48 % faster from 16 MiB on.
pub const STREAM_BYTES: u64 = 8 << 20;
/// A copy or reduction looks every so many bytes whether it was told to stop and whether other tenants are to be let past
/// ([`crate::exec::share`]), and is counted: peers that wait for it see that it goes on. It takes some 50 microseconds.
pub const STRETCH_BYTES: u64 = 256 << 10;
/// The same while there is nobody to let past: a read of a peer's private memory is a call of the kernel each time.
pub const ALONE_BYTES: u64 = 4 << 20;
/// Tenants that can meet in one market: as many as a page has lines, but for one.
pub const MARKET_TENANTS: usize = 63;
/// Bytes that an operation costs in a tenant's account besides those it moves: about what is moved in the time it takes.
pub const OPERATION_COST: u64 = 2 << 10;
/// Bytes, at the default weight, by which a tenant may get ahead of others at work before it lets them catch up.
pub const LEAD_BYTES: u64 = 1 << 20;
/// How long after it last had a turn, or was to ask again for one, a tenant counts as at work: longer than a stretch takes.
pub const AT_WORK: Duration = Duration::from_micros(300);
/// How soon a lane that lets others past first looks whether its turn has come; then when it has waited twice as long.
pub const TURN_POLL: Duration = Duration::from_micros(100);
/// How long a lane lets others past before one stretch, at most.
pub const MAX_YIELD: Duration = Duration::from_millis(2);
/// How far a tenant may get ahead of its cap.
pub const CAP_BURST: Duration = Duration::from_millis(10);
/// How long a lane waits for its cap before one stretch, at most.
pub const MAX_CAP_WAIT: Duration = Duration::from_secs(4);
/// Bytes of the sentence a failing rank leaves for its peers.
pub const REASON_BYTES: usize = 960;
/// Participants of one ballot.
pub const MAX_VOTERS: usize = 256;
/// How often who waits for a ballot offers its core to others before it sleeps.
pub const BALLOT_YIELDS: u32 = 50;
/// Envelopes of messages from one rank to another that the other need not have looked at.
pub const ENVELOPES: usize = 64;
/// Payload bytes inside an envelope: such a message costs one line transfer.
pub const ENVELOPE_BYTES: usize = 32;
/// Messages from one rank to another, with more payload than that, that are on their way at a time: those that come after them
/// wait where they are sent.
pub const MAIL_SLOTS: usize = 32;
/// Bytes of a message that is copied into its slot, so that the sender is done with it at once; a larger one is taken from where
/// it lies.
pub const EAGER_BYTES: usize = 8 * 1024;
/// Bytes of one of the two halves through which a message in private memory passes that its receiver may not read.
pub const MAIL_STAGE_BYTES: usize = 256 * 1024;
/// Messages of one rank that another keeps because none of its receives wants them yet; with those whose envelopes still lie
/// there, a sender has at most this many and [`ENVELOPES`] before it waits.
pub const UNEXPECTED: usize = 1024;
/// Steps of one schedule; the step number shares a word with the sequence number.
pub const MAX_STEPS: u64 = 0xFFFE;
/// How long a sleeping wait goes without looking at deaths, aborts and the deadline.
pub const NAP: Duration = Duration::from_millis(10);
/// How long a wait with a deadline sleeps without a look at whether its process was stopped ([`crate::os::patience`]).
pub const WAIT_STEP: Duration = Duration::from_millis(250);
/// How much longer than it was to a step takes before that counts as a stop of the process.
pub const STOPPED: Duration = Duration::from_secs(1);
/// Stops that one wait is credited.
pub const MAX_STOPS: usize = 64;
/// How long the owner of a region waits for a peer that connected to say what it wants.
pub const LINK_HELLO: Duration = Duration::from_secs(2);
/// Peers that it hears at a time.
pub const LINK_PLACES: usize = 64;
/// How long the oldest of them stays at least when others wait for a place.
pub const LINK_GRACE: Duration = Duration::from_millis(250);
/// Lines a second that a socket's refusals may log: whoever finds the socket can cause one.
pub const REFUSALS_LOGGED: u32 = 5;
/// Grants one process keeps open: two for each (communicator, peer), one of which the peer's plugin asks for and one the peer.
pub const MAX_GRANTS: usize = 65_536;
