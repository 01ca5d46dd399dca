//! Communicators of some of a communicator's ranks: replica groups and their pool, split, shrink after a failure.

use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use sandbox::status::Status;
use tests::zoo;
use wccl::error::{Error, PluginError};
use wccl::groups::{Group, GroupOptions, Program, ProgramOp, ReplicaGroups, Signature};
use wccl::{CommOptions, Communicator, DataType, DeviceMemory, Io, ReduceOp, Runtime, RuntimeConfig};

use crate::common::ranks::{Rank, start};
use crate::common::{HANG, bytes_of, config, plugin_file, values_of, world};

/// Sums the ranks of the parent over `comm`, in a tensor of whatever communicator; answers the sum.
fn sum_of(comm: &mut Communicator, t: &DeviceMemory, mine: usize) -> f32 {
    t.write(0, &bytes_of(&[mine as f32; 16])).unwrap();
    comm.raw().all_reduce(Io::in_place(t), 16, DataType::Fp32, ReduceOp::Sum).unwrap();
    let mut out = [0; 64];
    t.read(0, &mut out).unwrap();
    let values = values_of(&out);
    assert!(values.iter().all(|v| *v == values[0]));
    values[0]
}

/// A program of one all-reduce in one group.
fn program(rank: usize, participants: &[usize], size: u64) -> Signature {
    let participants: Vec<u32> = participants.iter().map(|p| *p as u32).collect();
    Program::new(rank as u32).replica_group(&participants, &[ProgramOp::Other { op: 1, size, word: 0 }]).finish()
}

/// Proves INV-28, INV-29.
#[test]
fn replica_groups_are_pooled_by_their_bootstrap_participants() {
    world(4, &config(), |mut comm| {
        let (rank, t) = (comm.rank(), comm.allocate(64).unwrap());
        let groups = ReplicaGroups::new(&[vec![0, 1], vec![2, 3]], 4, rank).unwrap();
        let group = groups.mine();
        let sig = program(rank, &group.participants, 16);
        let first = comm.replica_group(&group, &sig, GroupOptions::default()).unwrap();
        let expected = if rank < 2 { 1.0 } else { 5.0 };
        assert_eq!(sum_of(&mut first.lock(), &t, rank), expected);
        // The key is the list of participants, u32 each.
        let (low, high) = (rank as u8 & 2, rank as u8 | 1);
        assert_eq!(first.key(), [low, 0, 0, 0, high, 0, 0, 0]);

        // The same list again: no call of the library, the same communicator, whatever the program.
        let calls = comm.runtime().component_calls();
        let again = comm.replica_group(&group, &program(rank, &[], 999), GroupOptions::default()).unwrap();
        assert!(again.same(&first) && first.handles() == 2);
        // Other participants, the same bootstrap participants: the same one too.
        let layout = Group { participants: vec![0, 1, 2, 3], bootstrap_participants: group.participants.clone() };
        assert!(comm.replica_group(&layout, &sig, GroupOptions::default()).unwrap().same(&first));
        assert_eq!(comm.runtime().component_calls(), calls);
        assert_eq!(comm.pooled(), 1);

        // The same ranks in another order: another communicator, with other ranks.
        let turned = Group::of(vec![usize::from(high), usize::from(low)]);
        let second = comm.replica_group(&turned, &sig, GroupOptions { stream: 3, graph: true }).unwrap();
        assert!(!second.same(&first));
        assert_eq!((first.lock().rank(), second.lock().rank()), (rank % 2, 1 - rank % 2));
        assert_eq!((first.stream(), second.stream(), second.group_id()), (0, 3, 1));
        assert_eq!(sum_of(&mut second.lock(), &t, rank), expected);
        assert_eq!((comm.pooled(), comm.runtime().tenant().communicators()), (2, 3));

        // The last handle frees it; the parent goes on.
        drop((first, again, second));
        assert_eq!((comm.pooled(), comm.runtime().tenant().communicators()), (0, 1));
        assert_eq!(sum_of(&mut comm, &t, rank), 6.0);
    });
}

/// A communicator made without its graph gets it from the request that wants it.
///
/// Proves INV-28.
#[test]
fn a_hit_builds_the_graph_that_is_now_wanted() {
    world(2, &config(), |comm| {
        let (rank, t) = (comm.rank(), comm.allocate(64).unwrap());
        let (group, sig) = (Group::of([1, 0]), program(rank, &[1, 0], 16));
        let bare = comm.replica_group(&group, &sig, GroupOptions { stream: 0, graph: false }).unwrap();
        let e = bare.lock().barrier().unwrap_err().to_string();
        assert!(e.contains("build_graph"), "{e}");
        let built = comm.replica_group(&group, &sig, GroupOptions::default()).unwrap();
        assert!(built.same(&bare));
        assert_eq!(sum_of(&mut bare.lock(), &t, rank), 1.0);
    });
}

/// One rank with another program: all of the group are told which two differ, nobody has called InitComm, and the next group
/// is made as if nothing had been.
///
/// Proves INV-29.
#[test]
fn programs_that_differ_are_refused_on_every_rank() {
    world(4, &config(), |comm| {
        let (rank, t) = (comm.rank(), comm.allocate(64).unwrap());
        let group = Group::of([0, 1, 2, 3]);
        let counters = &comm.runtime().tenant().counters;
        let (entries, tasks) = (counters.entries(), counters.tasks());
        let size = if rank == 3 { 17 } else { 16 };
        let e = comm.replica_group(&group, &program(rank, &[0, 1, 2, 3], size), GroupOptions::default()).unwrap_err();
        let text = e.to_string();
        assert!(
            text.starts_with("[gid: 0] failed signature validation: mismatched collectives between the peers: ")
                && text.contains("rank 1 and rank 3 of [0, 1, 2, 3] differ")
                && text.contains(&format!("rank {rank} has 1 operations in 1 groups or sets of pairs")),
            "{text}"
        );
        assert_eq!(e.status(), Status::INVALID);
        // Bootstrap messages alone crossed the boundary: up and down, sent and received.
        let messages = [4, 3, 3, 2][rank];
        assert_eq!(counters.entries() - entries, messages, "rank {rank}: no InitComm, no id");
        assert_eq!((counters.tasks(), comm.runtime().tenant().communicators()), (tasks, 1));
        let made = comm.replica_group(&group, &program(rank, &[0, 1, 2, 3], 16), GroupOptions::default()).unwrap();
        assert_eq!(sum_of(&mut made.lock(), &t, rank), 6.0);
    });
}

/// Ranks whose bootstrap waits 4 s, and a point at which all of them meet.
fn impatient(n: usize) -> (RuntimeConfig, Arc<Barrier>) {
    let mut c = config();
    c.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "4000".into());
    (c, Arc::new(Barrier::new(n)))
}

/// Rank 0 waits for rank 1, which waits for rank 3, which does not come: all name rank 3.
///
/// Proves INV-29.
#[test]
fn a_rank_that_nobody_but_its_parent_waits_for_is_named_by_all() {
    let (c, done) = impatient(4);
    world(4, &c, move |comm| {
        let rank = comm.rank();
        if rank != 3 {
            let group = Group::of([0, 1, 2, 3]);
            let refused = comm.replica_group(&group, &program(rank, &[0, 1, 2, 3], 16), GroupOptions::default());
            let text = refused.unwrap_err().to_string();
            assert!(
                text.contains("rank 3 of [0, 1, 2, 3] did not take part, rank 1 waited for it"),
                "rank {rank}: {text}"
            );
        }
        done.wait();
    });
}

/// In the exchange of a split each rank waits for the one before it: all name the one that does not come.
#[test]
fn a_rank_that_does_not_split_is_named_by_all() {
    let (c, done) = impatient(4);
    world(4, &c, move |comm| {
        let rank = comm.rank();
        if rank != 2 {
            let text = comm.split(Some(0), 0).unwrap_err().to_string();
            assert!(text.contains("rank 2 sent nothing"), "rank {rank}: {text}");
        }
        done.wait();
    });
}

/// Both ends of a pair make a communicator: one sends, the other receives.
///
/// Proves INV-31.
#[test]
fn a_sender_and_its_receiver_agree() {
    world(2, &config(), |comm| {
        let rank = comm.rank();
        let op = [ProgramOp::Send { size: 8, channel: 1 }, ProgramOp::Recv { size: 8 }][rank];
        let sig = Program::new(rank as u32).pairs(&[(0, 1)], &[op]).replica_group(&[0, 1], &[op]).finish();
        let made = comm.replica_group(&Group::of([0, 1]), &sig, GroupOptions::default()).unwrap();
        made.lock().barrier().unwrap();
    });
}

#[test]
fn wrong_groups_are_refused_before_anything_is_sent() {
    world(2, &config(), |mut comm| {
        let sig = Program::new(0).finish();
        let calls = comm.runtime().component_calls();
        let refuse = |group: &Group, o| comm.replica_group(group, &sig, o).unwrap_err().to_string();
        let other = Group::of([1 - comm.rank()]);
        let e = refuse(&other, GroupOptions::default());
        assert!(e.contains("replica groups does not have myself"), "{e}");
        assert!(refuse(&Group::of([0, 1, 2]), GroupOptions::default()).contains("participants [0, 1, 2]: rank 2"));
        assert!(refuse(&Group::of([0, 1, 0]), GroupOptions::default()).contains("listed twice"));
        assert!(refuse(&Group::of([0, 1]), GroupOptions { stream: 4, graph: true }).contains("stream 4"));
        for (excluded, said) in [(vec![2], "rank 2 is not one"), (vec![comm.rank()], "must not call it")] {
            let e = comm.shrink(&excluded).unwrap_err().to_string();
            assert!(e.contains(said), "{e}");
        }
        let twice = comm.shrink(&[1 - comm.rank(), 1 - comm.rank()]).unwrap_err().to_string();
        assert!(twice.contains("listed twice"), "{twice}");
        assert_eq!(comm.runtime().component_calls(), calls);
        comm.barrier().unwrap();
    });
}

#[test]
fn split_by_colour_and_key() {
    world(5, &config(), |mut comm| {
        let (rank, t) = (comm.rank(), comm.allocate(64).unwrap());
        // 0 and 2 and 4 in one, backwards; 1 and 3 in the other; then 4 takes no part.
        let mut half = comm.split(Some(rank as u32 % 2), -(rank as i32)).unwrap().unwrap();
        let (place, n, sum) = [(2, 3, 6.0), (1, 2, 4.0), (1, 3, 6.0), (0, 2, 4.0), (0, 3, 6.0)][rank];
        assert_eq!((half.rank(), half.nranks()), (place, n), "rank {rank}");
        assert_eq!(sum_of(&mut half, &t, rank), sum);
        let some = comm.split((rank < 4).then_some(9), 0).unwrap();
        assert_eq!(some.is_some(), rank < 4);
        if let Some(mut some) = some {
            assert_eq!((some.rank(), some.nranks()), (rank, 4));
            assert_eq!(sum_of(&mut some, &t, rank), 6.0);
            // A part of a part, and one alone.
            let mut alone = some.split(Some(rank as u32), 0).unwrap().unwrap();
            assert_eq!(alone.nranks(), 1);
            assert_eq!(sum_of(&mut alone, &t, rank), rank as f32);
        }
        // All of them still work, in any order that is the same everywhere.
        assert_eq!(sum_of(&mut half, &t, rank), sum);
        assert_eq!(sum_of(&mut comm, &t, rank), 10.0);
    });
}

/// Ranks on several accelerators: a part on one of them does not take the others from the whole, and a part whose
/// accelerators the library cannot use is told which would do.
#[test]
fn parts_over_several_accelerators() {
    world(16, &config(), |mut comm| {
        let (rank, t) = (comm.rank(), comm.allocate(64).unwrap());
        let mut near = comm.split(Some(rank as u32 / 4), 0).unwrap().unwrap();
        assert_eq!(near.logical_core(), comm.logical_core());
        assert_eq!(sum_of(&mut near, &t, rank), (rank / 4 * 16 + 6) as f32);
        // The whole connects every pair only now, with its own maps.
        let (src, mut dst) = ([rank as u8; 16 * 64], [0u8; 16 * 64]);
        comm.raw().all_to_all(Io::Host { src: &src, dst: &mut dst }, 64, DataType::Uint8).unwrap();
        assert!(dst.chunks(64).enumerate().all(|(r, b)| b == [r as u8; 64]));
        let mut across = comm.split(Some(rank as u32 % 4), 0).unwrap().unwrap();
        assert_eq!(sum_of(&mut across, &t, rank), (rank % 4 * 4 + 24) as f32);
        let e = comm.split(Some(rank as u32 / 8), 0).unwrap_err();
        let text = e.to_string();
        assert!(
            matches!(e, Error::Group { .. })
                && text.contains("expects 1, 4, 8, or 16 local devices but got 2")
                && text.contains("CCOM_DBG_DISABLE_VERIFY_TOPOLOGY"),
            "{text}"
        );
        assert_eq!(sum_of(&mut comm, &t, rank), 120.0);
    });
}

/// A rank leaves, the operation fails, the others go on without it; twice. The first time it leaves before the first operation
/// has connected all pairs, so that the bootstrap is cut in the middle of an exchange, with messages that nobody fetches.
#[test]
fn survivors_shrink_and_shrink_again() {
    world(5, &config(), |mut comm| {
        let (rank, t) = (comm.rank(), comm.allocate(1 << 16).unwrap());
        if rank == 2 {
            return;
        }
        while comm.raw().all_reduce(Io::in_place(&t), 1 << 14, DataType::Fp32, ReduceOp::Max).is_ok() {}
        let mut four = comm.shrink(&[2]).unwrap();
        // The broken one may go at once.
        drop(comm);
        let place = rank - usize::from(rank > 2);
        assert_eq!((four.rank(), four.nranks()), (place, 4));
        assert_eq!(sum_of(&mut four, &t, rank), 8.0);
        let half = four.split(Some(place as u32 % 2), 0).unwrap().unwrap();
        assert_eq!(half.nranks(), 2);
        drop(half);
        if place == 0 {
            return;
        }
        while four.barrier().is_ok() {}
        let mut three = four.shrink(&[0]).unwrap();
        assert_eq!((three.rank(), three.nranks()), (place - 1, 3));
        assert_eq!(sum_of(&mut three, &t, rank), 8.0);
        if place == 3 {
            let token = three.abort_token().clone();
            token.abort("enough");
        }
        // Down to one.
        if place == 1 {
            while three.barrier().is_ok() {}
            let mut one = three.shrink(&[1, 2]).unwrap();
            assert_eq!(sum_of(&mut one, &t, rank), rank as f32);
        } else {
            let _ = three.barrier();
        }
    });
}

/// Nothing needs to be broken for a shrink: the rest goes on beside the whole.
#[test]
fn a_shrink_of_a_sound_communicator_leaves_it_sound() {
    world(3, &config(), |mut comm| {
        let (rank, t) = (comm.rank(), comm.allocate(64).unwrap());
        for _ in 0..3 {
            if rank != 1 {
                let mut two = comm.shrink(&[1]).unwrap();
                assert_eq!(sum_of(&mut two, &t, rank), 2.0);
            }
            assert_eq!(sum_of(&mut comm, &t, rank), 3.0);
        }
    });
}

/// The library has stopped on every rank and one rank has aborted: what a split needs is gone, what a shrink needs is not.
#[test]
fn a_shrink_needs_neither_the_library_nor_the_bootstrap() {
    let core = zoo::built("nccom.core.wasm").unwrap();
    let trap = [("neuron:nccom/collectives#neuron-get-peer-device-id", "unreachable")];
    let file = plugin_file("stops-before-a-shrink", &zoo::described(&zoo::rewrite(&core, &trap).unwrap()).unwrap());
    let mut c = config();
    c.plugin = Some(file.path().into());
    c.limits.restart_pause = Duration::from_secs(30);
    world(3, &c, |comm| {
        let (rank, t) = (comm.rank(), comm.allocate(64).unwrap());
        comm.peer_device_id(0).unwrap_err();
        assert!(comm.control_stopped().is_some());
        assert!(matches!(comm.split(Some(0), 0), Err(Error::Plugin(PluginError::Supervised { .. }))));
        let refused = comm.replica_group(&Group::of([0, 1, 2]), &program(rank, &[], 1), GroupOptions::default());
        let e = refused.unwrap_err().to_string();
        assert!(e.contains("makes no more groups since one of them failed"), "{e}");
        if rank == 0 {
            comm.abort_token().abort("the library has stopped");
        }
        if rank != 1 {
            let mut two = comm.shrink(&[1]).unwrap();
            assert_eq!(sum_of(&mut two, &t, rank), 2.0);
        }
    });
}

/// Survivors that disagree about who is excluded: both are told, nobody waits.
#[test]
fn survivors_with_different_lists_are_told() {
    let begun = Instant::now();
    let texts = world(4, &patient(), |comm| {
        let excluded: &[usize] = match comm.rank() {
            3 => return String::new(),
            2 => &[1, 3],
            _ => &[3],
        };
        comm.shrink(excluded).unwrap_err().to_string()
    });
    for (r, said) in [
        (0, "rank 2 of [0, 1, 2] did not take part, rank 0 waited for it: rank 2 excludes other ranks than rank 0"),
        (1, "rank 2 of [0, 1, 2] did not take part, rank 0 waited for it: rank 2 excludes other ranks than rank 0"),
        (2, "rank 0 of [0, 2] did not take part, rank 2 waited for it: rank 0 excludes other ranks than rank 2"),
    ] {
        assert!(texts[r].contains(said), "rank {r}: {}", texts[r]);
    }
    assert!(begun.elapsed() < HANG, "nobody waits for the deadline");
}

/// A configuration whose deadlines are later than [`HANG`]: what ends before that has not waited for one.
fn patient() -> RuntimeConfig {
    let mut c = RuntimeConfig { timeout: Duration::from_secs(600), ..config() };
    c.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "600000".into());
    c
}

/// Ranks that are all in the group, and in its operations unless they are to shrink at once. Their deadlines are as in
/// [`patient`].
fn start_shrink(n: usize, vars: &[(&str, &str)]) -> Vec<Rank> {
    let deadlines = [("NEURON_CCOM_SOCK_TIMEOUT", "600000"), ("WCCL_TIMEOUT_MS", "600000")];
    let ranks = start("shrink", n, &[&deadlines, vars].concat());
    for (r, rank) in ranks.iter().enumerate() {
        assert_eq!(rank.line(), "ready", "rank {r}");
        if !vars.iter().any(|v| v.0 == "AT_ONCE") {
            assert_eq!(rank.line(), "running", "rank {r}");
        }
    }
    ranks
}

#[test]
fn the_others_go_on_after_a_rank_was_killed() {
    let mut ranks = start_shrink(4, &[("EXCLUDE", "2")]);
    ranks[2].kill();
    for (r, said) in [(0, "rank 0 of 3 sum 3"), (1, "rank 1 of 3 sum 3"), (3, "rank 2 of 3 sum 3")] {
        assert_eq!((ranks[r].line().as_str(), ranks[r].line().as_str()), ("broken", said), "rank {r}");
        assert!(ranks[r].child.wait().unwrap().success());
    }
}

/// An excluded rank that exits at once is neither waited for nor read (NVIDIA/nccl#2397).
#[test]
fn an_excluded_rank_that_exits_at_once_does_not_matter() {
    let ranks = start_shrink(4, &[("EXCLUDE", "3"), ("LEAVES", "3"), ("AT_ONCE", "1")]);
    for (r, rank) in ranks[..3].iter().enumerate() {
        assert_eq!(rank.line(), format!("rank {r} of 3 sum 3"));
    }
}

/// A second rank dies before the shrink: its name is the error, at once, and a list with both leads on.
#[test]
fn a_further_death_is_named_and_can_be_excluded_too() {
    for victim in [0usize, 2] {
        let exclude = format!("3;3,{victim}");
        let mut ranks = start_shrink(4, &[("EXCLUDE", &exclude)]);
        ranks[victim].kill();
        ranks[3].kill();
        for (place, r) in (0..3).filter(|r| *r != victim).enumerate() {
            assert_eq!(ranks[r].line(), "broken", "rank {r}");
            let said = ranks[r].line();
            let named = format!("rank {victim} of [0, 1, 2] did not take part");
            assert!(said.contains("shrink without [3]") && said.contains(&named), "rank {r}: {said}");
            assert!(said.contains(&format!("rank {victim} is gone")), "rank {r}: {said}");
            assert_eq!(ranks[r].line(), format!("rank {place} of 2 sum 2"));
        }
    }
}

/// A child that a rank forked, and that runs no other program, holds the rank's sockets: its death is noticed at once all the same.
#[test]
fn the_death_of_a_rank_that_has_forked_is_noticed() {
    let mut ranks = start_shrink(4, &[("EXCLUDE", "3;2,3"), ("FORKS", "2")]);
    let child = ranks[2].line();
    ranks[2].kill();
    ranks[3].kill();
    for r in [0, 1] {
        assert_eq!(ranks[r].line(), "broken", "rank {r}");
        let said = ranks[r].line();
        assert!(said.contains("rank 2 of [0, 1, 2] did not take part"), "rank {r}: {said}");
        assert!(said.contains("rank 2 is gone"), "rank {r}: {said}");
        assert_eq!(ranks[r].line(), format!("rank {r} of 2 sum 2"));
    }
    let child = child.strip_prefix("child ").unwrap();
    assert!(Command::new("kill").args(["-9", child]).status().unwrap().success(), "it lived all the time");
}

/// A rank dies while it waits in the shrink for one that is late: the two that are left hear its name.
#[test]
fn a_death_in_the_middle_of_a_shrink_is_named() {
    let dead = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("dead-{}", std::process::id()));
    let _ = std::fs::remove_file(&dead);
    let late = [("EXCLUDE", "3;2,3"), ("LATE", "1"), ("UNTIL", dead.to_str().unwrap())];
    let mut ranks = start_shrink(4, &late);
    ranks[3].kill();
    for r in [0, 1, 2] {
        assert_eq!(ranks[r].line(), "broken", "rank {r}");
    }
    // Rank 2 is in the shrink by then, most likely, or dies before it; rank 1 comes when it is dead.
    std::thread::sleep(Duration::from_millis(500));
    ranks[2].kill();
    std::fs::write(&dead, "").unwrap();
    for r in [0, 1] {
        let said = ranks[r].line();
        assert!(said.contains("rank 2 of [0, 1, 2] did not take part"), "rank {r}: {said}");
        assert_eq!(ranks[r].line(), format!("rank {r} of 2 sum 2"));
    }
    std::fs::remove_file(&dead).unwrap();
}

/// What a rank that joins by a used id is told, without waiting for a root that will not come.
fn refused(runtime: &Runtime, id: [u8; 128], rank: usize) -> String {
    let (runtime, (tell, told)) = (runtime.clone(), std::sync::mpsc::channel());
    std::thread::spawn(move || {
        // Whoever asked may have given up.
        let _ = tell.send(runtime.init_comm(CommOptions::with_id(id, rank, 2)).map(|_| ()));
    });
    let answer = told.recv_timeout(Duration::from_secs(120)).expect("an answer long before the start-up time is over");
    answer.unwrap_err().to_string()
}

/// By the rank that joined, by another rank of that runtime, by another runtime; while its maker lives, and after.
#[test]
fn an_id_that_was_used_is_spent() {
    let runtimes: Vec<Runtime> = (0..2).map(|_| Runtime::open(patient()).unwrap()).collect();
    let id = runtimes[0].unique_id(2).unwrap();
    let ranks: Vec<_> = runtimes
        .iter()
        .cloned()
        .enumerate()
        .map(|(r, runtime)| std::thread::spawn(move || runtime.init_comm(CommOptions::with_id(id, r, 2)).unwrap()))
        .collect();
    let comms: Vec<Communicator> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
    let again = refused(&runtimes[1], id, 1);
    assert!(again.contains("rank 1 has joined by this unique id before, so the id is spent"), "{again}");
    drop(comms);
    let begun = Instant::now();
    while runtimes[0].tenant().tasks_alive() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(120), "the root of a group that was made ends");
        std::thread::sleep(Duration::from_millis(1));
    }
    let elsewhere = Runtime::open(patient()).unwrap();
    for (runtime, rank) in [(&runtimes[0], 1), (&elsewhere, 0), (&elsewhere, 1)] {
        let e = refused(runtime, id, rank);
        for part in ["the id is spent", "make a new one with unique_id"] {
            assert!(e.contains(part), "{e}");
        }
    }
    // One that nobody has used, whose maker is gone.
    let unused = Runtime::open(patient()).unwrap().unique_id(2).unwrap();
    let e = refused(&elsewhere, unused, 0);
    assert!(e.contains("the id is spent"), "{e}");
}
