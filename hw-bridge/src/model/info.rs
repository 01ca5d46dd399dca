//! Who the machine and the runtime say they are: `nrt_instance_info_t` and `nrt_version_t` (reverse-abi.md §4.2, §4.5).
//!
//! Both are computed once, when the model is made, and never change afterwards.

use super::silicon::{Arch, Family, Size};

/// Characters of an architecture name, without the terminator of the original's `char[16]`.
pub const ARCH_NAME_MAX: usize = 15;
/// Characters of a device revision, without the terminator of the original's `char[8]`.
pub const DEVICE_REVISION_MAX: usize = 7;

/// What `nrt_get_instance_info` answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceInfo {
    /// Instance family.
    pub family: Family,
    /// Instance size.
    pub size: Size,
    /// Name of the silicon, at most [`ARCH_NAME_MAX`] characters.
    pub arch_name: String,
    /// Revision of the silicon, at most [`DEVICE_REVISION_MAX`] characters.
    pub device_revision: String,
}

impl InstanceInfo {
    pub(super) fn new(family: Family, size: Size, arch: Arch, hardware_revision: char) -> InstanceInfo {
        InstanceInfo {
            family,
            size,
            arch_name: arch.name().to_owned(),
            device_revision: device_revision(arch, hardware_revision),
        }
    }

    /// The original's 32 bytes: family @0, size @4 (little-endian), `arch_name` @8, `device_revision` @24, both
    /// zero-terminated. A caller with a shorter buffer gets the first `n` bytes of it.
    pub fn to_bytes(&self) -> [u8; 32] {
        let mut bytes = [0u8; 32];
        bytes[0..4].copy_from_slice(&self.family.number().to_le_bytes());
        bytes[4..8].copy_from_slice(&self.size.number().to_le_bytes());
        copy_text(&mut bytes[8..8 + ARCH_NAME_MAX], &self.arch_name);
        copy_text(&mut bytes[24..24 + DEVICE_REVISION_MAX], &self.device_revision);
        bytes
    }
}

fn copy_text(field: &mut [u8], text: &str) {
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = from;
    }
}

/// "pre" on mariana up to hardware revision 'A'. The original's table for the rest is not recorded; letter and "0" is
/// the model's.
fn device_revision(arch: Arch, hardware_revision: char) -> String {
    if arch == Arch::Mariana && hardware_revision <= 'A' { "pre".to_owned() } else { format!("{hardware_revision}0") }
}

/// What `nrt_get_version` answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NrtVersion {
    /// Major number.
    pub rt_major: u64,
    /// Minor number.
    pub rt_minor: u64,
    /// Patch number.
    pub rt_patch: u64,
    /// Maintenance number.
    pub rt_maintenance: u64,
    /// Package version, at most 127 characters.
    pub rt_detail: &'static str,
    /// Commit id, at most 63 characters; the library uses the first 8.
    pub git_hash: &'static str,
}

/// The runtime this project stands in for (forward-abi.md §6).
pub const NRT_VERSION: NrtVersion = NrtVersion {
    rt_major: 2,
    rt_minor: 31,
    rt_patch: 24,
    rt_maintenance: 0,
    rt_detail: "2.31.24.0-0b044f4ce",
    git_hash: "0b044f4ce917b633a70eb3d0bc460f34ac3da620",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_info_has_the_original_layout() {
        let info = InstanceInfo::new(Family::Trn2, Size::Xl48, Arch::Cayman, 'B');
        let bytes = info.to_bytes();
        assert_eq!(bytes[0..8], [5, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(&bytes[8..24], b"cayman\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(&bytes[24..32], b"B0\0\0\0\0\0\0");
        // Over-long text is cut before the terminator.
        let long = InstanceInfo { arch_name: "x".repeat(40), device_revision: "y".repeat(40), ..info };
        let bytes = long.to_bytes();
        assert_eq!((bytes[22], bytes[23], bytes[30], bytes[31]), (b'x', 0, b'y', 0));
    }

    #[test]
    fn early_mariana_is_pre() {
        assert_eq!(device_revision(Arch::Mariana, 'A'), "pre");
        assert_eq!(device_revision(Arch::Mariana, 'B'), "B0");
        assert_eq!(device_revision(Arch::Cayman, 'A'), "A0");
    }

    #[test]
    fn version_is_that_of_the_original() {
        let v = NRT_VERSION;
        assert_eq!((v.rt_major, v.rt_minor, v.rt_patch, v.rt_maintenance), (2, 31, 24, 0));
        assert!(v.rt_detail.len() <= 127 && v.git_hash.len() <= 63);
        assert_eq!(&v.git_hash[..8], "0b044f4c");
        assert!(v.rt_detail.starts_with("2.31.24.0"));
    }
}
