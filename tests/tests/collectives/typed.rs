//! Typed buffers: what each call gives, in device memory and in private memory, blocking and in the background; lengths that do not
//! fit; every element type.

use wccl::error::Error;
use wccl::{Avg, Buffer, BufferMut, Element, Max, Min, Peers, Prod, Progress, Sum, Tensor, bf16, f16};
use wccl::{Communicator, Fp8E3, Fp8E4, Fp8E5, Fp32r};

use crate::common::{config, world};

const N: usize = 3;

/// A buffer of either kind, made and read alike.
trait Made<T>: BufferMut<Element = T> + Buffer<Owned = Self> + Send + Sized + 'static {
    fn of(comm: &Communicator, elements: &[T]) -> Self;
    fn all(&self) -> Vec<T>;
}

impl<T: Element> Made<T> for Vec<T> {
    fn of(_: &Communicator, elements: &[T]) -> Self {
        elements.to_vec()
    }

    fn all(&self) -> Vec<T> {
        self.clone()
    }
}

impl<T: Element> Made<T> for Tensor<T> {
    fn of(comm: &Communicator, elements: &[T]) -> Self {
        comm.tensor_from(elements).unwrap()
    }

    fn all(&self) -> Vec<T> {
        self.to_vec()
    }
}

/// Element `i` of rank `r`.
fn at(r: usize, i: usize) -> i32 {
    (r * 100 + i) as i32
}

fn row(r: usize, len: usize) -> Vec<i32> {
    (0..len).map(|i| at(r, i)).collect()
}

fn summed(len: usize) -> Vec<i32> {
    (0..len).map(|i| (0..N).map(|r| at(r, i)).sum()).collect()
}

/// Every blocking call.
fn blocking<B: Made<i32>>(comm: &mut Communicator) {
    let (rank, root) = (comm.rank(), 1);
    let made = |comm: &Communicator, elements: &[i32]| B::of(comm, elements);
    let mine = row(rank, 6);
    let x = made(comm, &mine);

    let mut y = made(comm, &mine);
    comm.all_reduce(&mut y, Sum).unwrap();
    assert_eq!(y.all(), summed(6));
    comm.all_reduce_into(&x, &mut y, Max).unwrap();
    assert_eq!(y.all(), row(N - 1, 6));
    assert_eq!(x.all(), mine);
    let mut many: Vec<B> = (0..3).map(|i| made(comm, &row(rank, i * 2))).collect();
    comm.all_reduce_many(&mut many, Sum).unwrap();
    assert_eq!(many.iter().map(B::all).collect::<Vec<_>>(), [summed(0), summed(2), summed(4)]);

    assert_eq!(comm.reduce_scatter(&x, Sum).unwrap().all(), summed(6)[rank * 2..rank * 2 + 2]);
    let mut part = made(comm, &[0; 2]);
    comm.reduce_scatter_into(&x, &mut part, Min).unwrap();
    assert_eq!(part.all(), row(0, 6)[rank * 2..rank * 2 + 2]);
    let counts = [1, 0, 5];
    let begins = [0, 1, 1][rank];
    let want = &summed(6)[begins..begins + counts[rank] as usize];
    assert_eq!(comm.reduce_scatter_v(&x, &counts, Sum).unwrap().all(), want);

    let gathered: Vec<i32> = (0..N).flat_map(|r| row(r, 6)).collect();
    assert_eq!(comm.all_gather(&x).unwrap().all(), gathered);
    let mut whole = made(comm, &[0; 18]);
    comm.all_gather_into(&x, &mut whole).unwrap();
    assert_eq!(whole.all(), gathered);
    let ragged = made(comm, &row(rank, counts[rank] as usize));
    let want: Vec<i32> = (0..N).flat_map(|r| row(r, counts[r] as usize)).collect();
    assert_eq!(comm.all_gather_v(&ragged, &counts).unwrap().all(), want);

    let mut b = made(comm, &mine);
    comm.broadcast(&mut b, root).unwrap();
    assert_eq!(b.all(), row(root, 6));
    let mut r = made(comm, &mine);
    comm.reduce(&mut r, Sum, root).unwrap();
    assert_eq!(r.all(), if rank == root { summed(6) } else { mine.clone() });

    let at_root = comm.gather(&x, root).unwrap().map(|all| all.all());
    assert_eq!(at_root, (rank == root).then(|| gathered.clone()));
    let mut whole = (rank == root).then(|| made(comm, &[0; 18]));
    comm.gather_into(&x, whole.as_mut(), root).unwrap();
    assert_eq!(whole.map(|w| w.all()), at_root);
    let wide = (rank == root).then(|| made(comm, &gathered));
    let mut mine_again = made(comm, &[0; 6]);
    comm.scatter(wide.as_ref(), &mut mine_again, root).unwrap();
    assert_eq!(mine_again.all(), mine);

    let want: Vec<i32> = (0..N).flat_map(|r| row(r, 6)[rank * 2..rank * 2 + 2].to_vec()).collect();
    assert_eq!(comm.all_to_all(&x).unwrap().all(), want);
    let mut y = made(comm, &[0; 6]);
    comm.all_to_all_into(&x, &mut y).unwrap();
    assert_eq!(y.all(), want);
    // Rank r sends r + 1 elements to the next one.
    let next = (rank + 1) % N;
    let before = (rank + N - 1) % N;
    let (mut send, mut recv) = ([0; N], [0; N]);
    (send[next], recv[before]) = (rank as u64 + 1, before as u64 + 1);
    let some = made(comm, &row(rank, rank + 1));
    assert_eq!(comm.all_to_all_v(&some, &send, &recv).unwrap().all(), row(before, before + 1));

    let mut got = made(comm, &[0; 6]);
    comm.send_recv(&x, &mut got, Peers { dst: Some(next), src: Some(before) }).unwrap();
    assert_eq!(got.all(), row(before, 6));
    let mut got = made(comm, &[-1; 6]);
    comm.permute(&x, &mut got, &[(0, 2)]).unwrap();
    assert_eq!(got.all(), if rank == 2 { row(0, 6) } else { vec![-1; 6] });
    comm.barrier().unwrap();
}

/// The same in the background: what was handed over comes back.
fn streamed<B: Made<i32>>(comm: &Communicator, s: &mut wccl::Stream) {
    let (rank, root) = (comm.rank(), 2);
    let made = |elements: &[i32]| B::of(comm, elements);
    let mine = row(rank, 6);
    let next = (rank + 1) % N;
    let before = (rank + N - 1) % N;
    // All are on their way before the first one is waited for.
    let reduced = s.all_reduce(made(&mine), Sum);
    let into = s.all_reduce_into(made(&mine), made(&[0; 6]), Max);
    let many = s.all_reduce_many(vec![made(&mine), made(&mine[..1])], Sum);
    let part = s.reduce_scatter(made(&mine), made(&[0; 2]), Sum);
    let all = s.all_gather(made(&mine), made(&[0; 18]));
    let cast = s.broadcast(made(&mine), root);
    let at_root = s.reduce(made(&mine), Sum, root);
    let exchanged = s.all_to_all(made(&mine), made(&[0; 6]));
    let sent = s.send_recv(made(&mine), made(&[0; 6]), Peers { dst: Some(next), src: Some(before) });
    let permuted = s.permute(made(&mine), made(&[-1; 6]), &[(0, 2)]);
    let gathered = s.gather(made(&mine), (rank == root).then(|| made(&[0; 18])), root);
    let whole: Vec<i32> = (0..N).flat_map(|r| row(r, 6)).collect();
    let scattered = s.scatter((rank == root).then(|| made(&whole)), made(&[0; 6]), root);
    let counts = [2u64, 0, 1];
    let ragged = s.all_gather_v(made(&row(rank, counts[rank] as usize)), made(&[0; 3]), &counts);
    let parts = s.reduce_scatter_v(made(&row(rank, 3)), made(&vec![0; counts[rank] as usize]), &counts, Sum);
    let (mut send, mut recv) = ([0; N], [0; N]);
    (send[next], recv[before]) = (2, 2);
    let moved = s.all_to_all_v(made(&row(rank, 2)), made(&[0; 2]), &send, &recv);
    s.barrier().wait().unwrap();

    assert_eq!(reduced.wait().unwrap().all(), summed(6));
    let (x, y) = into.wait().unwrap();
    assert_eq!((x.all(), y.all()), (mine.clone(), row(N - 1, 6)));
    assert_eq!(many.wait().unwrap().iter().map(B::all).collect::<Vec<_>>(), [summed(6), summed(1)]);
    assert_eq!(part.wait().unwrap().1.all(), summed(6)[rank * 2..rank * 2 + 2]);
    assert_eq!(all.wait().unwrap().1.all(), whole);
    assert_eq!(cast.wait().unwrap().all(), row(root, 6));
    assert_eq!(at_root.wait().unwrap().all(), if rank == root { summed(6) } else { mine.clone() });
    let blocks: Vec<i32> = (0..N).flat_map(|r| row(r, 6)[rank * 2..rank * 2 + 2].to_vec()).collect();
    assert_eq!(exchanged.wait().unwrap().1.all(), blocks);
    assert_eq!(sent.wait().unwrap().1.all(), row(before, 6));
    assert_eq!(permuted.wait().unwrap().1.all(), if rank == 2 { row(0, 6) } else { vec![-1; 6] });
    assert_eq!(gathered.wait().unwrap().1.map(|w| w.all()), (rank == root).then_some(whole));
    assert_eq!(scattered.wait().unwrap().1.all(), mine);
    assert_eq!(ragged.wait().unwrap().1.all(), [at(0, 0), at(0, 1), at(2, 0)]);
    let begins = [0, 2, 2][rank];
    assert_eq!(parts.wait().unwrap().1.all(), summed(3)[begins..begins + counts[rank] as usize]);
    assert_eq!(moved.wait().unwrap().1.all(), row(before, 2));
}

#[test]
fn each_call_gives_what_it_should_in_both_memories_and_in_the_background() {
    world(N, &config(), |mut comm| {
        blocking::<Vec<i32>>(&mut comm);
        blocking::<Tensor<i32>>(&mut comm);
        let mut s = comm.stream(0).unwrap();
        streamed::<Vec<i32>>(&comm, &mut s);
        streamed::<Tensor<i32>>(&comm, &mut s);
        comm.barrier().unwrap();
    });
}

/// One element of each rank, in every type, with a scale where there is one; slices and arrays serve as well as vectors.
#[test]
fn every_element_type_is_reduced_as_what_it_is() {
    fn check<T: Element>(comm: &mut Communicator, of: impl Fn(f32) -> T, scales: bool) {
        let mine = of((comm.rank() + 1) as f32);
        let mut array = [mine; 5];
        comm.all_reduce(&mut array, Sum).unwrap();
        assert_eq!(array, [of(3.0); 5], "{}", T::TYPE);
        let mut tensor = comm.tensor_from(&[mine; 5]).unwrap();
        comm.all_reduce(&mut tensor, Prod).unwrap();
        assert_eq!(tensor.to_vec(), [of(2.0); 5], "{}", T::TYPE);
        let mut more = [mine; 5];
        comm.all_reduce(&mut more[1..], Avg).unwrap();
        assert_eq!((more[0], more[4]), (mine, of(1.5)), "{}", T::TYPE);
        let scaled = comm.all_reduce_scaled(&mut array, 2.0);
        match scales {
            true => assert_eq!((scaled.unwrap(), array), ((), [of(12.0); 5]), "{}", T::TYPE),
            false => assert!(matches!(scaled, Err(Error::Usage(_))), "{}", T::TYPE),
        }
    }
    world(2, &config(), |mut comm| {
        let comm = &mut comm;
        check(comm, |v| v as u64, false);
        check(comm, |v| v as i64, false);
        check(comm, |v| v as u32, false);
        check(comm, |v| v as i32, false);
        check(comm, |v| v as u16, false);
        check(comm, |v| v as i16, false);
        check(comm, |v| v as u8, false);
        check(comm, |v| v as i8, false);
        check(comm, |v| v, true);
        check(comm, Fp32r, true);
        check(comm, f16::from_f32, true);
        check(comm, bf16::from_f32, true);
        check(comm, Fp8E3::from_f32, true);
        check(comm, Fp8E4::from_f32, true);
        check(comm, Fp8E5::from_f32, true);
        comm.barrier().unwrap();
    });
}

/// A length that does not fit is told with what it should be, before anything moves; the communicator goes on. What is handed to a
/// stream comes back with the error.
#[test]
fn lengths_that_do_not_fit_are_refused_with_both_and_nothing_is_lost() {
    world(2, &config(), |mut comm| {
        let rank = comm.rank();
        let x = [1i32; 5];
        let mut y = [0i32; 4];
        let refused = |r: Result<(), Error>, says: &[&str]| {
            let Err(Error::Usage(e)) = r else { panic!("{r:?}") };
            assert!(says.iter().all(|s| e.contains(s)), "{e}");
        };
        let output = format!("the output of all_reduce on rank {rank} has 4 elements, 5 are needed");
        refused(comm.all_reduce_into(&x, &mut y, Sum), &[&output, "the input says so"]);
        refused(
            comm.reduce_scatter(&x, Sum).map(drop),
            &["the input of reduce_scatter has 5 elements", "each of 2 ranks"],
        );
        refused(comm.all_to_all(&x).map(drop), &["the input of all_to_all has 5 elements"]);
        refused(comm.all_gather_into(&x, &mut y), &["the output of all_gather", "has 4 elements, 10 are needed"]);
        refused(
            comm.all_gather_v(&x, &[1, 1]).map(drop),
            &["has 5 elements, 1 are needed: the list of counts says so"],
        );
        refused(
            comm.all_to_all_v(&x, &[1, 1], &[1, 1]).map(drop),
            &["has 5 elements, 2 are needed: the list of sends"],
        );
        if rank == 0 {
            refused(comm.gather_into(&x, None::<&mut [i32; 10]>, 0), &["rank 0 is the root and has no output"]);
            refused(comm.scatter(None::<&[i32; 8]>, &mut y, 0), &["rank 0 is the root and has no input"]);
        }
        let t = comm.tensor_from(&x).unwrap();
        let e = t.write(3, &[0; 3]).unwrap_err().to_string();
        assert!(e.contains("3 elements from element 3 on are not inside a tensor of 5"), "{e}");
        assert!(comm.tensor::<u64>(usize::MAX).unwrap_err().to_string().contains("larger than memory can be"));
        let mut s = comm.stream(0).unwrap();
        let failed = s.all_reduce_into(x, y, Sum).wait().unwrap_err();
        assert_eq!(failed.buffers, (x, y));
        assert!(failed.to_string().contains(&output));
        // A caller that is not interested in them has the error alone.
        let alone = |p: wccl::Pending<_>| -> Result<_, Error> { Ok(p.wait()?) };
        assert!(matches!(alone(s.all_reduce_into(x, y, Sum)), Err(Error::Usage(_))));
        let mut pending = s.all_reduce(vec![rank as i32; 3], Sum);
        let done = loop {
            match pending.test() {
                Progress::Done(x) => break x,
                Progress::Failed(failed) => panic!("{failed}"),
                Progress::Running(still) => pending = still,
            }
            std::thread::yield_now();
        };
        assert_eq!(done, [1; 3]);
        comm.barrier().unwrap();
    });
}

/// What a stream was given when its thread is gone is not lost.
#[test]
fn an_aborted_operation_gives_its_buffers_back() {
    world(2, &config(), |mut comm| {
        let mut s = comm.stream(0).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            let pending = s.all_reduce(vec![7u8; 4], Sum);
            comm.abort_token().abort("enough");
            let failed = pending.wait().unwrap_err();
            assert_eq!(failed.buffers, [7; 4]);
            assert!(failed.to_string().contains("enough"), "{failed}");
        }
    });
}

/// A rank that has done its part leaves, however far behind the others are: whatever the last operation was, they still end it.
#[test]
fn a_rank_that_is_done_leaves_without_a_closing_barrier() {
    type Last = fn(&mut Communicator, usize) -> Result<(), Error>;
    const LAST: [(&str, Last); 9] = [
        ("all_reduce", |c, len| c.all_reduce(&mut vec![1u32; len], Sum)),
        ("all_reduce in device memory", |c, len| {
            let mut x = c.tensor_from(&vec![1u32; len])?;
            c.all_reduce(&mut x, Sum)
        }),
        ("broadcast", |c, len| c.broadcast(&mut vec![1u32; len], 0)),
        ("reduce", |c, len| c.reduce(&mut vec![1u32; len], Sum, 0)),
        ("all_gather", |c, len| c.all_gather(&vec![1u32; len]).map(drop)),
        ("all_gather in device memory", |c, len| {
            let x = c.tensor_from(&vec![1u32; len])?;
            c.all_gather(&x).map(drop)
        }),
        ("gather", |c, len| c.gather(&vec![1u32; len], 1).map(drop)),
        ("all_to_all", |c, len| c.all_to_all(&vec![1u32; len * c.nranks()]).map(drop)),
        ("barrier", |c, _| c.barrier()),
    ];
    for n in [2, 4] {
        for (name, last) in LAST {
            for len in [1, 100_000] {
                for late in [0, n - 1] {
                    world(n, &config(), move |mut comm| {
                        // All are connected, so that the last operation is no first one.
                        comm.all_reduce(&mut [1u32; 3], Sum).unwrap();
                        if comm.rank() == late {
                            // Until nobody can go on without it.
                            std::thread::sleep(std::time::Duration::from_millis(15));
                        }
                        let rank = comm.rank();
                        last(&mut comm, len)
                            .unwrap_or_else(|e| panic!("{name}, {len} elements, rank {rank} of {n}: {e}"));
                    });
                }
            }
        }
    }
}
