//! Deadlines of single calls: given back after them, and sound at both ends of what a duration can say.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use hw_bridge::group::flight::State;
use sandbox::status::Status;
use wccl::{DataType, DeviceMemory, Error, Io, Peers, Progress, RuntimeConfig};

use crate::common::{config, world};

/// No time at all is a time-out at once, with the sentence of any other, in a call and on a stream.
#[test]
fn a_deadline_of_zero_does_not_wait_for_who_has_not_come() {
    for streamed in [false, true] {
        let held = Arc::new(Barrier::new(2));
        world(2, &config(), move |mut comm| {
            let before = comm.timeout();
            let mut s = comm.stream(0).unwrap();
            if comm.rank() == 1 {
                held.wait();
                let e = comm.barrier().unwrap_err().to_string();
                assert!(e.contains("timed out on rank 0 after 0ns"), "{e}");
                return;
            }
            let e = if streamed {
                s.within(Duration::ZERO).barrier().wait().unwrap_err().error
            } else {
                comm.within(Duration::ZERO).barrier().unwrap_err()
            };
            assert_eq!(e.status(), Status::TIMEOUT);
            let e = e.to_string();
            assert!(e.contains("operation #1 (barrier) timed out on rank 0 after 0ns without rank 1 (host"), "{e}");
            assert_eq!(comm.timeout(), before);
            held.wait();
        });
    }
}

/// Whoever has come is not missed.
#[test]
fn a_deadline_of_zero_is_enough_when_all_are_there() {
    world(2, &config(), |mut comm| {
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            let waits = |lane: usize, seq: u64, state: State| lane == 0 && seq == 2 && state == State::Running;
            while !comm.peer_flights()[0].1.iter().any(|(lane, r)| waits(*lane, r.seq, r.state)) {
                std::thread::yield_now();
            }
            comm.within(Duration::ZERO).barrier().unwrap();
        } else {
            comm.barrier().unwrap();
        }
        // Both are back at their own deadlines, which are long enough.
        comm.barrier().unwrap();
        assert_eq!(comm.timeout(), config().timeout);
    });
}

/// As long as can be is no overflow: not while the ranks are connected, not in an operation, not on a stream.
#[test]
fn a_deadline_without_end_is_one() {
    world(4, &config(), |mut comm| {
        let mut patient = comm.within(Duration::MAX);
        patient.barrier().unwrap();
        let mut s = patient.stream(0).unwrap();
        patient.barrier().unwrap();
        drop(patient);
        assert_eq!(comm.timeout(), config().timeout);
        let r = s.within(Duration::MAX).barrier();
        assert!(matches!(r.wait_for(Duration::MAX), Progress::Done(())));
        comm.barrier().unwrap();
    });
}

/// The first operation of four ranks connects them: within its deadline, with the absent rank named; who comes later learns
/// why nobody waits for it.
#[test]
fn the_deadline_of_a_first_operation_bounds_the_connecting() {
    for deadline in [Duration::ZERO, Duration::from_secs(3)] {
        let (together, held) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(4)));
        let late = world(4, &config(), move |mut comm| {
            let (rank, passed) = (comm.rank(), "the deadline of the operation has passed");
            if rank == 2 {
                held.wait();
                let e = comm.barrier().unwrap_err().to_string();
                assert!(e.contains("no longer usable") && e.contains(" timed out ") && e.contains(passed), "{e}");
                return false;
            }
            together.wait();
            let e = comm.within(deadline).barrier().unwrap_err();
            // Nobody fails before all are here, or the others would wait for it.
            held.wait();
            let again = comm.barrier().unwrap_err().to_string();
            println!("rank {rank}: {e}");
            let late = matches!(e, Error::Connecting { .. });
            let (status, e) = (e.status(), e.to_string());
            // By its own deadline or another rank's, or because it came when another had given up: all say the same.
            assert_eq!(status, if late { Status::TIMEOUT } else { Status::CLOSED }, "{e}");
            assert!(e.contains("barrier on rank") && e.contains(" timed out ") && e.contains(passed), "{e}");
            // By the library's own answer.
            assert_eq!(comm.control_stopped(), None);
            if !deadline.is_zero() {
                assert!(e.contains("rank 2 sent nothing"), "{e}");
            }
            assert!(!e.contains("closed its connection"), "{e}");
            assert!(again.contains("no longer usable"), "{again}");
            late
        });
        assert!(late.contains(&true));
    }
}

/// A sender waits for longer than the deadline while its receiver copies: an operation that moves on does not time out. On a busy
/// machine a receiver may lose its core for so long that it does not move on, but not each time.
#[test]
fn a_long_copy_does_not_time_out_the_rank_that_waits_for_it() {
    const BYTES: u64 = 512 << 20;
    let c = RuntimeConfig { hbm_bytes: 2 * BYTES, ..config() };
    let lasts = || {
        let results = world(2, &c, |mut comm| {
            let rank = comm.rank();
            let peers = if rank == 0 { Peers { dst: Some(1), src: None } } else { Peers { dst: None, src: Some(0) } };
            // Fresh pages each time: the copy takes several times as long.
            let tensors = [(); 2].map(|()| comm.allocate(BYTES).unwrap());
            let mut send = |t: &DeviceMemory, deadline| {
                comm.barrier().unwrap();
                let begun = Instant::now();
                let io = Io::device(t, t);
                comm.within(deadline).raw().send_recv(io, BYTES, DataType::Uint8, peers).map(|()| begun.elapsed())
            };
            let took = send(&tensors[0], Duration::MAX).unwrap();
            // Only the sender waits.
            send(&tensors[1], if rank == 0 { took / 3 } else { Duration::MAX }).is_ok()
        });
        results == [true; 2]
    };
    assert!((0..5).any(|_| lasts()), "five times");
}
