//! A first program: a sum over all ranks, in device memory, in private memory, and in the background.
//!
//! ```text
//! cargo xtask guests && cargo build --release --workspace --examples
//! target/release/wccl run -r 4 --tag -- target/release/examples/first
//! ```

use std::sync::Arc;

use wccl::{Buffers, Communicator, DataType, Io, ReduceOp};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = Communicator::from_env()?;
    let (rank, n) = (comm.rank(), comm.nranks());

    // Device memory: peers reach it, nothing is copied on the way.
    let mine: Vec<u8> = (0..1000).flat_map(|_| (rank as f32).to_le_bytes()).collect();
    let tensor = Arc::new(comm.tensor(4000)?);
    tensor.write(0, &mine)?;
    comm.all_reduce(Io::in_place(&tensor), 1000, DataType::Fp32, ReduceOp::Sum)?;
    let mut sum = [0; 4];
    tensor.read(0, &mut sum)?;

    // Private memory of the process.
    let mut private = mine;
    comm.all_reduce(Io::HostInPlace(&mut private), 1000, DataType::Fp32, ReduceOp::Sum)?;

    // In the background: the stream takes the buffers, and gives them back.
    let mut stream = comm.stream(0)?;
    let request = stream.all_reduce(Buffers::HostInPlace(private), 1000, DataType::Fp32, ReduceOp::Max)?;
    // ... other work ...
    let Buffers::HostInPlace(private) = request.wait()? else { return Err("other buffers came back".into()) };

    println!("rank {rank} of {n}: {} {}", f32::from_le_bytes(sum), f32::from_le_bytes(private[..4].try_into()?));
    // Ranks leave together: one that is quicker would be reported as gone.
    comm.barrier()?;
    Ok(())
}
