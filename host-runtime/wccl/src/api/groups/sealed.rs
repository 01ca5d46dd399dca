//! Messages of a verdict that a plugin carries, sealed: it can hold them back, and not change one, put one in another's place, or
//! keep one for later.
//!
//! ```text
//! about 16 | message | tag 32
//! about: the first bytes of HMAC-SHA256 by the new group's key, for the label "about"
//! tag:   HMAC-SHA256 by the parent's key, for the label "verdict", of: about | from u32 | to u32 | message
//! ```
//!
//! The new group's key is made of its kind, its members in their order and how many with this list came before
//! ([`sandbox::key`]), so `about` stands for all of these; the ranks are the parent's. Between two members one message goes
//! in each direction, so its place is known by both ranks, and none needs a number. A message of another group that its
//! rank has sealed says that the ranks make different groups, which is told.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::api::groups::verdict::Messages;
use sandbox::key::GroupKey;

const ABOUT_BYTES: usize = 16;
const TAG_BYTES: usize = 32;
/// What a seal adds to a message.
pub(super) const SEAL_BYTES: usize = ABOUT_BYTES + TAG_BYTES;

/// Messages over `by`, sealed for one group of a parent.
#[derive(Debug)]
pub(super) struct Sealed<M> {
    pub(super) by: M,
    parent: GroupKey,
    about: [u8; ABOUT_BYTES],
    /// This rank, in the parent.
    me: usize,
    /// What came in some message's place was none: later ones may be out of place, too.
    pub(super) broken: bool,
}

impl<M: Messages> Sealed<M> {
    /// Those of rank `me` of a parent with the key `parent`, about the group with the key `group`.
    pub(super) fn new(by: M, parent: GroupKey, group: GroupKey, me: usize) -> Sealed<M> {
        let mut about = [0; ABOUT_BYTES];
        about.copy_from_slice(&group.tag("about").finalize().into_bytes()[..ABOUT_BYTES]);
        Sealed { by, parent, about, me, broken: false }
    }

    fn tag(&self, about: &[u8], from: usize, to: usize, data: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.parent.tag("verdict");
        for part in [about, &(from as u32).to_le_bytes(), &(to as u32).to_le_bytes(), data] {
            mac.update(part);
        }
        mac
    }

    /// The message of rank `from` in what was received.
    fn open(&self, from: usize, sealed: &[u8]) -> Result<Vec<u8>, String> {
        let me = self.me;
        let forged = || {
            format!(
                "what the plugin delivered as the message of rank {from} to rank {me} is not what rank {from} said to it"
            )
        };
        let (about, rest) = sealed.split_at_checked(ABOUT_BYTES).ok_or_else(forged)?;
        let (data, tag) = rest.split_at_checked(rest.len().saturating_sub(TAG_BYTES)).ok_or_else(forged)?;
        self.tag(about, from, me, data).verify_slice(tag).map_err(|_| forged())?;
        if about != self.about {
            return Err(format!(
                "rank {from} speaks of another group than rank {me}; make the same groups, of the same ranks in the same order, on all \
                 of them"
            ));
        }
        Ok(data.to_vec())
    }
}

impl<M: Messages> Messages for Sealed<M> {
    fn members(&self) -> &[usize] {
        self.by.members()
    }

    fn parent_ranks(&self) -> usize {
        self.by.parent_ranks()
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<(), String> {
        let tag = self.tag(&self.about, self.me, self.members()[to], data).finalize().into_bytes();
        self.by.send(to, &[&self.about, data, &tag[..]].concat())
    }

    fn recv(&mut self, from: usize, bytes: usize, rounds: u32) -> Result<Vec<u8>, String> {
        let sealed = self.by.recv(from, bytes + SEAL_BYTES, rounds)?;
        let rank = self.members()[from];
        self.open(rank, &sealed).inspect_err(|_| self.broken = true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::groups::signature::SIGNATURE_BYTES;
    use crate::api::groups::verdict::{Refusal, agree};
    use sandbox::key::GroupKind;
    use sandbox::limits::ID_BYTES;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Ranks 7 and 5 of a parent, in this order.
    const MEMBERS: [usize; 2] = [7, 5];

    type Carry<'a> = Box<dyn FnMut(Vec<u8>) -> Vec<u8> + Send + 'a>;

    /// What carries messages between two, and may do with them what it likes.
    struct Carried<'a> {
        to: Sender<Vec<u8>>,
        from: Receiver<Vec<u8>>,
        carry: Carry<'a>,
    }

    impl Messages for Carried<'_> {
        fn members(&self) -> &[usize] {
            &MEMBERS
        }
        fn parent_ranks(&self) -> usize {
            9
        }
        fn send(&mut self, _: usize, data: &[u8]) -> Result<(), String> {
            let carried = (self.carry)(data.to_vec());
            self.to.send(carried).map_err(|_| "closed".into())
        }
        fn recv(&mut self, _: usize, _: usize, _: u32) -> Result<Vec<u8>, String> {
            self.from.recv_timeout(std::time::Duration::from_secs(20)).map_err(|_| "closed".into())
        }
    }

    type Outcome = Result<[u8; ID_BYTES], Refusal>;

    /// Two ranks agree about the group with the key that each has in `groups`; `carry` is what becomes of the messages of each.
    fn agreed(groups: [GroupKey; 2], carry: [Carry<'_>; 2]) -> [Outcome; 2] {
        let ((a, from_a), (b, from_b)) = (channel(), channel());
        let [carry_a, carry_b] = carry;
        let (one, other) =
            (Carried { to: a, from: from_b, carry: carry_a }, Carried { to: b, from: from_a, carry: carry_b });
        let mut first = Sealed::new(one, GroupKey::of_id(&[0x4B; 32], 0), groups[0], MEMBERS[0]);
        let mut second = Sealed::new(other, GroupKey::of_id(&[0x4B; 32], 0), groups[1], MEMBERS[1]);
        std::thread::scope(|s| {
            let other = s.spawn(move || agree(&mut second, 1, 2, &[1; SIGNATURE_BYTES], || unreachable!()));
            let one = agree(&mut first, 0, 2, &[1; SIGNATURE_BYTES], || Ok([42; ID_BYTES]));
            [one, other.join().unwrap()]
        })
    }

    fn as_they_are<'a>() -> Carry<'a> {
        Box::new(|m| m)
    }

    fn split(nth: u32) -> GroupKey {
        GroupKey::of_id(&[0x4B; 32], 0).group(GroupKind::Split, &MEMBERS, nth)
    }

    fn why(o: &Outcome) -> &str {
        match o {
            Err(Refusal::Silent { why, .. }) => why,
            o => panic!("{o:?}"),
        }
    }

    /// No id is taken that the first rank did not make, and no yes that the second did not say, whichever byte is changed.
    #[test]
    fn who_carries_a_verdict_cannot_change_it() {
        assert_eq!(agreed([split(0); 2], [as_they_are(), as_they_are()]), [Ok([42; ID_BYTES]), Ok([42; ID_BYTES])]);
        for who in 0..2 {
            let len = SEAL_BYTES + [ID_BYTES + 1, SIGNATURE_BYTES + 1][who];
            for at in 0..len {
                let mut carry = [as_they_are(), as_they_are()];
                carry[who] = Box::new(move |mut m| {
                    assert_eq!(m.len(), len);
                    m[at] ^= 1;
                    m
                });
                let got = agreed([split(0); 2], carry);
                let forged = format!(
                    "the plugin delivered as the message of rank {} to rank {}",
                    MEMBERS[who],
                    MEMBERS[1 - who]
                );
                assert!(why(&got[1 - who]).contains(&forged), "byte {at}: {got:?}");
            }
        }
        for len in [0, 15, 20, SEAL_BYTES] {
            let got = agreed([split(0); 2], [as_they_are(), Box::new(move |m| m[..len].to_vec())]);
            assert!(got.iter().all(Result::is_err), "{len}: {got:?}");
        }
    }

    /// Not in a later group of the same ranks, one of another kind or of another order, and not in the other direction.
    #[test]
    fn a_message_of_a_verdict_has_one_place() {
        let said = [const { Mutex::new(Vec::new()) }; 2];
        let keep = |who: usize| -> Carry<'_> {
            let kept = &said[who];
            Box::new(move |m| {
                *kept.lock().unwrap() = m.clone();
                m
            })
        };
        assert!(agreed([split(0); 2], [keep(0), keep(1)]).iter().all(Result::is_ok));
        let parent = GroupKey::of_id(&[0x4B; 32], 0);
        for later in
            [split(1), parent.group(GroupKind::Replica, &MEMBERS, 0), parent.group(GroupKind::Split, &[5, 7], 0)]
        {
            for who in 0..2 {
                let mut carry = [as_they_are(), as_they_are()];
                carry[who] = Box::new(|_| said[who].lock().unwrap().clone());
                let got = agreed([later; 2], carry);
                assert!(why(&got[1 - who]).contains("speaks of another group"), "{got:?}");
            }
        }
        let ends = || (channel().0, channel().1);
        let (to, from) = ends();
        let me = Sealed::new(Carried { to, from, carry: as_they_are() }, parent, split(0), MEMBERS[0]);
        let own = said[0].lock().unwrap();
        assert!(me.open(MEMBERS[1], &own).unwrap_err().contains("is not what rank 5 said"));
    }

    #[test]
    fn ranks_that_make_different_groups_are_told() {
        let got = agreed([split(0), split(1)], [as_they_are(), as_they_are()]);
        for (o, (me, other)) in got.iter().zip([(7, 5), (5, 7)]) {
            let told = format!("rank {other} speaks of another group than rank {me}");
            assert!(why(o).contains(&told), "{o:?}");
        }
    }
}
