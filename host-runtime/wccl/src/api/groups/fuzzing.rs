//! The group's wire for the fuzz targets: what arrives at a meeting place, and verdicts. Not for programs.

use std::collections::VecDeque;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use crate::api::groups::beacon::{Beacon, HEAD_BYTES, Meeting, SECRET_BYTES, sealed};
use crate::api::groups::signature::SIGNATURE_BYTES;
use crate::api::groups::verdict::{Messages, agree};
use sandbox::limits::ID_BYTES;

const RANKS: usize = 4;

/// Ranks' addresses, as a library gives them.
pub fn address(data: &[u8]) {
    if let Ok(a) = sandbox::imports::sockets::decode(data) {
        assert_eq!(sandbox::imports::sockets::decode(&sandbox::imports::sockets::encode(&a)), Ok(a));
    }
}

/// A stranger at the door of a meeting that says `data`, with a tag that fits if it is as long as a head, and hangs up.
pub fn meeting(data: &[u8]) {
    let secret = [7; SECRET_BYTES];
    let Ok(mut beacon) = Beacon::alone(secret, RANKS) else { return };
    // The end of the loopback's ports is no fault of what is tried here.
    let Ok(mut stranger) = TcpStream::connect(beacon.address()) else { return };
    // The rank is a small number: the top bit of its first byte says that the tag is another group's.
    let stray = data.first().is_some_and(|b| b & 0x80 != 0);
    let bytes = match data.split_at_checked(HEAD_BYTES) {
        Some((head, message)) => sealed(if stray { &[8; SECRET_BYTES] } else { &secret }, 0, head, message),
        None => Ok(data.to_vec()),
    };
    let Ok(bytes) = bytes else { return };
    if stranger.write_all(&bytes).and_then(|()| stranger.shutdown(Shutdown::Write)).is_err() {
        return;
    }
    let list = data.get(9..9 + SIGNATURE_BYTES).and_then(|l| l.try_into().ok()).unwrap_or([0; SIGNATURE_BYTES]);
    let members: Vec<usize> = (0..RANKS).collect();
    let mut m = Meeting::begin(&mut beacon, &members, &list, Duration::from_millis(1), None);
    for from in 1..RANKS {
        // What it is told is a sentence or bytes of the length that was asked for.
        if let Ok(got) = m.recv(from, ID_BYTES + 1, 0) {
            assert!(!stray, "a message with another group's tag was taken");
            assert_eq!(got.len(), ID_BYTES + 1);
        }
    }
}

/// What the others say in a vote, in the order in which it is asked for; nothing more once it is used up.
struct Heard {
    members: Vec<usize>,
    said: VecDeque<Vec<u8>>,
}

impl Messages for Heard {
    fn members(&self) -> &[usize] {
        &self.members
    }

    fn parent_ranks(&self) -> usize {
        self.members.len()
    }

    fn send(&mut self, to: usize, _: &[u8]) -> Result<(), String> {
        assert!(to < self.members.len());
        Ok(())
    }

    fn recv(&mut self, from: usize, bytes: usize, _: u32) -> Result<Vec<u8>, String> {
        assert!(from < self.members.len());
        match self.said.pop_front() {
            Some(mut b) => {
                b.resize(bytes, 0);
                Ok(b)
            }
            None => Err("silent".into()),
        }
    }
}

/// A vote in which the others say `said`; the position and their number are in the first two bytes.
pub fn vote(data: &[u8]) {
    let [r, n, rest @ ..] = data else { return };
    let n = usize::from(*n) % 64 + 1;
    let r = usize::from(*r) % n;
    let said = rest.chunks(ID_BYTES + 1).map(<[u8]>::to_vec).collect();
    let mut heard = Heard { members: (0..n).collect(), said };
    if let Err(why) = agree(&mut heard, r, n, &[0; SIGNATURE_BYTES], || Ok([1; ID_BYTES])) {
        let told = format!("{why:?}");
        assert!(!told.is_empty());
    }
}
