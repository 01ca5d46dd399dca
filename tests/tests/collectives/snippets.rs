//! The Rust of the docs: each block of docs/*.md stands in one of these functions, word for word, so that it is compiled.

#![allow(unused_variables, unused_assignments, dead_code)]

use std::path::Path;
use std::time::Duration;

use wccl::{Communicator, Progress, Sum};

type Snippet = Result<(), Box<dyn std::error::Error>>;

fn the_pieces() -> Snippet {
    let mut comm = Communicator::from_env()?;
    let mut x = comm.tensor_from(&[1.0f32; 1000])?;
    comm.all_reduce(&mut x, Sum)?;
    let first = x.to_vec()[0];
    Ok(())
}

fn in_the_background(comm: &Communicator, x: Vec<f32>) -> Snippet {
    let (rank, n) = (comm.rank(), comm.nranks());
    let mut stream = comm.stream(0)?;
    let reduced = stream.all_reduce(x, Sum);
    let gathered = stream.all_gather(vec![rank as u32; 10], vec![0u32; 10 * n]);
    let x = reduced.wait()?;
    let (mine, all) = match gathered.wait_for(Duration::from_millis(5)) {
        Progress::Done(both) => both,
        Progress::Failed(failed) => return Err(failed.into()),
        Progress::Running(pending) => pending.wait()?,
    };
    Ok(())
}

fn messages(comm: &Communicator, next: usize, bytes: Vec<u8>, mut room: Vec<u8>) -> Snippet {
    let sent = comm.isend(next, 7, bytes)?; // a Vec<u8>, or an Arc<DeviceMemory>
    let got = comm.recv(None, Some(7), &mut room)?; // whoever is first: got.from
    let delivered = sent.wait(); // delivered.result, delivered.buffer
    Ok(())
}

fn deadlines(comm: &mut Communicator, stream: &mut wccl::Stream, mut x: Vec<f32>) -> Snippet {
    comm.within(Duration::from_secs(5)).all_reduce(&mut x, Sum)?;
    let pending = stream.within(Duration::from_secs(5)).barrier();
    Ok(())
}

fn some_of_the_ranks(mut comm: Communicator, mut x: Vec<f32>, lost: usize) -> Snippet {
    use wccl::groups::{GroupOptions, Program, ProgramOp, ReplicaGroups};

    let groups = ReplicaGroups::new(&[vec![0, 1], vec![2, 3]], comm.nranks(), comm.rank())?;
    let sum = ProgramOp::Other { op: 1, size: 1024, word: 0 };
    let program = Program::new(comm.rank() as u32).replica_group(&[0, 1], &[sum]).replica_group(&[2, 3], &[sum]);
    let part = comm.replica_group(&groups.mine(), &program.finish(), GroupOptions::default())?;
    part.lock().all_reduce(&mut x, Sum)?;

    let row = comm.split(Some(comm.rank() as u32 / 4), 0)?; // None in, None out

    if comm.all_reduce(&mut x, Sum).is_err() {
        comm = comm.shrink(&[lost])?;
    }
    Ok(())
}

/// Lines without what the formatter may have changed.
fn lines(text: &str) -> Vec<String> {
    let line = |l: &str| l.split_whitespace().collect::<Vec<_>>().join(" ");
    text.lines().map(line).filter(|l| !l.is_empty()).collect()
}

#[test]
fn each_rust_block_of_the_docs_is_compiled_here() {
    let here = lines(include_str!("snippets.rs"));
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mut found = 0;
    for entry in std::fs::read_dir(docs).unwrap() {
        let path = entry.unwrap().path();
        // What plugin authors read is compiled for a plugin's target.
        if path.extension().is_none_or(|x| x != "md") || path.ends_with("plugin-authors.md") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for block in text.split("```rust\n").skip(1) {
            let block = lines(block.split("```").next().unwrap());
            let has = here.windows(block.len()).any(|w| w == block);
            assert!(has, "{} has Rust that is not compiled here:\n{}", path.display(), block.join("\n"));
            found += 1;
        }
    }
    assert!(found >= 4, "{found}");
}
