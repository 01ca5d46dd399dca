//! Who reaches the sockets of a group without being of it.
//!
//! The sentence says what becomes of the stranger; the group it disturbs has to come about and to work.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use tests::zoo::{Plugin, init_comm};
use wccl::{CommOptions, Communicator, Runtime};

use crate::zoo::{Animal, Group, animal, config, opened, said, squatted};

/// Bound against hangs.
const HANG: Duration = Duration::from_secs(30);
/// Bytes of what a host says first when it dials.
const HELLO: usize = 72;

fn runtime() -> Result<Runtime> {
    let mut c = config(None);
    c.tenant = "disturbed".into();
    c.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "20000".into());
    opened(c)
}

/// Where the root of an id listens.
fn root_of(id: &[u8; 128]) -> SocketAddr {
    let ip: [u8; 4] = [id[4], id[5], id[6], id[7]];
    SocketAddr::from((ip, u16::from_be_bytes([id[2], id[3]])))
}

/// 28 bytes that begin like a record of the bootstrap's own protocol, magic first.
fn foreign() -> [u8; 28] {
    let mut b = [0; 28];
    b[..4].copy_from_slice(b"ilya");
    b[4..8].copy_from_slice(&1u32.to_le_bytes());
    b[8..12].copy_from_slice(&2u32.to_le_bytes());
    b
}

/// What a stranger hears that says this.
fn heard(at: SocketAddr, says: &[u8]) -> Result<String> {
    let mut s = TcpStream::connect(at)?;
    s.set_read_timeout(Some(HANG))?;
    s.write_all(says)?;
    let mut answer = Vec::new();
    match s.read_to_end(&mut answer) {
        Err(e) if e.kind() != std::io::ErrorKind::ConnectionReset => return Err(e).context("it is not closed"),
        _ => {}
    }
    ensure!(answer.is_empty(), "it was answered {answer:?}");
    Ok("it is closed without a word".into())
}

/// The two ranks of a group, each with a runtime of its own, which exchange something.
fn works(id: [u8; 128]) -> Result<Vec<Communicator>> {
    let join = |rank| {
        std::thread::spawn(move || -> Result<Communicator> {
            let mut comm = runtime()?.init_comm(CommOptions::with_id(id, rank, 2))?;
            comm.barrier()?;
            Ok(comm)
        })
    };
    let ranks = [join(0), join(1)];
    ranks.into_iter().map(|r| r.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?).collect()
}

/// Where this process listens on the loopback interface.
fn listening() -> Result<Vec<SocketAddr>> {
    let mine: Vec<String> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()?.to_str().map(str::to_string))
        .collect();
    let mut all = Vec::new();
    for line in std::fs::read_to_string("/proc/self/net/tcp")?.lines().skip(1) {
        let of: Vec<&str> = line.split_whitespace().collect();
        let (Some(at), Some(state), Some(inode)) = (of.get(1), of.get(3), of.get(9)) else { continue };
        if *state == "0A" && mine.contains(&format!("socket:[{inode}]")) {
            let port = at.rsplit(':').next().and_then(|p| u16::from_str_radix(p, 16).ok()).context("a port")?;
            all.push(SocketAddr::from(([127, 0, 0, 1], port)));
        }
    }
    Ok(all)
}

pub fn group() -> Group {
    let at_root: Animal = animal(
        "28 foreign bytes with the public magic, to the root of a group whose ranks have not come yet",
        "it is closed without a word",
        |_| {
            let maker = runtime()?;
            let id = maker.unique_id(2)?;
            let said = heard(root_of(&id), &foreign())?;
            works(id)?;
            Ok(said)
        },
    );
    let at_ranks = animal(
        "the same to every listener of the process, while a rank waits there for a message of another",
        "no rank takes it for a message",
        |_| {
            let maker = runtime()?;
            let ranks = works(maker.unique_id(2)?)?;
            let [zero, one] = <[Communicator; 2]>::try_from(ranks).map_err(|_| anyhow::anyhow!("two ranks"))?;
            let waits = std::thread::spawn(move || zero.bootstrap_recv(1, 8).map(|got| (zero, got)));
            let mut strangers = Vec::new();
            for at in listening()? {
                // One that is just closing is none.
                let Ok(mut s) = TcpStream::connect(at) else { continue };
                s.write_all(&foreign())?;
                strangers.push(s);
            }
            ensure!(strangers.len() >= 2, "both ranks listen");
            one.bootstrap_send(0, b"a word..")?;
            let (_zero, got) = waits.join().map_err(|_| anyhow::anyhow!("rank 0 panicked"))??;
            ensure!(got == b"a word..", "it was {got:?}");
            Ok("no rank takes it for a message".into())
        },
    );
    let recorded = animal(
        "what a rank has said to somebody else, recorded and said to its root",
        "it is closed without a word",
        |_| {
            let maker = runtime()?;
            let id = maker.unique_id(2)?;
            // A rank that was given another address with the right secret shows what one says.
            let trap = TcpListener::bind("127.0.0.1:0")?;
            let mut elsewhere = id;
            elsewhere[2..4].copy_from_slice(&trap.local_addr()?.port().to_be_bytes());
            let misled =
                std::thread::spawn(move || runtime().map(|r| r.init_comm(CommOptions::with_id(elsewhere, 1, 2))));
            let mut recorded = [0; HELLO];
            trap.accept()?.0.read_exact(&mut recorded)?;
            let answer = misled.join().map_err(|_| anyhow::anyhow!("it panicked"))??;
            let why = answer.map(|_| ()).err().context("it joined")?.to_string();
            ensure!(why.contains("is not of this group, so the id is spent"), "{why}");
            let said = heard(root_of(&id), &[&recorded[..], &foreign()].concat())?;
            works(id)?;
            Ok(said)
        },
    );
    let squatter = animal(
        "a name that was squatted before the group came, as a hash of what a plugin knows",
        "neuronInitComm of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): nobody published `abc` on this machine for 50 ms; is the first rank of this server running?",
        |cage| {
            let key = [0u8; 128];
            let mut h = Sha256::new();
            [&666u64.to_le_bytes()[..], &key, b"abc"].into_iter().for_each(|part| h.update(part));
            let hex: String = h.finalize()[..20].iter().map(|b| format!("{b:02x}")).collect();
            let squatter = squatted(&format!("wccl-rdv-{hex}"))?;
            std::thread::spawn(move || {
                for visitor in squatter.iter().flat_map(UnixListener::incoming).flatten() {
                    // One that has left does not matter.
                    let _ = (&visitor).write_all(&[2; 60]);
                }
            });
            let mut p = Plugin::lone_rank()?;
            let gives_up = "(i32.store8 (i32.const 1024) (i32.const 1)) (i32.store8 (i32.const 1028) (i32.const 28))
                 (i32.store (i32.const 1032) (i32.const 1)) (return (i32.const 1024))";
            let lookup = "(i32.store (i32.const 4096) (i32.const 0x636261))
                 (call $rendezvous.lookup (i32.const 5000) (i32.const 128) (i32.const 4096) (i32.const 3) (i32.const 50) (i32.const 2176))";
            p.body(
                "neuron-init-comm",
                init_comm(&format!("{lookup} (if (i32.load8_u (i32.const 2176)) (then {gives_up}))")),
            );
            let runtime = cage.open(&p)?;
            let id = runtime.unique_id(1)?;
            said(runtime.init_comm(CommOptions::with_id(id, 0, 1)))
        },
    );
    Group { title: "Strangers at the sockets of a group", animals: vec![at_root, at_ranks, recorded, squatter] }
}
