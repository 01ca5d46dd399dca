//! Ids that have served: each makes one group, once.

use std::collections::VecDeque;
use std::sync::Mutex;

use hmac::Mac;

use hw_bridge::os::lock::lock;
use sandbox::key::GroupKey;

/// Memberships that are remembered; who has an older id has tried it since, or never will.
const MOST_USED: usize = 4096;

/// Who was made a member by an id, the newest last: an id serves once, and who tries again is told so before it waits.
#[derive(Debug, Default)]
pub(crate) struct Used(Mutex<VecDeque<[u8; 16]>>);

impl Used {
    fn tag(key: &GroupKey, rank: usize) -> [u8; 16] {
        let mut tag = key.tag("used");
        tag.update(&(rank as u64).to_le_bytes());
        tag.finalize().into_bytes().first_chunk().copied().unwrap_or_default()
    }

    /// Whether this rank of the group with this key was made here.
    pub(crate) fn has(&self, key: &GroupKey, rank: usize) -> bool {
        lock(&self.0).contains(&Used::tag(key, rank))
    }

    /// It was.
    pub(crate) fn note(&self, key: &GroupKey, rank: usize) {
        let mut all = lock(&self.0);
        if all.len() >= MOST_USED {
            all.pop_front();
        }
        all.push_back(Used::tag(key, rank));
    }
}
