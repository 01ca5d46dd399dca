//! A first program: a sum over all ranks, in device memory, in private memory, and in the background.
//!
//! ```text
//! cargo xtask guests && cargo build --release --workspace --examples
//! target/release/wccl run -r 4 --tag -- target/release/examples/first
//! ```

use wccl::{Communicator, Max, Sum};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = Communicator::from_env()?;
    let (rank, n) = (comm.rank(), comm.nranks());

    // Device memory: peers reach it, nothing is copied on the way.
    let mut x = comm.tensor_from(&[rank as f32; 1000])?;
    comm.all_reduce(&mut x, Sum)?;
    let sum = x.to_vec()[0];

    // Private memory of the process.
    let mut private = vec![rank as f32; 1000];
    comm.all_reduce(&mut private, Sum)?;

    // In the background: the stream takes the buffer, and gives it back.
    let mut stream = comm.stream(0)?;
    let pending = stream.all_reduce(private, Max);
    // ... other work ...
    let private = pending.wait()?;

    println!("rank {rank} of {n}: {sum} {}", private[0]);
    Ok(())
}
