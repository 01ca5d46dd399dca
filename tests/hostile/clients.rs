//! Programs that talk to the service as they should not.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use wccl::serve::{ServeConfig, Server, identify};
use wccl::{CommOptions, Runtime, RuntimeConfig, message};

use crate::zoo::{Animal, Cage, Group, animal, config, said, squatted};

/// Bound against hangs.
const HANG: Duration = Duration::from_secs(30);

/// A service of two tenants, yet to start; `more` is TOML of the first, who is hostile.
fn to_serve(cage: &Cage, more: &str) -> Result<ServeConfig> {
    let plugin = config(None).plugin.context("there is no plugin: run `cargo xtask guests`")?.canonicalize()?;
    let directory = plugin.parent().context("a plugin lies in a directory")?;
    let policies = cage.dir("policies")?;
    for (tenant, core, ports, more) in [("hostile", 0, "20000-25999", more), ("other", 1, "26000-31999", "")] {
        let text = format!(
            "tenant = \"{tenant}\"\n[plugins]\ndirectory = {directory:?}\nallow = [{{ file = \"nccom.wasm\" }}]\n\
             [devices]\ncores = [{core}]\nhbm = \"1 MiB\"\n[network]\nlisten = [\"127.0.0.1:{ports}\"]\nreach = [\"127.0.0.1:*\"]\n{more}"
        );
        std::fs::write(policies.join(format!("{tenant}.toml")), text)?;
    }
    let base = RuntimeConfig { plugin: None, ..config(None) };
    let sockets = cage.path("sockets");
    Ok(ServeConfig { policies, sockets, base, market: None, allow_own_user: true, identify })
}

fn serve(cage: &Cage, more: &str) -> Result<Server> {
    Ok(Server::start(&to_serve(cage, more)?)?)
}

fn socket(cage: &Cage, tenant: &str) -> PathBuf {
    cage.path("sockets").join(format!("{tenant}.sock"))
}

fn client(cage: &Cage, tenant: &str) -> RuntimeConfig {
    RuntimeConfig { plugin: None, service: Some(socket(cage, tenant)), ..config(None) }
}

fn framed(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

/// One that sends these bytes and reads until it is sent away; then another tenant's program works as always.
fn stranger(what: &str, sentence: &str, bytes: impl Fn() -> Vec<u8> + 'static) -> Animal {
    animal(what, sentence, move |cage| {
        let _server = serve(cage, "")?;
        let mut s = UnixStream::connect(socket(cage, "hostile"))?;
        s.set_read_timeout(Some(HANG))?;
        s.write_all(&bytes())?;
        let mut said = Vec::new();
        // It may be closed before all was read.
        let _ = s.read_to_end(&mut said);
        let runtime = Runtime::open(client(cage, "other"))?;
        runtime.init_comm(CommOptions::with_id(runtime.unique_id(1)?, 0, 1))?.barrier()?;
        // Length and kind of the answer come first.
        Ok(String::from_utf8_lossy(&said).chars().filter(|c| !c.is_control()).collect())
    })
}

pub fn group() -> Group {
    let animals = vec![
        animal("a program at another tenant's socket", "…user … is not one of tenant hostile…", |cage| {
            let other = rustix::process::geteuid().as_raw() + 1;
            let _server = serve(cage, &format!("[service]\nuids = [{other}]\n"))?;
            let refused = said(Runtime::open(client(cage, "hostile")))?;
            Runtime::open(client(cage, "other"))?;
            Ok(refused)
        }),
        animal(
            "a program that would be of the service's own user",
            "tenant hostile: its programs would run as the service's own user (…), who can read and change all that the \
             service has…",
            |cage| said(Server::start(&ServeConfig { allow_own_user: false, ..to_serve(cage, "")? })),
        ),
        animal(
            "a stranger under the name that a control socket had, who never answers",
            "tenant squatted was not swapped: no runtime of that name is open on this machine, for this user, with a control socket…",
            |_| {
                let _mute = squatted("wccl-control-squatted-1-0")?;
                said(wccl::swap::status("squatted"))
            },
        ),
        animal(
            "a program that wants a core that another one works on",
            "…core 0 is leased to another runtime (tenant hostile, pid …), until it ends; a core serves one at a time…",
            |cage| {
                let _server = serve(cage, "")?;
                let first = Runtime::open(client(cage, "hostile"))?;
                let _works = first.init_comm(CommOptions::with_id(first.unique_id(1)?, 0, 1))?;
                let second = Runtime::open(client(cage, "hostile"))?;
                said(second.init_comm(CommOptions::with_id(second.unique_id(1)?, 0, 1)))
            },
        ),
        animal("a program that wants more memory than its policy grants", "…device memory is full…", |cage| {
            let _server = serve(cage, "")?;
            let runtime = Runtime::open(client(cage, "hostile"))?;
            let comm = runtime.init_comm(CommOptions::with_id(runtime.unique_id(1)?, 0, 1))?;
            said(comm.allocate(2 << 20))
        }),
        animal(
            "connections without end, none of which says anything",
            "…has 4 connections, as many as its policy allows…",
            |cage| {
                let _server = serve(cage, "[service]\nclients = 4\n")?;
                let mute =
                    (0..16).map(|_| UnixStream::connect(socket(cage, "hostile"))).collect::<Result<Vec<_>, _>>()?;
                let refused = said(Runtime::open(client(cage, "hostile")))?;
                Runtime::open(client(cage, "other"))?;
                drop(mute);
                Ok(refused)
            },
        ),
        stranger("a message of 4 GiB", "…says that it has 4294967295 bytes…", || u32::MAX.to_le_bytes().to_vec()),
        animal("a hello with descriptors beside it", "…2 descriptors came with it, 0 may…", |cage| {
            let _server = serve(cage, "")?;
            let s = UnixStream::connect(socket(cage, "hostile"))?;
            s.set_read_timeout(Some(HANG))?;
            let hello = (1u32, env!("CARGO_PKG_VERSION"));
            message::send(&s, &hello, &[s.as_fd(), s.as_fd()], Instant::now() + HANG)?;
            let mut said = [0; 4096];
            let n = (&s).read(&mut said)?;
            Ok(String::from_utf8_lossy(&said[..n]).chars().filter(|c| !c.is_control()).collect())
        }),
        stranger("bytes that are no message", "…no message that this version knows…", || framed(&[0xFF; 40])),
        stranger(
            "another version of the protocol",
            "…it speaks version 99 of the protocol (release 9), this service version 3…",
            || framed(b"\x63\x019"),
        ),
    ];
    Group { title: "Programs at the service", animals }
}
