//! Operations in the background: several in flight on several streams, beside blocking calls; their buffers come back.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{bytes_of, config, values_of, world};
use host_runtime::nrt::{Buffers, Communicator, Io, Peers, Request};
use host_runtime::{DataType, ReduceOp};
use hw_bridge::flight::State;

fn values(buffers: Buffers) -> Vec<f32> {
    match buffers {
        Buffers::HostInPlace(b) | Buffers::Host { dst: b, .. } => values_of(&b),
        Buffers::Device { dst, .. } => {
            let mut out = vec![0; dst.0.len() as usize];
            dst.0.read(0, &mut out).unwrap();
            values_of(&out)
        }
    }
}

#[test]
fn streams_run_side_by_side_and_in_order() {
    world(3, &config(), |mut comm| {
        let (rank, n) = (comm.rank(), comm.nranks() as f32);
        let sum = |k: f32| (0..3).map(|r| r as f32 + k).sum::<f32>();
        let mut streams: Vec<_> = (0..Communicator::STREAMS).map(|i| comm.stream(i).unwrap()).collect();
        for round in 0..20u32 {
            let mut requests: Vec<(f32, Request)> = Vec::new();
            for (i, stream) in streams.iter_mut().enumerate() {
                for k in 0..3 {
                    let count = [1usize, 1000, 70_000][(round as usize + i + k) % 3];
                    let salt = (i * 3 + k) as f32;
                    let mine = bytes_of(&vec![rank as f32 + salt; count]);
                    let buffers = if (i + k) % 2 == 0 {
                        Buffers::HostInPlace(mine)
                    } else {
                        let t = Arc::new(comm.tensor(mine.len() as u64).unwrap());
                        t.write(0, &mine).unwrap();
                        Buffers::in_place(&t)
                    };
                    let r = stream.all_reduce(buffers, count as u64, DataType::Fp32, ReduceOp::Sum).unwrap();
                    requests.push((sum(salt), r));
                }
            }
            // Ranks wait in different orders: nothing depends on it.
            if rank == 1 {
                requests.reverse();
            }
            // A blocking call in the middle overtakes nothing and waits for nothing of the streams.
            let mut ones = bytes_of(&[1.0; 10]);
            comm.all_reduce(Io::HostInPlace(&mut ones), 10, DataType::Fp32, ReduceOp::Sum).unwrap();
            assert_eq!(values_of(&ones), [n; 10]);
            for (expected, r) in requests {
                assert!(values(r.wait().unwrap()).iter().all(|v| *v == expected), "rank {rank} round {round}");
            }
        }
        // Every collective once, waited for by looking.
        let s = &mut streams[0];
        let blocks = |v: f32| Buffers::Host { src: bytes_of(&[v, v, v]), dst: vec![0; 12] };
        let ring = Peers { dst: Some((rank + 1) % 3), src: Some((rank + 2) % 3) };
        let me = rank as f32;
        let f = DataType::Fp32;
        let gather = Buffers::Host { src: bytes_of(&[me]), dst: vec![0; 12] };
        let cases: Vec<(Request, Vec<f32>)> = vec![
            (s.all_gather(gather, 1, f).unwrap(), vec![0.0, 1.0, 2.0]),
            (s.reduce_scatter(blocks(me), 1, f, ReduceOp::Max).unwrap(), vec![2.0, 0.0, 0.0]),
            (s.broadcast(blocks(me), 3, f, 2).unwrap(), vec![2.0; 3]),
            (
                s.reduce(blocks(me), 3, f, ReduceOp::Sum, 1).unwrap(),
                if rank == 1 { vec![3.0; 3] } else { vec![0.0; 3] },
            ),
            (s.all_to_all(blocks(me), 1, f).unwrap(), vec![0.0, 1.0, 2.0]),
            (s.send_recv(blocks(me), 3, f, ring).unwrap(), vec![((rank + 2) % 3) as f32; 3]),
        ];
        for (i, (mut r, expected)) in cases.into_iter().enumerate() {
            let done = loop {
                match r.test().unwrap() {
                    Ok(done) => break done,
                    Err(still) => r = still,
                }
                std::thread::yield_now();
            };
            done.result.unwrap();
            assert_eq!(values(done.buffers), expected, "case {i}");
        }
        s.barrier().unwrap().wait().unwrap();
        // Ranks leave together.
        comm.barrier().unwrap();
    });
}

/// What is issued and not waited for still happens, and the last rank to wait does not hold the others up.
#[test]
fn a_request_need_not_be_waited_for() {
    world(2, &config(), |mut comm| {
        let mut s = comm.stream(2).unwrap();
        let t = Arc::new(comm.tensor(4000).unwrap());
        t.write(0, &bytes_of(&[1.0; 1000])).unwrap();
        for _ in 0..10 {
            drop(s.all_reduce(Buffers::in_place(&t), 1000, DataType::Fp32, ReduceOp::Sum).unwrap());
        }
        // Dropping the stream ends what was issued.
        drop(s);
        assert!(values(Buffers::in_place(&t)).iter().all(|v| *v == 1024.0));
        comm.barrier().unwrap();
        assert!(comm.stream(2).unwrap_err().to_string().contains("was taken before"));
        assert!(comm.stream(4).unwrap_err().to_string().contains("there are 4, from 0"));
    });
}

/// A stream whose peer does not come fails by its deadline and names it; so do the other streams and the blocking calls after it,
/// and the flight recorder tells what happened.
#[test]
fn a_late_peer_fails_the_stream_and_is_named() {
    let sleep = Duration::from_secs(3);
    world(2, &config(), move |mut comm| {
        let mut s = comm.stream(1).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(sleep);
            let e = s.barrier().unwrap().wait().unwrap_err().to_string();
            assert!(
                e.contains("failed on rank 1") && e.contains("timed out on rank 0") && e.contains("rank 1 ("),
                "{e}"
            );
            return;
        }
        s.set_timeout(Duration::from_millis(500));
        let running = s.barrier().unwrap();
        let running = running.wait_for(Duration::from_millis(50)).unwrap().unwrap_err();
        let now: Vec<_> = comm.flight().into_iter().filter(|(lane, _)| *lane == 2).collect();
        assert_eq!(now.len(), 1, "{now:?}");
        assert_eq!(now[0].1.state, State::Running);
        let e = running.wait().unwrap_err().to_string();
        assert!(e.contains("barrier") && e.contains("timed out on rank 0") && e.contains("rank 1"), "{e}");
        assert!(e.contains("it has not started any operation"), "{e}");
        let e = comm.barrier().unwrap_err().to_string();
        assert!(e.contains("no longer usable") && e.contains("timed out"), "{e}");
        let (_, last) = comm.flight().into_iter().rfind(|(lane, _)| *lane == 2).unwrap();
        assert_eq!(last.state, State::Failed);
        assert!(last.took >= Duration::from_millis(450), "{last}");
        // The peer's memory tells what it did last: the barrier of the blocking lane.
        let flights = comm.peer_flights();
        assert_eq!((flights.len(), flights[0].0), (1, 1));
        assert!(flights[0].1.iter().any(|(lane, r)| *lane == 0 && r.what == "barrier" && r.state == State::Done));
        std::thread::sleep(sleep);
    });
}
