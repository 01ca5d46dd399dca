//! What another process of the machine may have written: control segments, links, the messages of groups.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use hw_bridge::call::Op;
use hw_bridge::exec::sequencer::{CallArgs, CallBuffers, Endpoint, LocalMem};
use hw_bridge::exec::share::{Market, Share, Terms};
use hw_bridge::group::{Control, NO_RANK, Peer, control_bytes, flight};
use hw_bridge::limits::{LANES, SLOTS};
use hw_bridge::memory::hbm::Hbm;
use hw_bridge::memory::links::{Edge, HELLO_BYTES, IPC_BYTES, LinkGrant, LinkServer, Mapped, connect};
use hw_bridge::memory::segment::Segment;
use hw_bridge::os::bell::WaitPolicy;
use hw_bridge::os::clock;
use wccl::groups::fuzzing;
use wccl::{DataType, ReduceOp};

/// How long either end of a link is waited for.
const SOON: Duration = Duration::from_secs(2);
/// Far more than an operation takes whose deadline is a millisecond; a wait that does not end is found by it.
const HANG: Duration = Duration::from_secs(60);
/// Where a lane's records of operations lie: what [`place`] aims at most.
const RECORDS: u64 = 4096 + 8192;

/// A place in a control segment out of two bytes: words of the first page, of a lane's head and flight records, of slots.
fn place(a: u8, b: u8) -> u64 {
    let word = u64::from(b) * 8;
    match a % 8 {
        0 | 1 => word % 2048,
        2 => 4096 + word % 512,
        3 => 8192 + word,
        4 => 8192 + 2048 + word,
        5 => RECORDS + word % 64 + u64::from(a / 8) % SLOTS as u64 * 8320,
        6 => 4096 + word * 64,
        _ => (u64::from(a) << 16) + word * 32,
    }
}

/// A control segment of rank 1 of 2, with some words overwritten: ten bytes each, where and what.
fn damaged(data: &[u8]) -> Option<Control> {
    let control = Control::create(1, 2).ok()?;
    let fd = control.segment().fd()?;
    for c in data.chunks_exact(10) {
        let at = place(c[0], c[1]);
        if at + 8 <= control_bytes(2) as u64 {
            rustix::io::pwrite(fd, &c[2..], at).ok()?;
        }
    }
    Some(control)
}

fn copy_of(segment: &Segment) -> Option<OwnedFd> {
    segment.fd()?.try_clone_to_owned().ok()
}

/// Everything that `wccl top` and the files of flight records show of a segment.
pub fn control(data: &[u8]) {
    let Some(control) = damaged(data) else { return };
    let Some(seen) = copy_of(control.segment()).map(|fd| Segment::watch(fd).and_then(Control::of_anyone)) else {
        return;
    };
    let seen = match seen {
        Ok(seen) => seen,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    let _ = (seen.who(), seen.pid(), seen.comm(), seen.component_calls(), seen.alive());
    let (_, reason) = seen.state();
    assert!(!reason.chars().any(char::is_control), "{reason:?}");
    let now = clock::now();
    let mut sum = flight::Counters::default();
    for l in 0..LANES {
        let lane = seen.lane(l);
        sum = sum + lane.tally().read();
        for r in lane.flight().read(seen.epoch(), now) {
            assert!(!r.to_string().chars().any(char::is_control));
        }
        for seq in [0, 1, lane.progress() >> 16, u64::MAX] {
            assert!(!lane.last_seen(seq).chars().any(char::is_control));
        }
    }
    let _ = sum;
}

/// An operation of two ranks whose other one has written `data` over its control segment: it ends, well or with a sentence.
pub fn operation(data: &[u8]) {
    let [what, data @ ..] = data else { return };
    let Some(theirs) = damaged(data) else { return };
    static MEMORY: OnceLock<Option<(Arc<Hbm>, Arc<Hbm>)>> = OnceLock::new();
    let memory = MEMORY.get_or_init(|| Some((Hbm::new(1 << 20).ok()?, Hbm::new(1 << 20).ok()?)));
    let Some((mine, other)) = memory else { return };
    let policy = WaitPolicy { spins: 1, yields: 1, sleeps: true };
    let Some(share) = Market::of_process().ok().and_then(|m| Share::new(m, 0, Terms::default()).ok()) else { return };
    let (Ok(endpoint), Some(a), Some(b)) = (
        Endpoint::new(0, 2, mine.clone(), policy, Arc::new(share)),
        copy_of(theirs.segment()),
        copy_of(other.segment()),
    ) else {
        return;
    };
    let map = |fd, len| Segment::from_peer(fd, len).ok();
    let (Some(control), Some(hbm)) = (map(a, control_bytes(2) as u64), map(b, 1 << 20)) else { return };
    let mapped = Mapped { rank: 1, pid: std::process::id().into(), control, hbm, pidfd: None };
    let peer = match Peer::new(mapped, 1, 2) {
        Ok(peer) => peer,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    endpoint.link(peer);
    let endpoint = Arc::new(endpoint);
    let Ok(Some(mut lane)) = endpoint.lane(0) else { return };
    let ops = [Op::AllReduce, Op::AllGather, Op::Broadcast, Op::Barrier, Op::AllToAll];
    let op = ops[usize::from(what & 15) % ops.len()];
    let algorithm = if what & 16 == 0 { enc::Algorithm::OneHop } else { enc::Algorithm::Mesh };
    let call = enc::Call {
        op,
        dtype: DataType::Fp32,
        redop: ReduceOp::Sum,
        count: u64::from(*what) % 32 + 1,
        root: 1,
        dst: None,
        src: None,
        private: false,
        in_place: false,
    };
    let Ok(schedule) = enc::compile(&call, 0, 2, algorithm, &[]) else { return };
    let (Ok(src), Ok(dst)) = (mine.alloc(4096), mine.alloc(4096)) else { return };
    let (Some(input), Some(output)) = (LocalMem::hbm(&src, 0, 4096), LocalMem::hbm(&dst, 0, 4096)) else { return };
    let buffers = CallBuffers::new(input, output);
    let args = CallArgs { dst: NO_RANK, src: NO_RANK, scale: 1.0, timeout: Duration::from_millis(1) };
    let begun = Instant::now();
    // The second one meets what the first one left.
    for _ in 0..2 {
        if let Err(e) = lane.run(&schedule, &buffers, &args) {
            assert!(!e.to_string().chars().any(char::is_control), "{e}");
        }
    }
    assert!(begun.elapsed() < HANG, "the operation took {:?}", begun.elapsed());
}

/// Both ends of a link: what is said to a link server, and what one that is not ours answers.
pub fn links(data: &[u8]) {
    let [end, data @ ..] = data else { return };
    if end & 1 == 0 { to_server(data) } else { from_owner(*end, data) }
}

fn segment() -> Option<Arc<Segment>> {
    Segment::create("fuzz", 4096).ok().map(Arc::new)
}

/// The link that is granted, and asked for.
const EDGE: Edge = Edge { tenant: 7, key: [5; 32], owner: 3, asker: 1 };

/// Says `data` to a link server that has one grant; only the asker it is for gets anything.
fn to_server(data: &[u8]) {
    static SERVER: OnceLock<Option<(LinkServer, [u8; IPC_BYTES])>> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let server = LinkServer::start().ok()?;
        let grant = LinkGrant { edge: EDGE, control: segment()?, hbm: segment()?, client: None };
        let ipc = server.grant(grant).ok()?;
        Some((server, ipc))
    });
    let Some((_, ipc)) = server else { return };
    let name = &ipc[33..33 + usize::from(ipc[32])];
    let Ok(address) = SocketAddr::from_abstract_name(name) else { return };
    let Ok(mut stream) = UnixStream::connect_addr(&address) else { return };
    let Ok(right) = EDGE.hello(ipc) else { return };
    // A first byte of 1 puts the right number in its place, which no fuzzer would guess; one of 2 changes what is right.
    let mut said = data.get(1..).unwrap_or_default().to_vec();
    match data.first() {
        Some(1) if said.len() >= 20 => said[4..20].copy_from_slice(&right[4..20]),
        Some(2) => {
            said.resize(said.len().max(HELLO_BYTES), 0);
            said.iter_mut().zip(right).for_each(|(b, r)| *b ^= r);
        }
        _ => {}
    }
    // It may have had enough before the end.
    let _ = stream.write_all(&said).and_then(|()| stream.shutdown(Shutdown::Write));
    let mut answer = Vec::new();
    let _ = stream.set_read_timeout(Some(SOON));
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(e) => panic!("the link server does not answer: {e}"),
    }
    if answer.get(4..8) == Some(&[0; 4]) {
        assert!(said[..HELLO_BYTES] == right, "granted to {said:?}");
    }
}

/// Connects to an owner that answers `data`, with descriptors as `end` says.
fn from_owner(end: u8, data: &[u8]) {
    static OWNER: OnceLock<Option<(UnixListener, String, Mutex<()>)>> = OnceLock::new();
    let owner = OWNER.get_or_init(|| {
        let name = format!("wccl-{:024x}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).ok()?;
        Some((UnixListener::bind_addr(&address).ok()?, name, Mutex::new(())))
    });
    let Some((listener, name, turn)) = owner else { return };
    let Ok(_turn) = turn.lock() else { return };
    let mut ipc = [0u8; IPC_BYTES];
    ipc[32] = name.len() as u8;
    ipc[33..33 + name.len()].copy_from_slice(name.as_bytes());
    std::thread::scope(|s| {
        let asked = s.spawn(move || connect(&ipc, &EDGE, None, Instant::now() + SOON));
        if let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.read(&mut [0; HELLO_BYTES]);
            answer(&stream, end, data);
        }
        match asked.join() {
            Ok(Ok(mapped)) => assert!(mapped.control.len() as u64 > 0 || mapped.hbm.is_empty()),
            Ok(Err(e)) => assert!(!e.to_string().is_empty()),
            Err(_) => panic!("the asking side panicked"),
        }
    });
}

fn answer(stream: &UnixStream, end: u8, data: &[u8]) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let sealed = [segment(), segment()];
    let pipe = rustix::pipe::pipe().ok();
    let mut fds = Vec::new();
    for bit in 0..3 {
        let sealed = sealed[bit % 2].as_ref().and_then(|s| s.fd());
        let other = pipe.as_ref().map(|p| p.0.as_fd());
        fds.extend(if end >> (1 + bit) & 1 == 0 {
            None
        } else if end >> (4 + bit) & 1 == 0 {
            sealed
        } else {
            other
        });
    }
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    // Whoever asked may be gone already.
    let _ = sendmsg(stream, &[std::io::IoSlice::new(data)], &mut control, SendFlags::NOSIGNAL);
}

/// What arrives at a meeting place, an address, or a vote; the first byte chooses.
pub fn groups(data: &[u8]) {
    let [which, data @ ..] = data else { return };
    match which % 3 {
        0 => fuzzing::meeting(data),
        1 => fuzzing::vote(data),
        _ => fuzzing::address(data),
    }
}
