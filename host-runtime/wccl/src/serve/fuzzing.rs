//! The service's wire for the fuzz targets. Not for programs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client::wire::{Greeting, Hello, LINKS_AT_ONCE, Reply, Request, Said};
use crate::message::{self, MessageError, parse};

/// How long the service may take for all that a client says.
const PATIENCE: Duration = Duration::from_secs(20);

/// Reads a message; what was read is written and read again as the same.
fn message<T: Serialize + DeserializeOwned + std::fmt::Debug>(body: &[u8]) {
    if let Ok(value) = parse::<T>(body) {
        let again = postcard::to_stdvec(&value).map_err(|e| e.to_string());
        let again = again.and_then(|bytes| parse::<T>(&bytes).map_err(|e| e.to_string()));
        assert_eq!(format!("{:?}", Ok::<_, String>(value)), format!("{again:?}"));
    }
}

/// The body of a message of either side.
pub fn messages(body: &[u8]) {
    message::<Hello>(body);
    message::<Greeting>(body);
    message::<Request>(body);
    message::<Said>(body);
}

/// A client that says hello in good order, then `bytes`, then no more: the service at `socket` ends its connection. In
/// `turns` it waits for the answer to each request before the next, and a session of 0 stands for its own.
///
/// # Errors
/// The system's, or a service that does not.
pub fn session(socket: &Path, mut bytes: &[u8], turns: bool) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let until = Instant::now() + PATIENCE;
    message::send(&stream, &Hello::mine(), &[], until).map_err(std::io::Error::other)?;
    if turns {
        let greeting = message::receive::<Greeting>(&stream, 1, until).map_err(std::io::Error::other)?.0;
        let Greeting::Welcome(welcome) = greeting else { return Err(std::io::Error::other("it is not welcome")) };
        while let Some((mut request, rest)) = request(bytes) {
            if let Request::Join(join) = &mut request
                && join.session == 0
            {
                join.session = welcome.session;
            }
            bytes = rest;
            let answered = message::send(&stream, &request, &[], until).and_then(|()| match request {
                Request::Abort { .. } => Ok(()),
                _ => loop {
                    let (said, _fds) = message::receive::<Said>(&stream, 3 * LINKS_AT_ONCE, until)?;
                    if !matches!(said.reply, Reply::Links(_)) {
                        break Ok(());
                    }
                },
            });
            match answered {
                Ok(()) => {}
                Err(MessageError::Closed) => break,
                Err(e) => return Err(std::io::Error::other(e)),
            }
        }
    }
    // It may have had enough before the end.
    let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
    match stream.read_to_end(&mut Vec::new()) {
        Err(e) if e.kind() != std::io::ErrorKind::ConnectionReset => Err(e),
        _ => Ok(()),
    }
}

/// The request that `bytes` begin with, if they do, and what follows.
fn request(bytes: &[u8]) -> Option<(Request, &[u8])> {
    let (head, rest) = bytes.split_first_chunk()?;
    let (body, rest) = rest.split_at_checked(u32::from_le_bytes(*head) as usize)?;
    Some((parse(body).ok()?, rest))
}
