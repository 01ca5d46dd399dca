//! Ranks of one process that map one another's segments, as processes do.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::exec::share::{Market, Share, Terms};
use crate::group::{Envelope, Peer, RankState, SlotKind};
use crate::limits::MAIL_STAGE_BYTES;
use crate::memory::hbm::{Hbm, HbmBuf};
use crate::memory::links::Mapped;
use crate::os::bell::WaitPolicy;

/// What is certain to come, on a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// What does not come.
const SHORT: Duration = Duration::from_millis(30);

/// How private memory goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    Staged,
    /// The receiver believes that it can read it, and finds out.
    Refused,
}

fn mapped(of: &Endpoint) -> Mapped {
    let map = |s: &Segment| Segment::from_peer(s.fd().unwrap().try_clone_to_owned().unwrap(), s.len() as u64).unwrap();
    let pid = std::process::id().into();
    let (control, hbm) = (map(of.control().segment()), map(of.hbm().segment()));
    Mapped { rank: of.rank() as u32, pid, control, hbm, pidfd: None }
}

fn endpoints(n: usize) -> Vec<Arc<Endpoint>> {
    let share = Arc::new(Share::new(Arc::new(Market::create().unwrap()), 7, Terms::default()).unwrap());
    let policy = WaitPolicy { spins: 50, yields: 5, sleeps: true };
    let made = |r| Endpoint::new(r, n, Hbm::new(256 << 20).unwrap(), policy, share.clone()).unwrap();
    (0..n).map(|r| Arc::new(made(r))).collect()
}

fn link(all: &[Arc<Endpoint>]) {
    for a in all {
        for b in all.iter().filter(|b| b.rank() != a.rank()) {
            a.link(Peer::new(mapped(b), b.rank(), all.len()).unwrap());
        }
    }
}

fn world_by(n: usize, way: Way) -> Vec<Arc<Mailbox>> {
    let all = endpoints(n);
    if way == Way::Refused {
        // No such mark is in any process.
        for e in &all {
            let at = crate::group::ident_of_mark();
            let word = |i: usize, v: u64| {
                rustix::io::pwrite(e.control().segment().fd().unwrap(), &v.to_ne_bytes(), at[i] as u64).unwrap();
            };
            word(0, 8);
        }
    }
    link(&all);
    all.into_iter().map(|e| Arc::new(Mailbox::new(e, way != Way::Staged))).collect()
}

fn world(n: usize) -> Vec<Arc<Mailbox>> {
    world_by(n, Way::Direct)
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + seed * 17 + (i >> 8) + 1) as u8).collect()
}

fn device(mailbox: &Mailbox, content: &[u8]) -> Arc<HbmBuf> {
    let buf = mailbox.endpoint.hbm().alloc(content.len() as u64).unwrap();
    assert!(buf.write(0, content));
    Arc::new(buf)
}

/// Sizes on both sides of every way a message goes.
fn sizes() -> Vec<usize> {
    let stage = MAIL_STAGE_BYTES;
    let near = |n: usize| [n - 1, n, n + 1];
    let mut all = vec![0, 1, 8];
    all.extend(near(ENVELOPE_BYTES).into_iter().chain(near(EAGER_BYTES)).chain(near(stage)).chain(near(3 * stage)));
    all
}

#[test]
fn every_size_arrives_whole_by_every_way() {
    for way in [Way::Direct, Way::Staged, Way::Refused] {
        let w = world_by(2, way);
        for (i, len) in sizes().into_iter().enumerate() {
            let sent = bytes(i, len);
            std::thread::scope(|s| {
                s.spawn(|| w[0].send(1, i as u32, LocalMem::input(&sent), LONG).unwrap());
                let mut got = vec![0; len + 3];
                let r = w[1].recv(Some(0), Some(i as u32), LocalMem::output(&mut got), LONG).unwrap();
                assert_eq!(r, Received { from: 0, tag: i as u32, len: len as u64 });
                assert_eq!((&got[..len], &got[len..]), (&sent[..], &[0; 3][..]), "{way:?} {len}");
            });
        }
    }
}

#[test]
fn device_memory_goes_to_device_and_to_private_memory_and_back() {
    let w = world(2);
    for (i, len) in sizes().into_iter().filter(|n| *n > 0).chain([9 << 20]).enumerate() {
        let sent = bytes(i, len);
        let (a, b) = (device(&w[0], &sent), device(&w[1], &vec![0; len]));
        let whole = || LocalMem::hbm(&b, 0, len as u64).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                w[0].send(1, 0, LocalMem::hbm(&a, 0, len as u64).unwrap(), LONG).unwrap();
                w[0].send(1, 1, LocalMem::hbm(&a, 0, len as u64).unwrap(), LONG).unwrap();
                w[0].send(1, 2, LocalMem::input(&sent), LONG).unwrap();
            });
            let mut got = vec![0; len];
            w[1].recv(Some(0), None, whole(), LONG).unwrap();
            assert!(b.read(0, &mut got) && got == sent, "{len}");
            got.fill(0);
            w[1].recv(Some(0), None, LocalMem::output(&mut got), LONG).unwrap();
            assert!(got == sent, "{len}");
            assert!(b.write(0, &vec![0; len]));
            w[1].recv(Some(0), None, whole(), LONG).unwrap();
            assert!(b.read(0, &mut got) && got == sent, "{len}");
        });
    }
}

/// What each way costs: a message that is large is copied once, by its receiver.
#[test]
fn copies_are_counted() {
    for (way, len, sender, receiver) in [
        (Way::Direct, 32, 0, 32),
        (Way::Direct, 33, 33, 33),
        (Way::Direct, EAGER_BYTES, EAGER_BYTES, EAGER_BYTES),
        (Way::Direct, EAGER_BYTES + 1, 0, EAGER_BYTES + 1),
        (Way::Staged, EAGER_BYTES + 1, EAGER_BYTES + 1, EAGER_BYTES + 1),
    ] {
        let w = world_by(2, way);
        let sent = bytes(1, len);
        std::thread::scope(|s| {
            s.spawn(|| w[0].send(1, 5, LocalMem::input(&sent), LONG).unwrap());
            w[1].recv(None, None, LocalMem::output(&mut vec![0; len]), LONG).unwrap();
        });
        let counted = |m: &Mailbox| {
            let c = m.endpoint.control().counters();
            (c.ops, c.copied as usize, c.failures)
        };
        assert_eq!((counted(&w[0]), counted(&w[1])), ((1, sender, 0), (1, receiver, 0)), "{way:?} {len}");
    }
}

/// Nothing is allocated anew for a message that is like those before.
#[test]
fn places_are_used_again() {
    let w = world(2);
    for i in 0..300 {
        w[0].send(1, i, LocalMem::input(&bytes(1, 100)), LONG).unwrap();
        w[1].recv(Some(0), Some(i), LocalMem::output(&mut [0; 100]), LONG).unwrap();
    }
    let st = w[0].state();
    assert_eq!((st.places(), st.outbound[1].payloads()), (1, 1));
}

#[test]
fn a_rank_sends_to_itself() {
    for way in [Way::Direct, Way::Staged, Way::Refused] {
        let w = world_by(1, way);
        for len in sizes() {
            let sent = bytes(3, len);
            let took = w[0].irecv(None, Some(9), Owned::Private(vec![0; len]), LONG);
            w[0].send(0, 9, LocalMem::input(&sent), LONG).unwrap();
            let done = took.wait();
            assert_eq!(done.result, Ok(Received { from: 0, tag: 9, len: len as u64 }));
            assert!(matches!(done.buffer, Owned::Private(got) if got == sent), "{way:?} {len}");
        }
        // Of one tensor to an overlapping part of it.
        let len = 100_000;
        let sent = bytes(4, 2 * len);
        let t = device(&w[0], &sent);
        let took = w[0].irecv(Some(0), None, Owned::Device(t.clone(), 10, len as u64), LONG);
        w[0].send(0, 1, LocalMem::hbm(&t, 0, len as u64).unwrap(), LONG).unwrap();
        took.wait().result.unwrap();
        let mut got = vec![0; len];
        assert!(t.read(10, &mut got) && got == sent[..len]);
    }
}

#[test]
fn a_receive_looks_past_messages_with_other_tags() {
    let w = world(2);
    let large = bytes(7, 20_000);
    for tag in 0..20 {
        w[0].send(1, tag, LocalMem::input(&[tag as u8; 40]), LONG).unwrap();
    }
    let sends = w[0].isend(1, 20, Owned::Private(large.clone()), LONG);
    let mut got = vec![0; 20_000];
    w[1].recv(Some(0), Some(20), LocalMem::output(&mut got), LONG).unwrap();
    assert_eq!(got, large);
    sends.wait().result.unwrap();
    for tag in (0..20).rev() {
        let r = w[1].recv(None, Some(tag), LocalMem::output(&mut got), LONG).unwrap();
        assert_eq!((r.len, got[39]), (40, tag as u8));
    }
}

/// A deadline ends its operation and nothing else.
#[test]
fn a_receive_that_is_late_leaves_all_as_it_was() {
    let w = world(2);
    w[0].send(1, 4, LocalMem::input(&[1]), LONG).unwrap();
    let e = w[1].recv(Some(0), Some(5), LocalMem::output(&mut [0; 8]), SHORT).unwrap_err();
    let text = e.to_string();
    assert!(matches!(e, P2pError::Timeout { rank: 1, .. }), "{text}");
    for part in
        ["receive #1 from rank 0 (tag 5, up to 8 bytes)", "rank 1", "1 with other tags wait here (tag 4 of rank 0)"]
    {
        assert!(text.contains(part), "{text}");
    }
    // The message that comes later is another receive's.
    w[0].send(1, 5, LocalMem::input(&[2]), LONG).unwrap();
    let mut got = [0];
    w[1].recv(Some(0), Some(5), LocalMem::output(&mut got), LONG).unwrap();
    assert_eq!(got, [2]);
    w[1].recv(Some(0), Some(4), LocalMem::output(&mut got), LONG).unwrap();
    assert_eq!(got, [1]);
}

#[test]
fn a_send_that_is_late_is_taken_back() {
    let w = world(2);
    let (lost, kept) = (bytes(1, 50_000), bytes(2, 50_000));
    for _ in 0..3 * MAIL_SLOTS {
        let e = w[0].send(1, 3, LocalMem::input(&lost), Duration::ZERO).unwrap_err();
        assert!(matches!(e, P2pError::Timeout { .. }) && e.to_string().contains("send #"), "{e}");
        if w[1].state().inbound[0].unexpected.len() > 5 {
            continue;
        }
        // Some of them have been looked at by the receiver, and it has no other use for them.
        w[1].recv(Some(0), Some(4), LocalMem::output(&mut [0; 8]), Duration::ZERO).unwrap_err();
    }
    std::thread::scope(|s| {
        s.spawn(|| w[0].send(1, 3, LocalMem::input(&kept), LONG).unwrap());
        let mut got = vec![0; 50_000];
        w[1].recv(Some(0), Some(3), LocalMem::output(&mut got), LONG).unwrap();
        assert_eq!(got, kept);
    });
    assert!(w[1].state().inbound[0].unexpected.is_empty());
}

/// Sender and receiver give up and try again at random moments: who has a result has the right one, and both or neither.
#[test]
fn both_ends_know_the_same_of_a_message_whose_deadlines_pass() {
    for way in [Way::Direct, Way::Staged] {
        let w = world_by(2, way);
        let len = 3 * MAIL_STAGE_BYTES + 11;
        let rounds = 200;
        let (sent, got) = std::thread::scope(|s| {
            let sender = s.spawn(|| {
                let mut sent = 0u64;
                for i in 0..rounds {
                    let data = bytes(sent as usize, len);
                    let patience = Duration::from_micros(i % 7 * 400);
                    match w[0].send(1, 1, LocalMem::input(&data), patience) {
                        Ok(()) => sent += 1,
                        Err(P2pError::Timeout { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                w[0].send(1, 2, LocalMem::input(&[]), LONG).unwrap();
                sent
            });
            let mut got = 0u64;
            let mut buf = vec![0; len];
            for i in 0u64.. {
                let patience = Duration::from_micros(i % 5 * 500);
                match w[1].recv(Some(0), None, LocalMem::output(&mut buf), patience) {
                    Ok(Received { tag: 2, .. }) => break,
                    Ok(_) => {
                        assert!(buf == bytes(got as usize, len), "message {got}");
                        got += 1;
                    }
                    Err(P2pError::Timeout { .. }) => {}
                    Err(e) => panic!("{e}"),
                }
            }
            (sender.join().unwrap(), got)
        });
        assert_eq!(sent, got, "{way:?}");
    }
}

#[test]
fn a_message_that_is_too_long_is_an_error_of_its_receive_only() {
    let w = world(2);
    for len in [20, 4000, 100_000] {
        std::thread::scope(|s| {
            let data = bytes(1, len);
            s.spawn(|| {
                let data = data;
                w[0].send(1, 6, LocalMem::input(&data), LONG).unwrap();
                w[0].send(1, 6, LocalMem::input(&[5]), LONG).unwrap();
            });
            let mut small = [0; 19];
            let e = w[1].recv(None, Some(6), LocalMem::output(&mut small), LONG).unwrap_err();
            assert!(
                matches!(e, P2pError::Truncated { sent, have: 19, from: 0, tag: 6, .. } if sent == len as u64),
                "{e}"
            );
            assert_eq!(small, [0; 19]);
            assert_eq!(w[1].recv(None, Some(6), LocalMem::output(&mut small), LONG).unwrap().len, 1);
            assert_eq!(small[0], 5);
        });
    }
}

/// Messages that nobody takes are bounded, each way by its own measure, and what waits goes on when they are taken.
#[test]
fn a_sender_that_nobody_hears_waits() {
    let w = world(2);
    let small = |n: u32| w[0].send(1, n, LocalMem::input(&n.to_ne_bytes()), SHORT);
    let mut sent = 0;
    while small(sent).is_ok() {
        sent += 1;
    }
    assert_eq!(sent as usize, ENVELOPES);
    // The receiver keeps some that it does not want, to see what is behind.
    w[1].recv(Some(0), Some(u32::MAX), LocalMem::output(&mut [0; 4]), SHORT).unwrap_err();
    while small(sent).is_ok() {
        sent += 1;
        if (sent as usize) % ENVELOPES == 0 {
            w[1].recv(Some(0), Some(u32::MAX), LocalMem::output(&mut [0; 4]), Duration::ZERO).unwrap_err();
        }
    }
    assert_eq!(sent as usize, ENVELOPES + UNEXPECTED);
    let e = small(sent).unwrap_err().to_string();
    assert!(e.contains("has not taken enough of what was sent to it before"), "{e}");
    // One that is wanted is taken though there is no room for one that is not.
    for n in std::iter::once(UNEXPECTED as u32).chain(0..UNEXPECTED as u32).chain(UNEXPECTED as u32 + 1..sent) {
        let mut got = [0; 4];
        w[1].recv(Some(0), Some(n), LocalMem::output(&mut got), LONG).unwrap();
        assert_eq!(u32::from_ne_bytes(got), n);
    }
    // Those with a payload of their own, by their slots.
    let mut sent = 0;
    while w[0].send(1, sent, LocalMem::input(&[1; 64]), SHORT).is_ok() {
        sent += 1;
    }
    assert_eq!(sent as usize, MAIL_SLOTS);
    // Any number waits on the sender's side, in order.
    let more: Vec<Request> =
        (0..500).map(|i| w[0].isend(1, 1000 + i, Owned::Private(bytes(i as usize, 64)), LONG)).collect();
    std::thread::scope(|s| {
        s.spawn(|| more.into_iter().for_each(|r| assert!(r.wait().result.is_ok())));
        for tag in (0..sent).chain(1000..1500) {
            let mut got = [0; 64];
            assert_eq!(w[1].recv(Some(0), None, LocalMem::output(&mut got), LONG).unwrap().tag, tag);
        }
    });
}

#[test]
fn a_receive_from_any_rank_takes_them_in_turns() {
    let w = world(4);
    for (from, mailbox) in w.iter().enumerate().take(3) {
        for i in 0..10 {
            mailbox.send(3, i, LocalMem::input(&[from as u8]), LONG).unwrap();
        }
    }
    let order: Vec<usize> =
        (0..30).map(|_| w[3].recv(None, None, LocalMem::output(&mut [0]), LONG).unwrap().from).collect();
    assert!(order.chunks(3).all(|c| c == [0, 1, 2]), "{order:?}");
}

#[test]
fn a_peer_that_has_left_is_named_and_the_others_go_on() {
    let w = world(3);
    w[0].send(1, 1, LocalMem::input(&[9]), LONG).unwrap();
    w[0].endpoint.control().leave(RankState::Failed, "no more", None);
    // What it had sent before is there.
    let mut got = [0];
    w[1].recv(Some(0), None, LocalMem::output(&mut got), LONG).unwrap();
    assert_eq!(got, [9]);
    let e = w[1].recv(Some(0), Some(2), LocalMem::output(&mut got), LONG).unwrap_err();
    assert!(matches!(e, P2pError::Left { rank: 1, peer: 0, .. }), "{e}");
    assert!(
        e.to_string().contains("receive #2 from rank 0 (tag 2") && e.to_string().contains("failed: no more"),
        "{e}"
    );
    let e = w[1].send(0, 2, LocalMem::input(&bytes(1, 100_000)), LONG).unwrap_err();
    assert!(matches!(e, P2pError::Left { .. }), "{e}");
    std::thread::scope(|s| {
        s.spawn(|| w[2].send(1, 8, LocalMem::input(&[4]), LONG).unwrap());
        assert_eq!(w[1].recv(None, None, LocalMem::output(&mut got), LONG).unwrap().from, 2);
    });
    w[2].endpoint.control().leave(RankState::Closed, "", None);
    let e = w[1].recv(None, None, LocalMem::output(&mut got), LONG).unwrap_err();
    assert!(matches!(e, P2pError::NobodyLeft { .. }) && e.to_string().contains("rank 2"), "{e}");
}

#[test]
fn an_abort_ends_what_waits() {
    let w = world(2);
    std::thread::scope(|s| {
        let waits = s.spawn(|| w[1].recv(Some(0), Some(1), LocalMem::output(&mut [0]), LONG));
        while w[1].state().number() == 0 {
            std::thread::yield_now();
        }
        w[1].endpoint.abort_handle().abort("enough");
        let e = waits.join().unwrap().unwrap_err();
        assert!(matches!(&e, P2pError::Stopped { .. }) && e.to_string().contains("aborted: enough"), "{e}");
    });
    assert!(matches!(w[1].send(0, 1, LocalMem::input(&[0]), LONG), Err(P2pError::Op(OpError::Broken { .. }))));
    assert!(matches!(w[0].recv(Some(1), None, LocalMem::output(&mut [0]), LONG), Err(P2pError::Left { .. })));
}

/// A copy that is stopped as soon as it begins is not begun again and again: whoever waits has the error.
#[test]
fn an_abort_ends_a_send_that_is_being_staged() {
    let w = world_by(2, Way::Staged);
    let sends = w[0].isend(1, 1, Owned::Private(bytes(1, 8 * MAIL_STAGE_BYTES)), LONG);
    // The receiver has asked for the pieces, and does nothing more.
    let mut takes = w[1].irecv(Some(0), None, Owned::Private(vec![0; 8 * MAIL_STAGE_BYTES]), LONG);
    takes.test();
    w[0].endpoint.abort_handle().abort("enough");
    let e = sends.wait().result.unwrap_err();
    assert!(matches!(&e, P2pError::Stopped { .. }), "{e}");
    assert!(matches!(takes.wait().result, Err(P2pError::Left { .. })));
}

/// A peer that goes on announcing what it never lets be taken keeps a receive no longer than its deadline, and no other thread.
#[test]
fn messages_that_cannot_be_taken_hold_nobody_beyond_his_time() {
    let w = world(2);
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let outbox = w[0].to(1).unwrap();
            let eager =
                Envelope { tag: 1, kind: SlotKind::Eager, slot: 0, len: 100, at: 0, payload: [0; ENVELOPE_BYTES] };
            let mut seq = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                if outbox.drained() + 32 > seq {
                    seq += 1;
                    outbox.publish(seq, &eager);
                }
            }
        });
        let late = w[1].recv(Some(0), Some(1), LocalMem::output(&mut [0; 100]), SHORT);
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(matches!(late, Err(P2pError::Timeout { .. })), "{late:?}");
    });
}

#[test]
fn calls_that_cannot_be_are_refused() {
    let all = endpoints(2);
    let alone = Mailbox::new(all[0].clone(), true);
    assert!(matches!(
        alone.send(1, 0, LocalMem::input(&[0]), LONG),
        Err(P2pError::Op(OpError::NotLinked { peer: 1, .. }))
    ));
    assert!(matches!(
        alone.recv(Some(1), None, LocalMem::output(&mut [0]), LONG),
        Err(P2pError::Op(OpError::NotLinked { .. }))
    ));
    // Who is not linked sends nothing.
    assert!(matches!(alone.recv(None, None, LocalMem::output(&mut [0]), LONG), Err(P2pError::NobodyLeft { .. })));
    assert!(matches!(alone.send(2, 0, LocalMem::input(&[0]), LONG), Err(P2pError::NoRank { nranks: 2, peer: 2, .. })));
    let w = world(2);
    let other = device(&w[1], &[1; 8]);
    let mem = LocalMem::hbm(&other, 0, 8).unwrap();
    assert!(matches!(w[0].send(1, 0, mem, LONG), Err(P2pError::Op(OpError::WrongCore { .. }))));
    assert!(matches!(w[0].recv(None, None, LocalMem::input(&[0]), LONG), Err(P2pError::Op(OpError::Memory { .. }))));
    let mut refused = w[1].isend(0, 0, Owned::Device(other, 4, 8), LONG);
    assert!(refused.test());
    let Finished { buffer, result } = refused.wait();
    assert!(matches!(result, Err(P2pError::Buffer { have: 8, offset: 4, len: 8, .. })), "{result:?}");
    assert!(matches!(buffer, Owned::Device(_, 4, 8)));
}

/// What a peer wrote that cannot be ends the receives that name it, with a sentence, and nothing else.
#[test]
fn what_a_peer_announces_is_checked() {
    let fresh = || {
        let w = world(3);
        w[0].endpoint.control().open_outbox(1).unwrap();
        w
    };
    let e = Envelope { tag: 1, kind: SlotKind::Device, slot: 0, len: 9000, at: 0, payload: [0; ENVELOPE_BYTES] };
    let capacity = 256u64 << 20;
    for (bad, how) in [
        (Envelope { slot: MAIL_SLOTS, ..e }, "an envelope that cannot be"),
        (Envelope { kind: SlotKind::Eager, ..e }, "an envelope that cannot be"),
        (Envelope { at: capacity - 8999, ..e }, "outside its device memory"),
        (Envelope { at: u64::MAX - 5, ..e }, "outside its device memory"),
    ] {
        let w = fresh();
        let outbox = w[0].to(1).unwrap();
        outbox.assign(0, 1);
        outbox.publish(1, &bad);
        let mut got = vec![0; 9000];
        let e = w[1].recv(Some(0), None, LocalMem::output(&mut got), LONG).unwrap_err();
        assert!(matches!(e, P2pError::BadPeer { peer: 0, .. }) && e.to_string().contains(how), "{bad:?}: {e}");
        if how.contains("envelope") {
            let e = w[1].recv(Some(0), None, LocalMem::output(&mut got), LONG).unwrap_err();
            assert!(matches!(e, P2pError::BadPeer { peer: 0, .. }), "{e}");
        }
        w[2].send(1, 1, LocalMem::input(&[7]), LONG).unwrap();
        assert_eq!(w[1].recv(None, None, LocalMem::output(&mut got), LONG).unwrap().from, 2);
    }
    // A slot that says nothing of the message: nobody sends it.
    let w = fresh();
    w[0].to(1).unwrap().publish(1, &e);
    let late = w[1].recv(Some(0), None, LocalMem::output(&mut vec![0; 9000]), SHORT).unwrap_err();
    assert!(matches!(late, P2pError::Timeout { .. }), "{late}");
    // A receiver that writes over the slot of a message that is sent to it.
    let w = world(2);
    let sends = w[0].isend(1, 1, Owned::Private(vec![1; 9000]), LONG);
    w[1].from(0).unwrap().assign(0, 77);
    assert!(matches!(sends.wait().result, Err(P2pError::BadPeer { peer: 1, .. })));
}

/// A request that is dropped goes on, and its buffer with it; a mailbox that is dropped takes its messages along.
#[test]
fn what_is_dropped_lets_go_of_its_memory_when_it_has_ended() {
    let mut w = world(2);
    let t = device(&w[0], &bytes(1, 20_000));
    drop(w[0].isend(1, 1, Owned::Device(t.clone(), 0, 20_000), LONG));
    assert_eq!(Arc::strong_count(&t), 2);
    let mut got = vec![0; 20_000];
    w[1].recv(Some(0), None, LocalMem::output(&mut got), LONG).unwrap();
    assert_eq!(got, bytes(1, 20_000));
    // Whoever looks next finds that it is done.
    assert!(!w[0].irecv(Some(1), None, Owned::Private(vec![0]), LONG).test());
    assert_eq!(Arc::strong_count(&t), 1);
    drop(w[0].isend(1, 2, Owned::Device(t.clone(), 0, 20_000), LONG));
    drop(w.remove(0));
    assert_eq!(Arc::strong_count(&t), 1);
    let e = w[0].recv(Some(0), None, LocalMem::output(&mut got), LONG).unwrap_err();
    assert!(matches!(e, P2pError::Left { .. }), "{e}");
}

/// Many threads of both ranks at once, each with a tag of its own.
#[test]
fn threads_of_a_rank_do_not_take_each_others_messages() {
    for way in [Way::Direct, Way::Staged] {
        let w = world_by(2, way);
        std::thread::scope(|s| {
            for tag in 0..4u32 {
                let w = &w;
                s.spawn(move || {
                    for i in 0..60 {
                        let len = [4, 500, 10_000, 600_000][(i + tag as usize) % 4];
                        w[0].send(1, tag, LocalMem::input(&bytes(i + tag as usize, len)), LONG).unwrap();
                        w[0].recv(Some(1), Some(tag), LocalMem::output(&mut [0; 8]), LONG).unwrap();
                    }
                });
                s.spawn(move || {
                    let mut got = vec![0; 600_000];
                    for i in 0..60 {
                        let r = w[1].recv(None, Some(tag), LocalMem::output(&mut got), LONG).unwrap();
                        let len = r.len as usize;
                        assert!(got[..len] == bytes(i + tag as usize, len), "{way:?} tag {tag} #{i}");
                        w[1].send(0, tag, LocalMem::input(&[1; 8]), LONG).unwrap();
                    }
                });
            }
        });
    }
}

/// Programs that each property is tried on.
const CASES: u32 = 300;

/// One step of a program.
#[derive(Debug, Clone)]
enum Step {
    Send {
        from: usize,
        to: usize,
        tag: u32,
        len: usize,
        device: bool,
    },
    Receive {
        by: usize,
        from: Option<usize>,
        tag: Option<u32>,
        room: usize,
        device: bool,
    },
    /// The `nth` operation that is not known to have ended gives up at once.
    Cancel(usize),
    /// It is looked at.
    Test(usize),
}

fn steps(ranks: usize, any_source: bool, cancel: bool) -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![
        4 => 0..64usize,
        2 => Just(EAGER_BYTES),
        2 => EAGER_BYTES - 1..30_000,
        1 => MAIL_STAGE_BYTES - 1..3 * MAIL_STAGE_BYTES,
    ];
    let room = prop_oneof![6 => Just(3 * MAIL_STAGE_BYTES), 1 => 0..9000usize];
    let send = (0..ranks, 0..ranks, 0..3u32, len, any::<bool>()).prop_map(|(from, to, tag, len, device)| Step::Send {
        from,
        to,
        tag,
        len,
        device,
    });
    let source = if any_source {
        prop_oneof![1 => Just(None), 2 => (0..ranks).prop_map(Some)].boxed()
    } else {
        (0..ranks).prop_map(Some).boxed()
    };
    let receive = (0..ranks, source, prop::option::of(0..3u32), room, any::<bool>())
        .prop_map(|(by, from, tag, room, device)| Step::Receive { by, from, tag, room, device });
    let look = any::<usize>().prop_map(Step::Test);
    let step = if cancel {
        prop_oneof![5 => send, 5 => receive, 2 => look, 1 => any::<usize>().prop_map(Step::Cancel)].boxed()
    } else {
        prop_oneof![5 => send, 5 => receive, 2 => look].boxed()
    };
    prop::collection::vec(step, 1..60)
}

/// What became of one operation.
struct Issued {
    step: Step,
    request: Option<Request>,
    result: Option<Result<Received, P2pError>>,
    /// The message that a receive got, as its first bytes say.
    got: Option<usize>,
}

/// A message says which it is: its index among the operations, then bytes that follow from it.
fn message(index: usize, len: usize) -> Vec<u8> {
    let mut data = bytes(index, len);
    let head = (index as u32).to_le_bytes();
    let n = len.min(4);
    data[..n].copy_from_slice(&head[..n]);
    data
}

/// Runs a program, one thread for all ranks; answers what became of it.
fn run(ranks: usize, way: Way, program: &[Step]) -> Vec<Issued> {
    let w = world_by(ranks, way);
    let buffer = |rank: usize, on_device: bool, content: Vec<u8>| {
        if on_device {
            Owned::Device(device(&w[rank], &content), 0, content.len() as u64)
        } else {
            Owned::Private(content)
        }
    };
    let mut all: Vec<Issued> = Vec::new();
    let note = |i: &mut Issued, f: Finished| {
        if let (Step::Receive { .. }, Ok(r)) = (&i.step, &f.result) {
            let mut got = vec![0; r.len as usize];
            match &f.buffer {
                Owned::Private(b) => got.copy_from_slice(&b[..r.len as usize]),
                Owned::Device(b, ..) => assert!(b.read(0, &mut got)),
            }
            let index = (got.len() >= 4).then(|| u32::from_le_bytes([got[0], got[1], got[2], got[3]]) as usize);
            if let Some(index) = index {
                assert!(got == message(index, got.len()), "message {index} of {} bytes", got.len());
            }
            i.got = index;
        }
        i.result = Some(f.result);
    };
    let look = |all: &mut [Issued], at: usize| {
        if let Some(mut request) = all[at].request.take() {
            if request.test() {
                note(&mut all[at], request.wait());
            } else {
                all[at].request = Some(request);
            }
        }
    };
    let open = |all: &[Issued], nth: usize| {
        let open: Vec<usize> = (0..all.len()).filter(|i| all[*i].request.is_some()).collect();
        if open.is_empty() { None } else { Some(open[nth % open.len()]) }
    };
    for step in program {
        let index = all.len();
        let request = match *step {
            Step::Send { from, to, tag, len, device } => {
                w[from].isend(to, tag, buffer(from, device, message(index, len)), Duration::MAX)
            }
            Step::Receive { by, from, tag, room, device } => {
                w[by].irecv(from, tag, buffer(by, device, vec![0; room]), Duration::MAX)
            }
            Step::Test(nth) => {
                if let Some(at) = open(&all, nth) {
                    look(&mut all, at);
                }
                continue;
            }
            Step::Cancel(nth) => {
                if let Some(at) = open(&all, nth)
                    && let Some(request) = all[at].request.take()
                {
                    let f = request.expire().wait();
                    note(&mut all[at], f);
                }
                continue;
            }
        };
        all.push(Issued { step: step.clone(), request: Some(request), result: None, got: None });
    }
    // Until nothing moves any more: pieces and answers go to and fro.
    let mut idle = 0;
    while idle < 3 {
        let before: Vec<(u64, bool)> = all.iter().map(|i| (0, i.request.is_some())).collect();
        let moved = |w: &[Arc<Mailbox>]| w.iter().map(|m| m.endpoint.control().counters().copied).sum::<u64>();
        let copied = moved(&w);
        (0..all.len()).for_each(|at| look(&mut all, at));
        let after: Vec<(u64, bool)> = all.iter().map(|i| (0, i.request.is_some())).collect();
        idle = if before == after && copied == moved(&w) { idle + 1 } else { 0 };
    }
    all
}

/// What MPI says of programs whose receives name their senders: which message each receive gets follows from the order of the
/// calls of the two ranks alone.
fn model(program: &[Step]) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    // Only operations have an index.
    let ops: Vec<&Step> = program.iter().filter(|s| matches!(s, Step::Send { .. } | Step::Receive { .. })).collect();
    let mut taken = vec![false; ops.len()];
    for (at, op) in ops.iter().enumerate() {
        let earlier = |other: &Step| match (*op, other) {
            (&Step::Send { from, to, tag, .. }, &Step::Receive { by, from: source, tag: wanted, .. })
            | (&Step::Receive { by, from: source, tag: wanted, .. }, &Step::Send { from, to, tag, .. }) => {
                by == to && source == Some(from) && wanted.is_none_or(|t| t == tag)
            }
            _ => false,
        };
        if let Some(other) = (0..at).find(|i| !taken[*i] && earlier(ops[*i])) {
            (taken[other], taken[at]) = (true, true);
            pairs.push(if matches!(op, Step::Send { .. }) { (at, other) } else { (other, at) });
        }
    }
    pairs.sort_unstable();
    pairs
}

fn ways() -> impl Strategy<Value = Way> {
    prop_oneof![3 => Just(Way::Direct), 2 => Just(Way::Staged), 1 => Just(Way::Refused)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, ..ProptestConfig::default() })]

    #[test]
    fn named_receives_get_what_the_model_says(way in ways(), program in steps(3, false, false)) {
        let all = run(3, way, &program);
        let pairs = model(&program);
        let partner = |i: usize| pairs.iter().find_map(|(s, r)| (*s == i).then_some(*r).or((*r == i).then_some(*s)));
        for (i, op) in all.iter().enumerate() {
            match (&op.step, partner(i), &op.result) {
                (Step::Send { len, .. }, None, r) => {
                    // A small one is sent when it is on its way, if there was room.
                    prop_assert!(r.is_none() || *len <= EAGER_BYTES, "#{} {:?}: {:?}", i, op.step, r);
                }
                (Step::Send { .. }, Some(_), r) => prop_assert!(matches!(r, Some(Ok(_))), "#{} {:?}: {:?}", i, op.step, r),
                (Step::Receive { .. }, None, r) => prop_assert!(r.is_none(), "#{} {:?}: {:?}", i, op.step, r),
                (Step::Receive { room, .. }, Some(s), r) => {
                    let Step::Send { from, tag, len, .. } = all[s].step else { unreachable!() };
                    match r {
                        Some(Ok(got)) => {
                            prop_assert!(len <= *room);
                            prop_assert_eq!(*got, Received { from, tag, len: len as u64 });
                            prop_assert!(op.got.is_none_or(|m| m == s), "#{} got {:?}, not {}", i, op.got, s);
                        }
                        Some(Err(P2pError::Truncated { sent, have, .. })) => {
                            prop_assert_eq!((*sent, *have), (len as u64, *room as u64));
                            prop_assert!(len > *room);
                        }
                        other => prop_assert!(false, "#{} {:?} of {}: {:?}", i, op.step, s, other),
                    }
                }
                _ => {}
            }
        }
    }

    /// With receives from any rank and operations that are given up, what holds for every order in which things may happen.
    #[test]
    fn any_receives_and_deadlines_keep_the_rules(way in ways(), program in steps(3, true, true)) {
        let all = run(3, way, &program);
        let done = |i: usize| matches!(all[i].result, Some(Ok(_) | Err(P2pError::Truncated { .. })));
        let cancelled = |i: usize| matches!(all[i].result, Some(Err(P2pError::Timeout { .. })));
        // Who got which, where the message was long enough to say.
        let mut of = std::collections::HashMap::new();
        for (r, op) in all.iter().enumerate() {
            prop_assert!(op.result.is_none() || done(r) || cancelled(r), "#{} {:?}: {:?}", r, op.step, op.result);
            if let Some(s) = op.got {
                prop_assert!(!cancelled(s), "#{} got the message #{} that was taken back", r, s);
                prop_assert!(of.insert(s, r).is_none(), "message #{} came twice", s);
            }
        }
        let wants = |r: usize, s: usize| match (&all[r].step, &all[s].step) {
            (Step::Receive { by, from: source, tag: wanted, .. }, Step::Send { from, to, tag, .. }) => {
                by == to && source.is_none_or(|p| p == *from) && wanted.is_none_or(|t| t == *tag)
            }
            _ => false,
        };
        let same_pair = |a: usize, b: usize| match (&all[a].step, &all[b].step) {
            (Step::Send { from, to, .. }, Step::Send { from: f, to: t, .. }) => (from, to) == (f, t),
            _ => false,
        };
        for (&s, &r) in &of {
            prop_assert!(wants(r, s), "#{} {:?} got #{} {:?}", r, all[r].step, s, all[s].step);
            // No message of the pair overtakes: an earlier one that this receive wants went to an earlier receive, or to nobody
            // because it was taken back; and what says nothing of itself, or was cut, is not known. A receive that had a message
            // which was taken back later may have seen others go by, and so may a message that a receive had and gave back.
            let given_back = |e: usize| (0..all.len()).any(|c| cancelled(c) && wants(c, e));
            let lost = (0..all.len()).any(|c| cancelled(c) && wants(r, c));
            for e in (0..s).filter(|e| same_pair(*e, s) && wants(r, *e) && !cancelled(*e)) {
                let Step::Send { len, .. } = all[e].step else { unreachable!() };
                if len >= 4 && let Some(other) = of.get(&e) {
                    prop_assert!(lost || given_back(e) || *other < r || !wants(*other, s), "#{} overtook #{}: #{} before #{}", s, e, r, other);
                }
            }
        }
        // Nothing waits for what is there.
        for r in (0..all.len()).filter(|r| all[*r].result.is_none() && matches!(all[*r].step, Step::Receive { .. })) {
            for s in (0..all.len()).filter(|s| wants(r, *s)) {
                let Step::Send { len, .. } = all[s].step else { unreachable!() };
                let gone = cancelled(s) || of.contains_key(&s) || len < 4 || truncated(&all, s);
                prop_assert!(gone, "#{} waits, and #{} is there", r, s);
            }
        }
    }
}

/// Whether some receive says that it lost a message like this.
fn truncated(all: &[Issued], s: usize) -> bool {
    let Step::Send { from, tag, len, .. } = all[s].step else { return false };
    all.iter().any(|i| {
        matches!(&i.result, Some(Err(P2pError::Truncated { from: f, tag: t, sent, .. })) if (*f, *t, *sent) == (from, tag, len as u64))
    })
}
