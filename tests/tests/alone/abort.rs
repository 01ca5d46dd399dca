//! An init that is aborted while it waits: at once, and with nothing left.

use std::time::{Duration, Instant};

use sandbox::abort::AbortToken;
use wccl::{CommOptions, Runtime};

use crate::common::{HANG, config, free_port};

/// An init that waits in accept is ended from another thread, at once.
///
/// Proves INV-24.
#[test]
fn an_init_blocked_in_accept_is_aborted_from_another_thread() {
    let _alone = crate::alone();
    // A port is held by a descriptor.
    let roots = [free_port(), free_port()].map(|port| format!("127.0.0.1:{port}"));
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    // What a process keeps once it has had a runtime (the engine, the cache) is there after the first turn. What the second
    // leaves is left by a failed init, and nothing is.
    aborted_init(&roots[0]);
    let before = descriptors();
    aborted_init(&roots[1]);
    assert_eq!(descriptors(), before, "descriptors left");
    // To abort nothing is no operation.
    let token = AbortToken::new().unwrap();
    token.abort("nothing is under way");
    drop(token);
    assert_eq!(descriptors(), before);
}

fn aborted_init(root: &str) {
    // Later than the bound below: an abort must not wait for a deadline.
    let mut c = config();
    c.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "600000".into());
    let runtime = Runtime::open(c).unwrap();
    let token = AbortToken::new().unwrap();
    let options = CommOptions { abort: Some(token.clone()), ..CommOptions::with_root(root, 0, 2) };
    let waiting = {
        let runtime = runtime.clone();
        std::thread::spawn(move || runtime.init_comm(options).map(|_| ()).unwrap_err())
    };
    // The rank is in the library once the root's task runs; from then on it waits for rank 1, which never comes.
    while runtime.tenant().tasks_alive() == 0 {
        std::thread::yield_now();
    }
    // In accept by then, most likely; an abort that is earlier ends it as well.
    std::thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    token.abort("the user changed their mind");
    token.abort("twice");
    let e = waiting.join().unwrap().to_string();
    assert!(begun.elapsed() < HANG);
    assert!(e.contains("the user changed their mind"), "{e}");
    // The root's task still holds its sockets; with the runtime everything is gone.
    drop(runtime);
}
