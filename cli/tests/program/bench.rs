//! `wccl bench` as a user runs it: what it explains, measures, writes and draws. No speed is asserted.

use std::path::Path;
use std::process::Output;

use crate::common::{Dir, has, said, wccl};

fn bench(args: &[&str], vars: &[(&str, &Path)]) -> Output {
    wccl().arg("bench").args(args).envs(vars.iter().copied()).output().unwrap()
}

/// Runs well; answers stdout.
fn good(args: &[&str], vars: &[(&str, &Path)]) -> String {
    let out = bench(args, vars);
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{args:?}: {stdout}{stderr}");
    stdout.into_owned()
}

/// Fails; answers the exit code and stderr.
fn fails(args: &[&str], vars: &[(&str, &Path)]) -> (Option<i32>, String) {
    let out = bench(args, vars);
    assert!(!out.status.success(), "{args:?}");
    (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
}

const EXPLAINED: &str = concat!(
    "# wccl ",
    env!("CARGO_PKG_VERSION"),
    "\
: 4 ranks on one server, hbm buffers, fp32, out of place; numbers are of the busiest rank; bytes are counted once read and once written
# rings 0 to 31: 0 1 2 3
# table: none, the built-in rule decides
#
# all_reduce
#        size        count algorithm  rings    piece  steps  waits   from peers     to peers        moved  why
            8            2 one-hop        -        8      4      3           24            0           56  built-in rule
          512          128 one-hop        -      512      4      3         1536            0         3584  built-in rule
        32768         8192 mesh           -       8K     11      6        24576        24576        90112  built-in rule
      2097152       524288 mesh           -      64K     39      6      1572864      1572864      5767168  built-in rule
#
# barrier
#        size        count algorithm  rings    piece  steps  waits   from peers     to peers        moved  why
            0            0 one-hop        -        0      3      3            0            0            0  nothing moves
"
);

#[test]
fn explain_says_what_would_be_done() {
    // What only says how to measure may stay on the line.
    let measured = ["-n", "3", "-w", "1", "-c", "0"];
    let args = ["--explain", "-r", "4", "-b", "8", "-e", "2M", "-f", "64", "allreduce", "barrier"];
    let said = good(&[&measured[..], &args].concat(), &[]);
    assert_eq!(said, EXPLAINED, "{said}");
}

#[test]
fn messages_go_to_and_fro() {
    for memory in ["hbm", "host"] {
        let args = ["--pingpong", "-r", "3", "-b", "1", "-e", "256K", "-f", "512", "-n", "5", "--buffers", memory];
        let said = good(&args, &[]);
        let sizes: Vec<&str> =
            said.lines().filter(|l| l.starts_with(' ')).filter_map(|l| l.split_whitespace().next()).collect();
        assert_eq!(sizes.last(), Some(&"262144"), "{said}");
        assert!(said.contains(&format!("{memory} buffers")) && said.contains("OK: every message arrived"), "{said}");
    }
    let (code, why) = fails(&["--pingpong", "-r", "1"], &[]);
    assert!(code == Some(2) && why.contains("a message needs two ranks"), "{code:?} {why}");
}

#[test]
fn explain_says_why() {
    let dir = Dir::new("why");
    let table = dir.file("t", "wccl-tune 1\nall_reduce hbm 2-4 64K ring\n* host * * mesh\n");
    let why = |args: &[&str], vars: &[(&str, &Path)]| -> Vec<String> {
        let said = good(&[&["--explain", "-r", "2", "-b", "1K", "-e", "1M", "-f", "1024"], args].concat(), vars);
        said.lines()
            .filter(|l| l.starts_with(' '))
            .map(|l| {
                let words: Vec<&str> = l.split_whitespace().collect();
                format!("{} {}: {}", words[2], words[3], words[10..].join(" "))
            })
            .collect()
    };
    let file: &[(&str, &Path)] = &[("WCCL_TUNE_FILE", &table)];
    assert_eq!(
        why(&["allreduce"], file),
        ["ring 4: row 1 of the table (all_reduce hbm 2-4 64K ring)", "mesh -: built-in rule"]
    );
    assert_eq!(
        why(&["--buffers", "host", "allreduce"], file),
        [
            "one-hop -: built-in rule; row 2 of the table (* host * * mesh) does not serve this call",
            "staged -: built-in rule; row 2 of the table (* host * * mesh) does not serve this call"
        ]
    );
    assert_eq!(
        why(&["--algo", "mesh", "allreduce"], file),
        ["mesh -: forced by --algo or WCCL_ALGO", "mesh -: forced by --algo or WCCL_ALGO"]
    );
    let both = [("WCCL_TUNE_FILE", &*table), ("WCCL_ONE_HOP_MAX", Path::new("2000"))];
    assert_eq!(why(&["allreduce"], &both), ["one-hop -: within WCCL_ONE_HOP_MAX=2000", "mesh -: built-in rule"]);
}

/// What is measured is written, read back, and used. Which algorithm wins is the machine's business.
#[test]
fn tuning_writes_a_table_that_is_used() {
    let dir = Dir::new("tune");
    let path = dir.0.join("t.table");
    let file = path.to_str().unwrap();
    let args = ["--tune", file, "--tune-ranks", "2,3", "-b", "8", "-e", "128K", "-f", "128", "-n", "3", "-w", "1"];
    let said = good(&[&args[..], &["allreduce", "bcast", "barrier"]].concat(), &[]);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(said.ends_with(&text), "the table is printed: {said}");
    assert_eq!(dir.names(), ["t.table"], "nothing else is left");
    for ranks in ["2", "3"] {
        for memory in ["hbm", "host"] {
            for op in ["all_reduce", "broadcast"] {
                let rows: Vec<Vec<&str>> = text
                    .lines()
                    .map(|l| l.split_whitespace().collect::<Vec<_>>())
                    .filter(|w| w.starts_with(&[op, memory, ranks]))
                    .collect();
                assert_eq!(rows.last().unwrap()[3], "*", "the last row goes on for ever: {text}");
            }
        }
    }
    let used = good(&["--explain", "-r", "3", "-b", "8", "-e", "8", "allreduce"], &[("WCCL_TUNE_FILE", &path)]);
    assert!(used.contains("of the table (all_reduce hbm 3 "), "{used}");
    // And by the ranks of a measurement.
    let measured = good(&["-r", "2", "-b", "8", "-e", "64K", "-f", "64", "-n", "2"], &[("WCCL_TUNE_FILE", &path)]);
    assert!(measured.contains("OK: 0 elements wrong"), "{measured}");
}

#[test]
fn a_wrong_table_is_named_with_its_line() {
    let dir = Dir::new("wrong");
    let table = dir.file("t", "wccl-tune 1\nall_reduce hbm 2 8K\n");
    let (code, said) = fails(&["-r", "2", "-b", "8", "-e", "8"], &[("WCCL_TUNE_FILE", &table)]);
    assert_eq!(code, Some(1));
    for words in ["WCCL_TUNE_FILE", table.to_str().unwrap(), "line 2: 4 words where 5 are expected"] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn options_that_do_not_fit_together_are_wrong_usage() {
    for args in [
        &["--tune", "t", "--explain"][..],
        &["--tune", "t", "--algo", "mesh"],
        &["--tune", "t", "--ranks", "1"],
        &["--tune", "t", "barrier"],
        &["--tune", "t", "--tune-ranks", "1"],
        &["--tune-ranks", "2"],
        &["--peer-results", "f"],
        &["--plot", "p", "--peer"],
        &["--tune", "t", "barrier", "group"],
        &["--explain", "permute"],
        &["--buffers", "host", "group"],
        &["--algo", "fast"],
        &["--tune", "t", "--in-place", "sendrecv"],
    ] {
        let (code, said) = fails(args, &[]);
        assert_eq!(code, Some(2), "{args:?}: {said}");
    }
}

/// A collective without an in-place form is refused, with those that have one, before anything is measured.
#[test]
fn in_place_is_refused_where_there_is_no_such_form() {
    for (name, words) in [("permute", "permute"), ("sr", "send_recv"), ("a2av", "all_to_all_v"), ("barrier", "barrier")]
    {
        let out = bench(&["-r", "2", "--in-place", "allreduce", name], &[]);
        assert_eq!((out.status.code(), &*out.stdout), (Some(2), &[][..]), "{name}");
        let named = format!("--in-place: {words} has no in-place form");
        has(&said(&out), &[&named, "those that have one: all_reduce, all_gather, ", "all_gather_v", "scatter"]);
    }
    let measured = good(&["-r", "2", "-b", "64", "-e", "64", "-n", "2", "--in-place", "allreduce", "gather"], &[]);
    has(&measured, &["2 ranks on one server, hbm buffers, fp32, in place; ", "OK: 0 elements wrong"]);
}

/// A file that cannot be written is named before anything is measured, and trying leaves nothing.
#[test]
fn results_that_cannot_be_written_are_said_first() {
    let dir = Dir::new("unwritable");
    let kept = dir.file("kept.json", "earlier");
    let (folder, lost) = (dir.0.clone(), dir.0.join("no-such-directory/file"));
    for option in ["--report-to-json-file", "--plot", "--tune"] {
        for file in [&folder, &lost] {
            let file = file.to_str().unwrap();
            let out = bench(&["-r", "2", "-b", "8", "-e", "8", option, file], &[]);
            assert_eq!((out.status.code(), &*out.stdout), (Some(1), &[][..]), "{option} {file}");
            has(&said(&out), &[&format!("writing {file}: ")]);
        }
    }
    // An attempt that fails for another reason does not touch what is there.
    let (report, page) = (kept.to_str().unwrap(), dir.0.join("new.html"));
    fails(&["-r", "2", "--report-to-json-file", report, "--plot", page.to_str().unwrap(), "--plugin", "none"], &[]);
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), "earlier");
    assert_eq!(dir.names(), ["kept.json"]);
}

#[test]
fn a_plot_is_one_page_beside_others() {
    let dir = Dir::new("plot");
    let others = dir.file(
        "others.json",
        "{\"rows\":[{\"peer\":\"<b>other</b>\",\"coll\":\"allreduce\",\"ranks\":2,\"bytes\":1024,\"busbw_GBs\":0.5},\
         {\"limit\":\"allreduce_touch\",\"threads\":2,\"bytes\":1024,\"lat_us\":1.0}]}",
    );
    let report = dir.0.join("report.json");
    let page = dir.0.join("p.html");
    let run = |n: &str, args: &[&str]| {
        let all = [&["-r", n, "-b", "8", "-e", "8K", "-f", "32", "-n", "2", "-w", "0", "allreduce", "allgather"], args];
        bench(&all.concat(), &[])
    };
    assert!(run("2", &["--report-to-json-file", report.to_str().unwrap()]).status.success());
    let drawn = run(
        "2",
        &[
            "--plot",
            page.to_str().unwrap(),
            "--peer-results",
            others.to_str().unwrap(),
            "--peer-results",
            report.to_str().unwrap(),
        ],
    );
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let text = std::fs::read_to_string(&page).unwrap();
    for words in
        ["<h2>all_reduce</h2>", "<h2>all_gather</h2>", "&lt;b&gt;other", "limit: allreduce_touch", "report (hbm)"]
    {
        assert!(text.contains(words), "{words}");
    }
    assert!(!text.contains("<b>other") && text.ends_with("</html>\n"));
    assert_eq!(dir.names(), ["others.json", "p.html", "report.json"]);
    // Results that are not there, or of other ranks, are said before anything is measured.
    let missing = run("2", &["--plot", page.to_str().unwrap(), "--peer-results", "no-such-file"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no-such-file") && missing.stdout.is_empty());
    let other = run("3", &["--plot", page.to_str().unwrap(), "--peer-results", others.to_str().unwrap()]);
    has(&said(&other), &["no results for 3 ranks; it has some for 2: choose by -r"]);
    for (text, words) in [
        ("", "holds no results"),
        ("{\"peer\":\"p\"}", "holds no results"),
        (
            "{\"peer\":\"p\",\"coll\":\"?\",\"ranks\":2,\"bytes\":8}",
            "holds no result for 2 ranks with a collective, a size",
        ),
        ("nonsense", "line 1: a JSON object like"),
    ] {
        let file = dir.file("broken.json", text);
        let out = run("2", &["--plot", page.to_str().unwrap(), "--peer-results", file.to_str().unwrap()]);
        assert_eq!((out.status.code(), &*out.stdout), (Some(1), &[][..]), "{text}");
        has(&said(&out), &["broken.json", words]);
    }
}
