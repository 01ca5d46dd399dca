//! Operations in the background: several in flight on several streams, beside blocking calls; their buffers come back.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use hw_bridge::exec::reduce;
use hw_bridge::group::flight::State;
use wccl::{
    Buffers, Communicator, DataType, DeviceMemory, Io, OwnedReduction, Peers, Pending, Progress, ReduceOp, Stream,
};

use crate::common::{bytes_of, config, values_of, world};

fn output(buffers: Buffers) -> Vec<u8> {
    match buffers {
        Buffers::HostInPlace(b) | Buffers::Host { dst: b, .. } => b,
        Buffers::Device { dst, .. } => read(&dst.0),
    }
}

fn read(t: &DeviceMemory) -> Vec<u8> {
    let mut out = vec![0; t.len() as usize];
    t.read(0, &mut out).unwrap();
    out
}

fn values(buffers: Buffers) -> Vec<f32> {
    values_of(&output(buffers))
}

fn tensor(comm: &Communicator, bytes: &[u8]) -> Arc<DeviceMemory> {
    let t = comm.allocate(bytes.len() as u64).unwrap();
    t.write(0, bytes).unwrap();
    Arc::new(t)
}

/// Small whole numbers: their sums are exact in any order.
fn numbers(rank: usize, salt: usize, count: usize) -> Vec<u8> {
    bytes_of(&(0..count).map(|i| ((i * 7 + rank * 3 + salt) % 5) as f32).collect::<Vec<_>>())
}

/// The reduction by the reference path, in rank order.
fn reduced(op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0; inputs[0].len()];
    let all: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    reduce::reduce_slices(op, DataType::Fp32, &mut out, &all).unwrap();
    out
}

/// Waits for one operation, and compares what it gave.
type Check = Box<dyn FnOnce()>;

/// Issues on one stream what takes lists, roots, scales or many buffers; `salt` makes sizes and memory of one stream differ
/// from another's.
fn issue_all(comm: &Communicator, s: &mut Stream, salt: usize) -> Vec<Check> {
    const F: DataType = DataType::Fp32;
    let (rank, n) = (comm.rank(), comm.nranks());
    let c = [1usize, 700, 40_000][salt % 3];
    let (root, count, here) = (salt % n, c as u64, format!("rank {rank} salt {salt}"));
    // The output is prefilled, so that what is not to be written is seen.
    let buffers = |device: bool, src: Vec<u8>, out: usize| {
        let dst = vec![0xEE; out];
        if device { Buffers::device(&tensor(comm, &src), &tensor(comm, &dst)) } else { Buffers::Host { src, dst } }
    };
    let mut checks: Vec<Check> = Vec::new();
    let mut check = |what: &'static str, r: Pending, want: Vec<u8>| {
        let here = here.clone();
        checks.push(Box::new(move || assert!(output(r.wait().unwrap()) == want, "{what} {here}")));
    };
    let all = |count: usize| (0..n).map(|r| numbers(r, salt, count)).collect::<Vec<_>>();
    let (one, wide) = (all(c), all(n * c));
    let block = |bytes: &[u8], i: usize| bytes[i * c * 4..(i + 1) * c * 4].to_vec();

    for device in [salt.is_multiple_of(2), !salt.is_multiple_of(2)] {
        let at_root = |bytes: Vec<u8>| if rank == root { bytes } else { Vec::new() };
        let want = at_root(one.concat());
        let r = s.raw().gather(buffers(device, one[rank].clone(), want.len()), count, F, root);
        check("gather", r, want);
        let r = s.raw().scatter(buffers(device, at_root(wide[root].clone()), c * 4), count, F, root);
        check("scatter", r, block(&wide[root], rank));

        let pairs = [(0, 2), (2, 1), (1, 0)];
        let from = pairs.iter().find(|(_, to)| *to == rank).map(|(from, _)| *from);
        let r = s.raw().permute(buffers(device, one[rank].clone(), c * 4), count, F, &pairs);
        check("permute", r, from.map_or(vec![0xEE; c * 4], |from| one[from].clone()));

        let counts: Vec<u64> = (0..n as u64).map(|r| [3, 0, count, 50][r as usize % 4]).collect();
        let total: usize = counts.iter().sum::<u64>() as usize;
        let ragged: Vec<Vec<u8>> = (0..n).map(|r| numbers(r, salt, counts[r] as usize)).collect();
        let r = s.raw().all_gather_v(buffers(device, ragged[rank].clone(), total * 4), &counts, F);
        check("all_gather_v", r, ragged.concat());
        let inputs = all(total);
        let begin = counts[..rank].iter().sum::<u64>() as usize * 4;
        let want = reduced(ReduceOp::Max, &inputs)[begin..begin + counts[rank] as usize * 4].to_vec();
        let b = buffers(device, inputs[rank].clone(), want.len());
        check("reduce_scatter_v", s.raw().reduce_scatter_v(b, &counts, F, ReduceOp::Max), want);

        let cell = |from: usize, to: usize| ((from + 2 * to + salt) % 4) * 100;
        let sends: Vec<u64> = (0..n).map(|to| cell(rank, to) as u64).collect();
        let gets: Vec<u64> = (0..n).map(|from| cell(from, rank) as u64).collect();
        let piece = |from: usize, to: usize| numbers(from, to, cell(from, to));
        let src = (0..n).flat_map(|to| piece(rank, to)).collect();
        let want: Vec<u8> = (0..n).flat_map(|from| piece(from, rank)).collect();
        check("all_to_all_v", s.raw().all_to_all_v(buffers(device, src, want.len()), &sends, &gets, F), want);

        // Each rank's scale is another.
        let scaled = |inputs: &[Vec<u8>]| {
            let each = inputs.iter().enumerate();
            let all: Vec<Vec<u8>> = each
                .map(|(r, b)| bytes_of(&values_of(b).iter().map(|v| v * (r + 1) as f32).collect::<Vec<_>>()))
                .collect();
            reduced(ReduceOp::Sum, &all)
        };
        let scale = (rank + 1) as f32;
        let r = s.raw().all_reduce_scaled(buffers(device, one[rank].clone(), c * 4), count, F, scale);
        check("all_reduce_scaled", r, scaled(&one));
        let r = s.raw().reduce_scatter_scaled(buffers(device, wide[rank].clone(), c * 4), count, F, scale);
        check("reduce_scatter_scaled", r, block(&scaled(&wide), rank));
        let want = at_root(scaled(&one));
        let r = s.raw().reduce_scaled(buffers(device, one[rank].clone(), want.len()), count, F, root, scale);
        check("reduce_scaled", r, want);
    }

    // Some packed, some that go by themselves, in both memories.
    let sizes = [5usize, 0, 40_000, 1, 700, 30];
    let item = |r: usize, i: usize| numbers(r, salt + i, sizes[i]);
    let items = (0..sizes.len()).map(|i| match i % 2 {
        0 => OwnedReduction::Host(item(rank, i)),
        _ => OwnedReduction::Device { tensor: tensor(comm, &item(rank, i)), offset: 0, count: sizes[i] as u64 },
    });
    let r = s.raw().all_reduce_many(items.collect(), F, ReduceOp::Sum);
    let want: Vec<_> =
        (0..sizes.len()).map(|i| reduced(ReduceOp::Sum, &(0..n).map(|r| item(r, i)).collect::<Vec<_>>())).collect();
    checks.push(Box::new(move || {
        for (i, (got, want)) in r.wait().unwrap().into_iter().zip(want).enumerate() {
            let got = match got {
                OwnedReduction::Host(b) => b,
                OwnedReduction::Device { tensor, .. } => read(&tensor),
            };
            assert!(got == want, "all_reduce_many #{i} rank {rank} salt {salt}");
        }
    }));

    // A block to everybody, itself too.
    let (a, b) = (tensor(comm, &wide[rank]), tensor(comm, &vec![0; n * c * 4]));
    let mut group = s.group();
    for peer in 0..n {
        let at = (peer * c * 4) as u64;
        group.send(a.clone(), at, count, F, peer).unwrap().recv(b.clone(), at, count, F, peer).unwrap();
    }
    drop((a, b));
    let r = group.run();
    let want: Vec<u8> = wide.iter().flat_map(|theirs| block(theirs, rank)).collect();
    checks.push(Box::new(move || {
        let mut tensors = r.wait().unwrap();
        let b = tensors.pop().unwrap();
        assert!(read(&b) == want, "group rank {rank} salt {salt}");
        // The stream keeps nothing back.
        drop(tensors);
        assert!(Arc::try_unwrap(b).is_ok());
    }));
    checks
}

/// Four ranks, so that not everybody is a ring neighbour; four streams with all of them in flight.
#[test]
fn every_call_runs_on_streams_side_by_side() {
    world(4, &config(), |mut comm| {
        let rank = comm.rank();
        let mut streams: Vec<_> = (0..Communicator::STREAMS).map(|i| comm.stream(i).unwrap()).collect();
        // The second round finds its schedules by their lists.
        for _ in 0..2 {
            let mut order: Vec<usize> = (0..streams.len()).collect();
            order.rotate_left(rank);
            let mut checks: Vec<Check> = Vec::new();
            for i in order {
                checks.extend(issue_all(&comm, &mut streams[i], i));
            }
            let mut ones = bytes_of(&[1.0; 10]);
            comm.raw().all_reduce(Io::HostInPlace(&mut ones), 10, DataType::Fp32, ReduceOp::Sum).unwrap();
            assert_eq!(values_of(&ones), [4.0; 10]);
            if rank == 1 {
                checks.reverse();
            }
            checks.into_iter().for_each(|check| check());
        }
        comm.barrier().unwrap();
    });
}

/// What is refused comes with the request, with the buffers if they are asked for; the stream goes on.
#[test]
fn what_cannot_be_is_refused_by_the_request_and_the_stream_goes_on() {
    world(2, &config(), |mut comm| {
        const F: DataType = DataType::Fp32;
        let rank = comm.rank();
        let mut s = comm.stream(0).unwrap();
        let host = |elements: usize| Buffers::Host { src: vec![0; elements * 4], dst: vec![0; elements * 4] };
        let refused = |r: Pending| r.wait().unwrap_err().to_string();
        let e = refused(s.raw().all_gather_v(host(3), &[1, 1, 1], F));
        assert!(e.contains("3 counts were passed, 2 ranks need one each"), "{e}");
        let e = refused(s.raw().permute(host(3), 1, F, &[(0, 1), (0, 0)]));
        assert!(e.contains("a second time"), "{e}");
        let e = refused(s.raw().gather(host(1), 1, F, 7));
        assert!(e.contains("root 7"), "{e}");
        let e = refused(s.raw().all_reduce_scaled(host(1), 1, DataType::Int32, 2.0));
        assert!(e.contains("cannot be scaled"), "{e}");
        let finished = s.raw().all_reduce_many(vec![OwnedReduction::Host(vec![1; 7])], F, ReduceOp::Sum);
        let Progress::Failed(failed) = finished.wait_for(Duration::MAX) else { panic!("it is not refused") };
        assert!(failed.to_string().contains("not whole fp32 elements"));
        assert!(matches!(&failed.buffers[..], [OwnedReduction::Host(b)] if *b == [1; 7]));
        let t = tensor(&comm, &[0; 64]);
        let mut group = s.group();
        assert!(group.send(t.clone(), 60, 2, F, 0).unwrap_err().to_string().contains("not inside a tensor"));
        if rank == 0 {
            group.send(t.clone(), 0, 4, F, 1).unwrap();
        } else {
            group.recv(t.clone(), 0, 5, F, 0).unwrap();
        }
        let e = group.run().wait().unwrap_err().to_string();
        assert!(e.contains("send 0 of rank 0 to rank 1 is 16 bytes of fp32, the receive there is 20"), "{e}");
        s.barrier().wait().unwrap();
        comm.barrier().unwrap();
    });
}

#[test]
fn streams_run_side_by_side_and_in_order() {
    world(3, &config(), |mut comm| {
        let (rank, n) = (comm.rank(), comm.nranks() as f32);
        let sum = |k: f32| (0..3).map(|r| r as f32 + k).sum::<f32>();
        let mut streams: Vec<_> = (0..Communicator::STREAMS).map(|i| comm.stream(i).unwrap()).collect();
        for round in 0..20u32 {
            let mut requests: Vec<(f32, Pending)> = Vec::new();
            for (i, stream) in streams.iter_mut().enumerate() {
                for k in 0..3 {
                    let count = [1usize, 1000, 70_000][(round as usize + i + k) % 3];
                    let salt = (i * 3 + k) as f32;
                    let mine = bytes_of(&vec![rank as f32 + salt; count]);
                    let buffers = if (i + k) % 2 == 0 {
                        Buffers::HostInPlace(mine)
                    } else {
                        let t = Arc::new(comm.allocate(mine.len() as u64).unwrap());
                        t.write(0, &mine).unwrap();
                        Buffers::in_place(&t)
                    };
                    let r = stream.raw().all_reduce(buffers, count as u64, DataType::Fp32, ReduceOp::Sum);
                    requests.push((sum(salt), r));
                }
            }
            // Ranks wait in different orders: nothing depends on it.
            if rank == 1 {
                requests.reverse();
            }
            // A blocking call in the middle overtakes nothing and waits for nothing of the streams.
            let mut ones = bytes_of(&[1.0; 10]);
            comm.raw().all_reduce(Io::HostInPlace(&mut ones), 10, DataType::Fp32, ReduceOp::Sum).unwrap();
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
        let cases: Vec<(Pending, Vec<f32>)> = vec![
            (s.raw().all_gather(gather, 1, f), vec![0.0, 1.0, 2.0]),
            (s.raw().reduce_scatter(blocks(me), 1, f, ReduceOp::Max), vec![2.0, 0.0, 0.0]),
            (s.raw().broadcast(blocks(me), 3, f, 2), vec![2.0; 3]),
            (s.raw().reduce(blocks(me), 3, f, ReduceOp::Sum, 1), if rank == 1 { vec![3.0; 3] } else { vec![0.0; 3] }),
            (s.raw().all_to_all(blocks(me), 1, f), vec![0.0, 1.0, 2.0]),
            (s.raw().send_recv(blocks(me), 3, f, ring), vec![((rank + 2) % 3) as f32; 3]),
        ];
        for (i, (mut r, expected)) in cases.into_iter().enumerate() {
            let done = loop {
                match r.test() {
                    Progress::Done(buffers) => break buffers,
                    Progress::Failed(failed) => panic!("case {i}: {failed}"),
                    Progress::Running(still) => r = still,
                }
                std::thread::yield_now();
            };
            assert_eq!(values(done), expected, "case {i}");
        }
        s.barrier().wait().unwrap();
        // Ranks leave together.
        comm.barrier().unwrap();
    });
}

/// What is issued and not waited for still happens, and the last rank to wait does not hold the others up.
#[test]
fn a_request_need_not_be_waited_for() {
    world(2, &config(), |mut comm| {
        let mut s = comm.stream(2).unwrap();
        let t = Arc::new(comm.allocate(4000).unwrap());
        t.write(0, &bytes_of(&[1.0; 1000])).unwrap();
        for _ in 0..10 {
            drop(s.raw().all_reduce(Buffers::in_place(&t), 1000, DataType::Fp32, ReduceOp::Sum));
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
    let (failed, read) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    world(2, &config(), move |mut comm| {
        let mut s = comm.stream(1).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            failed.wait();
            let e = s.barrier().wait().unwrap_err().to_string();
            assert!(
                e.contains("failed on rank 1") && e.contains("timed out on rank 0") && e.contains("rank 1 ("),
                "{e}"
            );
            read.wait();
            return;
        }
        s.set_timeout(Duration::from_millis(500));
        let running = s.barrier();
        let Progress::Running(running) = running.wait_for(Duration::from_millis(50)) else {
            panic!("nobody else came")
        };
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
        failed.wait();
        read.wait();
    });
}
