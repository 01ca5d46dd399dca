//! What is measured on the whole process: the one test of this binary runs with no other beside it. A test binary runs its
//! tests as threads of one process, so a second test here would be counted along.

mod common;

use std::time::{Duration, Instant};

use common::{config, free_port};
use host_runtime::abort::AbortToken;
use host_runtime::nrt::{CommOptions, Runtime};

/// An init that waits in accept is ended from another thread, at once.
///
/// Proves INV-24.
#[test]
fn an_init_blocked_in_accept_is_aborted_from_another_thread() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    // What a process keeps once it has had a runtime (the engine, the cache) is there after the first turn. What the second
    // leaves is left by a failed init, and nothing is.
    aborted_init();
    let before = descriptors();
    aborted_init();
    assert_eq!(descriptors(), before, "descriptors left");
    // To abort nothing is no operation.
    let token = AbortToken::new().unwrap();
    token.abort("nothing is under way");
    drop(token);
    assert_eq!(descriptors(), before);
}

fn aborted_init() {
    let runtime = Runtime::open(config()).unwrap();
    let token = AbortToken::new().unwrap();
    let root = format!("127.0.0.1:{}", free_port());
    let options = CommOptions { abort: Some(token.clone()), ..CommOptions::with_root(root, 0, 2) };
    let waiting = {
        let runtime = runtime.clone();
        std::thread::spawn(move || runtime.init_comm(options).map(|_| ()).unwrap_err())
    };
    // The rank is in the library once the root's task runs; from then on it waits for rank 1, which never comes.
    while runtime.tenant().tasks_alive() == 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    token.abort("the user changed their mind");
    token.abort("twice");
    let e = waiting.join().unwrap().to_string();
    assert!(begun.elapsed() < Duration::from_secs(5), "an abort must not wait for a deadline");
    assert!(e.contains("the user changed their mind"), "{e}");
    // The root's task still holds its sockets; with the runtime everything is gone.
    drop(runtime);
}
