//! How a group of `wccl run` ends, and what becomes of signals to the launcher: the whole tree of every rank goes, whatever
//! way the launcher goes, with the status that the ranks ended with.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Dir, has, said, wccl};

/// A guard against hanging: what is waited for would otherwise last far longer.
const LONG: Duration = Duration::from_secs(120);

/// Whatever the tests themselves were started with as ignored.
fn run(options: &[&str], script: &str) -> Command {
    let mut command = wccl();
    command.arg("run").args(options).args(["--", "bash", "-c", script]);
    // SAFETY: system calls between fork and exec, of signals that exist.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
    command
}

fn output(options: &[&str], script: &str) -> Output {
    run(options, script).output().unwrap()
}

/// Waits until something holds.
fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The state letter of a process; `None` if there is none.
fn state(pid: &str) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Until none of them runs; whoever adopts them may not have waited for them yet.
fn until_gone(pids: &[String]) {
    until(&format!("{pids:?} still run"), || pids.iter().all(|p| matches!(state(p), None | Some('Z'))));
}

fn send(signal: &str, pid: &str) {
    assert!(Command::new("kill").args(["-s", signal, pid]).status().unwrap().success());
}

/// A launcher that runs, and what its ranks print.
struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Running {
    fn start(mut command: Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Running { child, out }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim_end().to_string()
    }

    fn lines(&mut self, n: usize) -> Vec<String> {
        let mut all: Vec<String> = (0..n).map(|_| self.line()).collect();
        all.sort();
        all
    }

    fn signal(&self, signal: &str) {
        send(signal, &self.child.id().to_string());
    }

    /// Its end, and what was printed until then.
    fn end(mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap(), rest)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn ranks_get_their_variables() {
    let check = "test $WORLD_SIZE = 3 && test $LOCAL_WORLD_SIZE = 3 && test $RANK = $LOCAL_RANK && test $RANK -lt 3 && \
                 test $MASTER_ADDR = 127.0.0.1 && test $NEURON_RT_ROOT_COMM_ID != 127.0.0.1:$MASTER_PORT && \
                 test -n \"$CCOM_SOCKET_IFNAME\"";
    let out = output(&["-r", "3"], check);
    assert!(out.status.success(), "{}", said(&out));
}

#[test]
fn the_exit_code_is_that_of_the_rank_that_failed() {
    for (script, code, words) in [
        ("exit 42", 42, "exited with code 42"),
        ("kill -KILL $$", 137, "was killed by signal 9 (SIGKILL)"),
        ("kill -USR1 $$", 138, "was killed by signal 10 (SIGUSR1)"),
        ("exit 0", 0, ""),
    ] {
        let out = output(&["-r", "2"], &format!("if [ $RANK = 0 ]; then exec sleep 0; fi; {script}"));
        assert_eq!(out.status.code(), Some(code), "{}", said(&out));
        has(&said(&out), &[words, if code == 0 { "" } else { "wccl: rank 1 of 2 (pid " }]);
    }
}

/// A parent that ignores SIGCHLD, as some servers do, or has signals blocked.
#[test]
fn what_is_inherited_of_signals_changes_nothing() {
    let wccl = env!("CARGO_BIN_EXE_wccl");
    let script = format!(
        "trap '' CHLD; '{wccl}' run -r 2 -- sh -c 'exit 5'; echo status $?; '{wccl}' run -r 2 -- sh -c 'true; exit 0'; echo status $?"
    );
    // dash hands on what it ignores.
    let out = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), "status 5\nstatus 0\n", "{}", said(&out));
}

/// What ranks start in the background goes with them: when one fails, when all are done, and in another session too.
#[test]
fn the_whole_tree_of_every_rank_ends() {
    for end in ["exit 3", "exit 0"] {
        let mut run = Running::start(run(
            &["-r", "2"],
            &format!("sleep 777 & a=$!; setsid bash -c 'echo $$; sleep 778' & echo $a; sleep 0.3; {end}"),
        ));
        let pids = run.lines(4);
        let (status, _) = run.child.wait().map(|s| (s, ())).unwrap();
        assert_eq!(status.code(), Some(if end == "exit 3" { 3 } else { 0 }));
        // Before the launcher has ended, not some time after.
        for p in &pids {
            assert!(matches!(state(p), None | Some('Z')), "process {p} still runs after {end}");
        }
    }
}

/// The guard is the parent of the ranks, and the launcher of the guard: whichever is killed, all goes.
#[test]
fn the_whole_tree_ends_when_the_launcher_or_the_guard_is_killed() {
    for guard in [false, true] {
        let mut run =
            Running::start(run(&["-r", "2"], "sleep 777 & echo $!; setsid sleep 778 & echo $!; echo $$; wait"));
        let mut pids = run.lines(6);
        let parent = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.split(' ').nth(1).unwrap().to_string()
        };
        let launcher = run.child.id().to_string();
        let rank = pids.iter().find(|p| parent(&parent(p)) == launcher).unwrap();
        pids.push(parent(rank));
        if guard {
            send("KILL", pids.last().unwrap());
            let status = run.child.wait().unwrap();
            assert_eq!(status.code(), Some(1));
        } else {
            run.signal("KILL");
        }
        until_gone(&pids);
    }
}

/// Ranks that hang end with the launcher, and its parent sees by what.
#[test]
fn ranks_that_hang_end_when_the_launcher_is_asked_to() {
    for (signal, number) in [("INT", 2), ("TERM", 15), ("QUIT", 3), ("KILL", 9)] {
        let mut run = Running::start(run(&["-r", "2"], "echo $$; exec sleep 600"));
        let pids = run.lines(2);
        run.signal(signal);
        assert_eq!(run.child.wait().unwrap().signal(), Some(number));
        until_gone(&pids);
    }
}

#[test]
fn signals_are_handed_on_to_every_rank() {
    let script = "for s in USR1 USR2 HUP WINCH CONT INT QUIT TERM; do trap \"echo $s; got=$s\" $s; done
                  echo ready; until [ \"$got\" = TERM ]; do sleep 0.02; done; exit 0";
    let mut run = Running::start(run(&["-r", "2"], script));
    assert_eq!(run.lines(2), ["ready", "ready"]);
    for signal in ["USR1", "USR2", "HUP", "WINCH", "CONT", "INT", "QUIT", "TERM"] {
        run.signal(signal);
        // SIGCONT goes with the first request to end, so that ranks that are stopped hear it; a shell may show it or not.
        let mut got = Vec::new();
        while got.len() < 2 {
            let line = run.line();
            if line != "CONT" || signal == "CONT" {
                got.push(line);
            }
        }
        assert_eq!(got, [signal, signal]);
    }
    // The first request is what it ends by.
    let (status, _) = run.end();
    assert_eq!(status.signal(), Some(2));
}

#[test]
fn a_job_is_suspended_and_goes_on() {
    let mut run = Running::start(run(&["-r", "2"], "echo $$; while :; do sleep 0.05; done"));
    let pids = run.lines(2);
    let launcher = run.child.id().to_string();
    run.signal("TSTP");
    until("not all stop", || pids.iter().chain([&launcher]).all(|p| state(p) == Some('T')));
    run.signal("CONT");
    until("not all go on", || pids.iter().chain([&launcher]).all(|p| state(p) != Some('T')));
    run.signal("TERM");
    let (status, _) = run.end();
    assert_eq!(status.signal(), Some(15));
}

/// A rank that stops itself is asked to end like the others: it is continued, and does not use the grace up.
#[test]
fn a_stopped_rank_hears_the_request_to_end() {
    let begun = Instant::now();
    let dir = Dir::new("stopped");
    let file = dir.0.join("pid").display().to_string();
    let script = format!(
        "if [ $RANK = 1 ]; then
             until [ -s '{file}' ] && grep -q '^State:.T' /proc/$(cat '{file}')/status; do sleep 0.05; done; exit 3
         fi
         trap 'echo heard; exit 0' TERM; echo $$ > '{file}'; kill -STOP $$; sleep 600"
    );
    let out = output(&["-r", "2", "--grace", "3600"], &script);
    assert_eq!(out.status.code(), Some(3), "{}", said(&out));
    has(&said(&out), &["heard", "rank 1 of 2 (pid ", "the one rank still running was ended"]);
    assert!(begun.elapsed() < LONG);
}

/// The launcher waits for them, and prints what they say meanwhile.
#[test]
fn ranks_have_the_grace_to_save_what_they_have() {
    let save =
        "trap 'echo saving $RANK; sleep 3; echo saved $RANK; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    // Asked by a signal to the launcher.
    let mut job = Running::start(run(&["-r", "2", "--tag"], save));
    assert_eq!(job.lines(2), ["[0] ready", "[1] ready"]);
    job.signal("TERM");
    let (status, text) = job.end();
    has(&text, &["[0] saved 0", "[1] saved 1"]);
    assert_eq!(status.signal(), Some(15));
    // Asked because another one failed.
    let dir = Dir::new("save");
    let file = dir.0.join("ready").display().to_string();
    let fails = format!("if [ $RANK = 1 ]; then until [ -e '{file}' ]; do sleep 0.05; done; exit 9; fi");
    let save = save.replace("echo ready", &format!("touch '{file}'"));
    let out = output(&["-r", "2", "--tag"], &format!("{fails}; {save}"));
    assert_eq!(out.status.code(), Some(9), "{}", said(&out));
    has(&said(&out), &["[0] saved 0", "rank 1 of 2 (pid ", "exited with code 9; the one rank still running was ended"]);
}

/// What does not end within the grace is killed, and that is said: ranks, and what they left.
#[test]
fn what_does_not_end_in_the_grace_is_killed() {
    let dir = Dir::new("stubborn");
    let file = dir.0.join("ready").display().to_string();
    let stubborn = format!("trap '' TERM INT; echo $BASHPID; touch '{file}'; while :; do sleep 1; done");
    for script in
        [stubborn.clone(), format!("rm '{file}'; ({stubborn}) & until [ -e '{file}' ]; do sleep 0.05; done; exit 7")]
    {
        let mut command = run(&["-r", "1", "--grace", "0.3"], &script);
        let mut job = Running::start({
            command.stderr(Stdio::piped());
            command
        });
        let pid = job.line();
        if script == stubborn {
            job.signal("TERM");
        }
        let mut err = String::new();
        job.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        let status = job.child.wait().unwrap();
        assert!(matches!(state(&pid), None | Some('Z')));
        assert_eq!(
            (status.signal(), status.code()),
            if script == stubborn { (Some(15), None) } else { (None, Some(7)) }
        );
        has(&err, &["what had not ended 300ms after it was asked to was killed (--grace)"]);
    }
    let out = output(&["-r", "1", "--grace", "soon"], "true");
    assert_eq!(out.status.code(), Some(2));
    has(&said(&out), &["--grace", "`soon` is no number of seconds"]);
}

/// A second Ctrl-C, a while after the first, ends the grace.
#[test]
fn a_second_interrupt_is_enough() {
    let begun = Instant::now();
    let mut command =
        run(&["-r", "1", "--grace", "3600"], "trap 'echo no' INT; echo ready; while :; do sleep 0.05; done");
    command.stderr(Stdio::piped());
    let mut job = Running::start(command);
    assert_eq!(job.line(), "ready");
    job.signal("INT");
    assert_eq!(job.line(), "no");
    std::thread::sleep(Duration::from_secs(1));
    job.signal("INT");
    let mut text = String::new();
    job.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    let status = job.end().0;
    assert_eq!(status.signal(), Some(2), "{status}: {text}");
    assert!(begun.elapsed() < LONG);
    // And not that it had an hour.
    has(&text, &["what had not ended at the second Ctrl-C was killed"]);
}

/// Those that could be started have said something, and it is shown.
#[test]
fn the_output_of_ranks_is_shown_also_where_not_all_can_be_started() {
    let wccl = env!("CARGO_BIN_EXE_wccl");
    // SIGTERM stays ignored: whoever is asked to end still says it.
    let script = format!("trap '' TERM; ulimit -n 40; exec '{wccl}' run -r 64 --tag -- echo here");
    let out = Command::new("bash").args(["-c", &script]).output().unwrap();
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    has(&text, &["making the pipes of rank ", "ulimit -n", "[0] here"]);
}

/// What was ignored when it started stays so: a job under `nohup` outlives its terminal.
#[test]
fn an_ignored_hangup_stays_ignored() {
    let wccl = env!("CARGO_BIN_EXE_wccl");
    let script = format!("trap '' HUP; exec '{wccl}' run -r 1 -- sh -c 'echo ready; sleep 0.5; kill -HUP $$; echo on'");
    let mut command = Command::new("sh");
    command.args(["-c", &script]);
    let mut job = Running::start(command);
    assert_eq!(job.line(), "ready");
    job.signal("HUP");
    let (status, text) = job.end();
    assert!(status.success(), "{status}");
    assert_eq!(text, "on\n");
}

/// In a container the launcher may be the first process, for which the kernel's defaults do not hold and to which every
/// process that loses its parent comes.
#[test]
fn the_first_process_of_a_container_ends_when_asked_to() {
    let pid = &["--pid", "--fork", "--mount-proc", "--kill-child"][..];
    let own = [&["--user", "--map-root-user"], pid].concat();
    // Root may make them itself where users may not.
    let allowed = |n: &&[&str]| Command::new("unshare").args(*n).arg("true").status().is_ok_and(|s| s.success());
    let namespaces = [&own[..], pid].into_iter().find(allowed);
    let namespaces =
        namespaces.expect("did not run: no PID namespaces here (needs user namespaces or root, and util-linux)");
    let mut command = Command::new("unshare");
    command.args(namespaces).arg(env!("CARGO_BIN_EXE_wccl")).args(["run", "-r", "2", "--", "bash", "-c"]);
    // Orphans that end at once: nobody but the guard or the launcher can wait for them.
    let script = "for i in 1 2 3 4 5; do (setsid true &) ; done; sleep 777 & for i in {1..200}; do
                      sleep 0.1; grep -q '^State:.Z' /proc/[0-9]*/status 2>/dev/null || { echo ready; break; }
                  done; sleep 600";
    command.arg(script);
    let mut job = Running::start(command);
    assert_eq!(job.lines(2), ["ready", "ready"]);
    // unshare ignores SIGTERM while it waits; its child is the first process.
    let children = format!("/proc/{0}/task/{0}/children", job.child.id());
    let first = std::fs::read_to_string(children).unwrap();
    send("TERM", first.trim());
    assert_eq!(job.child.wait().unwrap().code(), Some(143));
}

/// A prompt is shown though its line has no end, and progress though no line ends.
#[test]
fn a_prompt_and_progress_are_shown_with_tags() {
    let mut command = run(
        &["-r", "2", "--tag"],
        "if [ $RANK = 1 ]; then exec sleep 600; fi; printf 'name? '; read x; printf '%s\\r1%%' \"$x\"; read x",
    );
    let mut job = Running::start({
        command.stdin(Stdio::piped());
        command
    });
    let mut shown = vec![0; "[0] name? ".len()];
    job.out.read_exact(&mut shown).unwrap();
    assert_eq!(String::from_utf8_lossy(&shown), "[0] name? ");
    let mut stdin = job.child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"ann\n").unwrap();
    let mut shown = vec![0; "ann\r[0] 1%".len()];
    job.out.read_exact(&mut shown).unwrap();
    assert_eq!(String::from_utf8_lossy(&shown), "ann\r[0] 1%");
}

/// Variables that are set and empty count as unset; what is not UTF-8, and no path, is named.
#[test]
fn an_empty_variable_counts_as_unset_and_an_unreadable_one_is_named() {
    use std::os::unix::ffi::OsStrExt;
    let names = ["WCCL_PLUGIN", "WCCL_SERVICE", "WCCL_LOG", "WCCL_LOG_FORMAT"];
    for name in names {
        for args in
            [&["info"][..], &["run", "-r", "1", "--", "true"], &["bench", "--explain", "-r", "1", "-b", "8", "-e", "8"]]
        {
            let out = wccl().args(args).env(name, "").output().unwrap();
            assert!(out.status.success(), "{name}= {args:?}: {}", said(&out));
        }
        let odd = std::ffi::OsStr::from_bytes(b"a\xff");
        let out = wccl().args(["bench", "--explain", "-r", "1", "-b", "8", "-e", "8"]).env(name, odd).output().unwrap();
        // Where a path is meant, its bytes are the path.
        if name.starts_with("WCCL_LOG") {
            assert_eq!(out.status.code(), Some(2), "{name}: {}", said(&out));
            has(&said(&out), &[name, "text in UTF-8 was expected"]);
        } else {
            assert_eq!(out.status.code(), Some(1), "{name}: {}", said(&out));
            has(&said(&out), &["a\u{fffd}"]);
        }
    }
}
