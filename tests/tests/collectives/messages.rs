//! Messages between two ranks, without the others.

use std::sync::Arc;
use std::sync::Barrier;
use std::time::Duration;

use sandbox::status::Status;
use wccl::Error;
use wccl::{Communicator, Io, MessageBuffer, Payload, Received, Room, RuntimeConfig};
use wccl::{DataType, ReduceOp};

use crate::common::{config, world};

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + (i >> 9) + seed * 31 + 1) as u8).collect()
}

/// Who is linked to whom, but for the rank itself.
fn linked(comm: &Communicator) -> Vec<usize> {
    (0..comm.nranks()).filter(|p| *p != comm.rank() && comm.core().endpoint.linked(*p)).collect()
}

/// Two ranks of six that are no neighbours exchange messages, while the others are in no call at all; the library has no part in it.
#[test]
fn two_ranks_exchange_messages_while_the_others_do_nothing() {
    const N: usize = 6;
    let both = Arc::new(Barrier::new(N));
    world(N, &config(), move |mut comm| {
        let rank = comm.rank();
        // The neighbours of rank 0 in all rings, which are the same on all ranks.
        let near: Vec<usize> = comm.rings().iter().flat_map(|ring| [ring[1], ring[N - 1]]).collect();
        let far = (1..N).find(|p| !near.contains(p)).expect("somebody who is no neighbour");
        let before = linked(&comm);
        let calls = comm.runtime().component_calls();
        both.wait();
        match rank {
            0 => {
                comm.send(far, 1, &bytes(1, 100_000)[..]).unwrap();
                let mut back = [0; 8];
                let r = comm.recv(Some(far), Some(2), &mut back[..]).unwrap();
                assert_eq!(r, Received { from: far, tag: 2, len: 8 });
            }
            r if r == far => {
                let mut got = vec![0; 100_000];
                let r = comm.recv(Some(0), None, &mut got[..]).unwrap();
                assert!(r.len == 100_000 && got == bytes(1, 100_000));
                comm.send(0, 2, &[0u8; 8][..]).unwrap();
            }
            _ => {}
        }
        both.wait();
        let one_more = [(0, far), (far, 0)].into_iter().find(|(r, _)| *r == rank).map(|(_, p)| p);
        let mut now: Vec<usize> = before.into_iter().chain(one_more).collect();
        now.sort_unstable();
        assert_eq!(linked(&comm), now, "one more link of two ranks, and no others");
        assert_eq!(comm.runtime().component_calls(), calls);
        // Operations of all find their links as ever.
        sum(&mut comm);
    });
}

fn sum(comm: &mut Communicator) {
    let mut ones = vec![1u8; 5000];
    comm.raw().all_reduce(Io::HostInPlace(&mut ones), 5000, DataType::Uint8, ReduceOp::Sum).unwrap();
    assert!(ones.iter().all(|v| usize::from(*v) == comm.nranks()));
}

/// Every rank sends to every other one at once, in both kinds of memory, of all sizes, and takes what comes in any order.
#[test]
fn all_ranks_exchange_messages_with_all() {
    for direct in [true, false] {
        world(4, &RuntimeConfig { direct, ..config() }, |mut comm| {
            let (rank, n) = (comm.rank(), comm.nranks());
            let sizes = [0, 5, 3000, 200_000, 1 << 20];
            let mut sends = Vec::new();
            for to in (0..n).filter(|p| *p != rank) {
                for (tag, len) in sizes.into_iter().enumerate() {
                    let content = bytes(rank + tag, len);
                    let buffer = if (rank + to + tag) % 2 == 0 && len > 0 {
                        let t = comm.allocate(len as u64).unwrap();
                        t.write(0, &content).unwrap();
                        MessageBuffer::from(Arc::new(t))
                    } else {
                        content.into()
                    };
                    sends.push(comm.isend(to, tag as u32, buffer).unwrap());
                }
            }
            let room = Arc::new(comm.allocate(1 << 20).unwrap());
            let mut count = vec![0; n];
            for i in 0..(n - 1) * sizes.len() {
                let mut got = vec![0; 1 << 20];
                let r = if i % 2 == 0 {
                    comm.recv(None, None, &mut got[..]).unwrap()
                } else {
                    let r = comm.recv(None, None, &*room).unwrap();
                    room.read(0, &mut got).unwrap();
                    r
                };
                // Of one rank they come in order.
                assert_eq!((r.tag, r.len), (count[r.from], sizes[r.tag as usize] as u64));
                assert!(got[..r.len as usize] == bytes(r.from + r.tag as usize, r.len as usize), "{r:?}");
                count[r.from] += 1;
            }
            for (i, s) in sends.into_iter().enumerate() {
                let done = s.wait();
                let len = done.result.unwrap().len;
                match done.buffer {
                    MessageBuffer::Host(b) => assert_eq!(b.len() as u64, len, "#{i}"),
                    MessageBuffer::Device { tensor, offset: 0, bytes } => assert_eq!((tensor.len(), bytes), (len, len)),
                    other => panic!("{other:?}"),
                }
            }
            sum(&mut comm);
        });
    }
}

#[test]
fn a_message_may_be_large() {
    const LARGE: usize = 64 << 20;
    world(2, &config(), |comm| {
        let t = comm.allocate(LARGE as u64 + 4096).unwrap();
        let content = bytes(9, LARGE);
        let part = |offset| (&t, offset, LARGE as u64);
        if comm.rank() == 0 {
            comm.send(1, 0, &content[..]).unwrap();
            let (tensor, offset, bytes) = part(4096);
            t.write(4096, &content).unwrap();
            comm.send(1, 1, Payload::Device { tensor, offset, bytes }).unwrap();
        } else {
            let (tensor, offset, bytes) = part(100);
            assert_eq!(comm.recv(Some(0), Some(0), Room::Device { tensor, offset, bytes }).unwrap().len, LARGE as u64);
            let mut got = vec![0; LARGE];
            t.read(100, &mut got).unwrap();
            assert!(got == content);
            got.fill(0);
            comm.recv(Some(0), Some(1), &mut got[..]).unwrap();
            assert!(got == content);
            // Each was copied once, by this rank.
            assert_eq!(comm.counters().copied, 2 * LARGE as u64);
        }
    });
}

/// A deadline and a message that is too long end their own call: messages and collectives go on.
#[test]
fn what_fails_of_a_message_is_that_message() {
    world(3, &config(), |mut comm| {
        let rank = comm.rank();
        let mut small = [0; 4];
        let late = comm.within(Duration::from_millis(20)).recv(Some((rank + 1) % 3), Some(77), &mut small[..]);
        let e = late.unwrap_err();
        assert_eq!(e.status(), Status::TIMEOUT, "{e}");
        let text = e.to_string();
        let peer = (rank + 1) % 3;
        for part in [format!("on rank {rank}"), format!("receive #1 from rank {peer} (tag 77")] {
            assert!(text.contains(&part), "{text}");
        }
        let e = comm.within(Duration::from_millis(20)).send(peer, 78, &[1u8; 20_000][..]).unwrap_err();
        assert!(matches!(e, Error::Message(_)) && e.status() == Status::TIMEOUT, "{e}");
        sum(&mut comm);
        let (to, from) = (peer, (rank + 2) % 3);
        let sent = comm.isend(to, 5, bytes(rank, 20_000)).unwrap();
        let e = comm.recv(Some(from), Some(5), &mut small[..]).unwrap_err();
        assert_eq!(e.status(), Status::INVALID, "{e}");
        assert!(e.to_string().contains("sent 20000 bytes with tag 5, and the buffer has 4"), "{e}");
        assert!(sent.wait().result.is_ok());
        sum(&mut comm);
        // Nothing of those before is left over.
        comm.send(to, 77, &[rank as u8][..]).unwrap();
        let r = comm.recv(Some(from), None, &mut small[..]).unwrap();
        assert_eq!((r, small[0]), (Received { from, tag: 77, len: 1 }, from as u8));
        assert_eq!(comm.send(3, 0, &[0u8; 0][..]).unwrap_err().status(), Status::INVALID);
        let t = comm.allocate(8).unwrap();
        let outside = Payload::Device { tensor: &t, offset: 4, bytes: 8 };
        assert!(matches!(comm.send(to, 0, outside), Err(Error::Usage(_))));
    });
}

/// Messages are beside the operations of streams and of groups made of the communicator, and have their own order in each.
#[test]
fn messages_of_a_communicator_are_its_own() {
    world(4, &config(), |mut comm| {
        let (rank, n) = (comm.rank(), comm.nranks());
        let half = comm.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
        let mut stream = comm.stream(0).unwrap();
        let barrier = stream.barrier();
        let other = (half.rank() + 1) % 2;
        let of_half = half.irecv(Some(other), None, vec![0; 8]).unwrap();
        let of_all = comm.irecv(None, None, vec![0; 8]).unwrap();
        comm.send((rank + 1) % n, 1, &[1u8; 3][..]).unwrap();
        half.send(other, 2, &[2u8; 5][..]).unwrap();
        let (a, b) = (of_all.wait().result.unwrap(), of_half.wait().result.unwrap());
        assert_eq!(a, Received { from: (rank + n - 1) % n, tag: 1, len: 3 });
        assert_eq!(b, Received { from: other, tag: 2, len: 5 });
        barrier.wait().unwrap();
        // A request outlives its communicator's last call, and the rank stays for it.
        let mine = comm.irecv(Some(rank), Some(3), vec![0; 8]).unwrap();
        comm.send(rank, 3, &[7u8; 8][..]).unwrap();
        comm.barrier().unwrap();
        drop((half, stream, comm));
        assert!(matches!(mine.wait().buffer, MessageBuffer::Host(b) if b == [7; 8]));
    });
}
