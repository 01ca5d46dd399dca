//! Loading, using and unloading a plugin again and again leaves memory and descriptors flat.

use wccl::{CommOptions, DataType, Io, Runtime};

use crate::common::{config, free_port};

/// Rounds before the first look: allocators and the engine keep what they will use again.
const WARM: usize = 40;
/// Rounds between the looks.
const ROUNDS: usize = 400;

fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn counted(of: &str) -> usize {
    std::fs::read_dir(of).unwrap().count()
}

fn round(root: &str) {
    let runtime = Runtime::open(config()).unwrap();
    assert_eq!(runtime.load_error(), None);
    let mut comm = runtime.init_comm(CommOptions::with_root(root, 0, 1)).unwrap();
    let mut bytes = [7u8; 64];
    comm.raw().all_gather(Io::HostInPlace(&mut bytes), 64, DataType::Uint8).unwrap();
    // The names it goes by are intact after however many rounds.
    assert_eq!(runtime.forward().version_info().unwrap().compatibility, 89);
}

#[test]
fn loading_using_and_unloading_leaves_memory_and_descriptors_flat() {
    let _alone = crate::alone();
    let root = format!("127.0.0.1:{}", free_port());
    for _ in 0..WARM {
        round(&root);
    }
    let (memory, descriptors, threads) = (resident(), counted("/proc/self/fd"), counted("/proc/self/task"));
    for _ in 0..ROUNDS {
        round(&root);
    }
    let now = (resident(), counted("/proc/self/fd"), counted("/proc/self/task"));
    let grown = now.0.saturating_sub(memory);
    println!(
        "{ROUNDS} rounds: {grown} bytes more, descriptors {descriptors} to {}, threads {threads} to {}",
        now.1, now.2
    );
    assert!(now.1 <= descriptors, "descriptors grew from {descriptors} to {}", now.1);
    assert!(now.2 <= threads, "threads grew from {threads} to {}", now.2);
    // A leak of a page a round would be 1.6 MB; one of an instance's memory, hundreds.
    assert!(grown < ROUNDS * 4096, "{grown} bytes more after {ROUNDS} rounds");
}
