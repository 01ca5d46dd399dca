//! The service's wire for the fuzz targets. Not for programs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::wire::{Greeting, Hello, Request, Said};
use crate::message::parse;

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

/// A client that says hello in good order, then `bytes`, then no more: the service at `socket` ends its connection.
///
/// # Errors
/// The system's, or a service that does not.
pub fn session(socket: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let hello = postcard::to_stdvec(&Hello::mine()).map_err(std::io::Error::other)?;
    let framed = [&(hello.len() as u32).to_le_bytes(), &hello[..], bytes].concat();
    // It may have had enough before the end.
    let _ = stream.write_all(&framed).and_then(|()| stream.shutdown(Shutdown::Write));
    match stream.read_to_end(&mut Vec::new()) {
        Err(e) if e.kind() != std::io::ErrorKind::ConnectionReset => Err(e),
        _ => Ok(()),
    }
}
