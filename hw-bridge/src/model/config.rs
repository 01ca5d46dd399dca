//! What the modelled server is: [`DeviceConfig`], plain data with defaults per family, and [`DeviceError`], why a
//! configuration is refused (env.md §4.1, reverse-abi.md §4.2 and §4.3).
//!
//! Nothing here reads the environment: the caller passes a look-up function once, and later changes have no effect.

use std::ffi::OsString;

use thiserror::Error;

use super::pci::{Bdf, Nic};
use super::pod::{PodConfig, PodError};
use super::silicon::{Arch, Family, Size};
use super::wiring::{PortRemap, Wiring};

/// `family.size` to pretend to be.
pub const FAKE_INSTANCE_TYPE: &str = "NEURON_RT_FAKE_INSTANCE_TYPE";
/// Physical cores per logical core, first choice.
pub const LOGICAL_NC_CONFIG: &str = "NEURON_LOGICAL_NC_CONFIG";
/// Physical cores per logical core, second choice.
pub const VIRTUAL_CORE_SIZE: &str = "NEURON_RT_VIRTUAL_CORE_SIZE";
/// Accelerators of the server.
pub const DEVICE_COUNT: &str = "NEURON_DEVICE_COUNT";
/// Logical cores to use, 0 for all.
pub const NUM_CORES: &str = "NEURON_RT_NUM_CORES";
/// List of logical cores to use, such as `0-3,8`.
pub const VISIBLE_CORES: &str = "NEURON_RT_VISIBLE_CORES";

/// Logical cores that a list of visible cores may name: those of the largest server, 32 accelerators of 8 cores.
pub const MAX_LOGICAL_CORES: u32 = 256;
/// NICs of a server.
pub const MAX_NICS: usize = 64;
/// Largest server id: with the accelerator's four bits it still fits the int of a routing id.
pub const MAX_SERVER_ID: u32 = (i32::MAX >> 4) as u32;

/// The driver's table host device id → routing id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RoutingTable {
    /// Device i has routing id i; on switch-v1, `server_id × 16 + i`.
    #[default]
    Family,
    /// These pairs (host device id, routing id); every device of the server must be listed.
    Table(Vec<(i32, i32)>),
    /// The driver has no table: building accelerator maps fails.
    Absent,
}

/// The modelled server. Fields that are `None` take the family's default.
///
/// [`DeviceConfig::default`] is the project's default: a trn2.48xlarge with one physical core per logical core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Instance family.
    pub family: Family,
    /// Instance size.
    pub size: Size,
    /// Accelerators; default by family and size.
    pub device_count: Option<u32>,
    /// Physical cores per accelerator; default: those of the silicon, which it may not exceed.
    pub cores_per_device: Option<u32>,
    /// NEURON_LOGICAL_NC_CONFIG: physical cores per logical core, first choice.
    pub logical_nc_config: Option<u32>,
    /// NEURON_RT_VIRTUAL_CORE_SIZE: the same, second choice.
    pub virtual_core_size: Option<u32>,
    /// NEURON_RT_NUM_CORES: logical cores this process uses; `None` for all.
    pub num_cores: Option<u32>,
    /// NEURON_RT_VISIBLE_CORES: the logical cores this process uses; goes before `num_cores`.
    pub visible_cores: Option<Vec<u32>>,
    /// Number of this server in its fabric; enters routing ids on switch-v1 and GUIDs everywhere.
    pub server_id: u32,
    /// Absolute ids the driver gives the devices (other than 0, 1, … under container remapping).
    pub host_device_ids: Option<Vec<i32>>,
    /// The driver's routing id table.
    pub routing: RoutingTable,
    /// PCI addresses of the accelerators.
    pub bdfs: Option<Vec<Bdf>>,
    /// NUMA nodes of the server.
    pub numa_nodes: Option<u32>,
    /// NUMA node of each accelerator.
    pub device_numa: Option<Vec<u32>>,
    /// NICs.
    pub nics: Option<Vec<Nic>>,
    /// Accelerator links.
    pub wiring: Wiring,
    /// Port renumbering of the TRN2 and TRN3 families.
    pub port_remap: PortRemap,
    /// The server's place in a pod.
    pub pod: PodConfig,
    /// Hardware revision letter.
    pub hardware_revision: char,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        DeviceConfig { logical_nc_config: Some(1), ..DeviceConfig::of(Family::Trn2, Size::Xl48) }
    }
}

/// Why a model cannot be made, or a question about it has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// NEURON_RT_FAKE_INSTANCE_TYPE names a family that does not exist.
    #[error(
        "{FAKE_INSTANCE_TYPE} is \"{value}\", whose family is unknown; set it to family.size, with one of the families \
         {known} (or the family's number)"
    )]
    UnknownFamily {
        /// The variable's value.
        value: String,
        /// Families that exist.
        known: String,
    },
    /// NEURON_RT_FAKE_INSTANCE_TYPE names a size that does not exist.
    #[error(
        "{FAKE_INSTANCE_TYPE} is \"{value}\", whose size is unknown; set it to family.size, with one of the sizes {known} \
         (or the size's number)"
    )]
    UnknownSize {
        /// The variable's value.
        value: String,
        /// Sizes that exist.
        known: String,
    },
    /// The family exists and is not modelled.
    #[error("instance family {family} is not modelled; use one of the families {known}")]
    FamilyNotModelled {
        /// The family's name.
        family: &'static str,
        /// Families that are.
        known: String,
    },
    /// A variable does not parse.
    #[error("{name} is \"{value}\", expected {expected}; correct or unset the variable")]
    BadVariable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// The number of accelerators does not fit the family.
    #[error(
        "a {family} server with {count} accelerators cannot be modelled, expected 1 to {max}; correct {DEVICE_COUNT} or \
         device_count"
    )]
    DeviceCount {
        /// Accelerators asked for.
        count: u32,
        /// The family's name.
        family: &'static str,
        /// The family's maximum.
        max: u32,
    },
    /// The number of cores does not fit the silicon.
    #[error(
        "{cores} cores per accelerator cannot be modelled on {arch}, expected 1 to {max}; correct cores_per_device"
    )]
    CoresPerDevice {
        /// Cores asked for.
        cores: u32,
        /// The silicon's name.
        arch: &'static str,
        /// Its cores.
        max: u32,
    },
    /// The logical core size is not a power of two that divides the cores of a device.
    #[error(
        "logical core size {size} is not possible, expected a power of two that divides the {cores} cores of an \
         accelerator; correct {LOGICAL_NC_CONFIG} or {VIRTUAL_CORE_SIZE}"
    )]
    VirtualCoreSize {
        /// The size.
        size: u32,
        /// Physical cores per accelerator.
        cores: u32,
    },
    /// The logical core size is above the silicon's cap. The first sentence is the original's.
    #[error(
        "Only LNC Size of 2 is supported at most on {arch}, but logical core size {size} was asked for; set \
         {LOGICAL_NC_CONFIG} to 1 or 2"
    )]
    VirtualCoreSizeCap {
        /// The size.
        size: u32,
        /// The silicon's name.
        arch: &'static str,
    },
    /// More cores wanted than there are.
    #[error(
        "{name} asks for core {core}, but the server has logical cores 0 to {}; lower it, or use a larger instance",
        .total - 1
    )]
    CoreOutOfRange {
        /// The variable.
        name: &'static str,
        /// The highest core it needs.
        core: u32,
        /// Logical cores of the server.
        total: u32,
    },
    /// A list of the configuration has the wrong length.
    #[error("{field} has {given} entries, but the server has {expected} accelerators; give one entry for each")]
    ListLength {
        /// The field.
        field: &'static str,
        /// Its length.
        given: usize,
        /// Accelerators.
        expected: usize,
    },
    /// A field of the configuration makes no sense.
    #[error("{field} is wrong for entry {index}: {reason}; correct the configuration")]
    BadField {
        /// The field.
        field: &'static str,
        /// Position in it.
        index: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// A link of the wiring table.
    #[error("port {port} of routing id {rid} is wired wrongly: {reason}; correct the wiring table")]
    Wiring {
        /// Routing id.
        rid: usize,
        /// Port.
        port: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// A row of the port remap.
    #[error(
        "the port remap of accelerator {mla} is {row:?}, which is no permutation of the ports 0 to 3; correct the row"
    )]
    PortRemap {
        /// Accelerator.
        mla: usize,
        /// Its row.
        row: [u8; 4],
    },
    /// The server's place in its pod.
    #[error("the pod configuration was refused")]
    Pod(#[source] PodError),
    /// A device id that the server does not have.
    #[error("device {nec_dev_id} does not exist on this server; pass an id that nec_get_device_count lists")]
    NoSuchDevice {
        /// The id.
        nec_dev_id: i32,
    },
    /// A logical core that the server does not have.
    #[error("logical core {core} does not exist, the server has 0 to {}; correct the core", .total - 1)]
    NoSuchCore {
        /// The core.
        core: u32,
        /// Logical cores of the server.
        total: u32,
    },
    /// A rank outside its world.
    #[error("rank {rank} is not in a server of {nranks} ranks; pass a rank from 0 to the number of ranks, exclusive")]
    RankOutOfRange {
        /// The rank.
        rank: u32,
        /// Ranks on the server.
        nranks: u32,
    },
    /// More ranks than cores.
    #[error(
        "{nranks} ranks do not fit on {total} logical cores ({devices} accelerators of {per_device}); start fewer ranks per \
         server, choose a larger {FAKE_INSTANCE_TYPE} or a smaller {LOGICAL_NC_CONFIG}"
    )]
    NotEnoughCores {
        /// Ranks.
        nranks: u32,
        /// Logical cores.
        total: u32,
        /// Accelerators.
        devices: u32,
        /// Logical cores per accelerator.
        per_device: u32,
    },
    /// No accepted set of accelerators is used completely by so many ranks.
    #[error(
        "{nranks} ranks do not fill 1, 4, 8 or 16 of the {devices} accelerators with {per_device} logical cores each, and no \
         other set is a valid topology; start a number of ranks that does"
    )]
    NoDeviceSet {
        /// Ranks.
        nranks: u32,
        /// Accelerators.
        devices: u32,
        /// Logical cores per accelerator.
        per_device: u32,
    },
}

impl DeviceConfig {
    /// A server of this family and size, everything else as the family has it. The logical core size follows
    /// reverse-abi.md §4.3, that is 2 where the silicon can.
    pub fn of(family: Family, size: Size) -> DeviceConfig {
        DeviceConfig {
            family,
            size,
            device_count: None,
            cores_per_device: None,
            logical_nc_config: None,
            virtual_core_size: None,
            num_cores: None,
            visible_cores: None,
            server_id: 0,
            host_device_ids: None,
            routing: RoutingTable::Family,
            bdfs: None,
            numa_nodes: None,
            device_numa: None,
            nics: None,
            wiring: Wiring::Family,
            port_remap: PortRemap::default(),
            pod: PodConfig::default(),
            hardware_revision: 'B',
        }
    }

    /// The server that the variables describe; `look_up` answers the value of a variable, if it is set. An empty value
    /// counts as unset, one that is no text does not.
    ///
    /// With neither an instance type nor a logical core size set, this is the project's default, one physical core per
    /// logical core; as soon as one of them is set, reverse-abi.md §4.3 decides.
    ///
    /// # Errors
    /// [`DeviceError`] for a value that does not parse. What the values mean together is checked by
    /// [`DeviceModel::new`](super::DeviceModel::new).
    pub fn from_vars(look_up: impl Fn(&str) -> Option<OsString>) -> Result<DeviceConfig, DeviceError> {
        let var = |name: &'static str| -> Result<Option<String>, DeviceError> {
            let text = look_up(name).map(OsString::into_string).transpose().map_err(|bytes| {
                let value = bytes.as_encoded_bytes().escape_ascii().to_string();
                DeviceError::BadVariable { name, value, expected: "text in UTF-8" }
            })?;
            Ok(text.map(|v| v.trim().to_owned()).filter(|v| !v.is_empty()))
        };
        let number = |name: &'static str, expected: &'static str| -> Result<Option<u32>, DeviceError> {
            let Some(value) = var(name)? else {
                return Ok(None);
            };
            value.parse().map(Some).map_err(|_| DeviceError::BadVariable { name, value, expected })
        };
        let instance = var(FAKE_INSTANCE_TYPE)?.map(|value| parse_instance_type(&value)).transpose()?;
        let logical_nc_config = number(LOGICAL_NC_CONFIG, "the number of physical cores per logical core")?;
        let virtual_core_size = number(VIRTUAL_CORE_SIZE, "the number of physical cores per logical core")?;
        let mut config = match instance {
            Some((family, size)) => DeviceConfig::of(family, size),
            None => DeviceConfig::default(),
        };
        if instance.is_some() || logical_nc_config.is_some() || virtual_core_size.is_some() {
            config.logical_nc_config = logical_nc_config;
            config.virtual_core_size = virtual_core_size;
        }
        config.device_count = number(DEVICE_COUNT, "a number of accelerators")?;
        config.num_cores = number(NUM_CORES, "a number of cores, 0 for all")?.filter(|n| *n != 0);
        config.visible_cores = var(VISIBLE_CORES)?.map(|value| parse_core_list(&value)).transpose()?;
        Ok(config)
    }

    /// Accelerators of an instance of this family and size.
    pub(super) fn default_device_count(&self) -> u32 {
        match (self.family, self.size) {
            (family, Size::Xl24) if family.is_inf2_family() => 6,
            (family, Size::Xl48 | Size::Xl32) if family.is_inf2_family() => 12,
            (_, Size::Xl48 | Size::Xl32) => 16,
            // An unrecognised mariana product counts as 2xlarge (§4.2), so that is no small instance there.
            (family, Size::Xl2 | Size::Unknown) if family.is_trn3_family() => 16,
            (_, Size::Xl24) => 8,
            _ => 1,
        }
    }

    /// NICs of a full server of this family, and their speed in Mbit/s. Inf2 has none that collectives use.
    pub(super) fn default_nics(&self) -> (u32, u32) {
        match self.family {
            Family::Trn1N => (16, 100_000),
            family if family.is_trn1_family() => (8, 100_000),
            family if family.is_trn2_family() => (16, 200_000),
            family if family.is_trn3_family() => (16, 400_000),
            _ => (0, 0),
        }
    }
}

/// The rule of reverse-abi.md §4.3 for the number of physical cores per logical core.
///
/// # Errors
/// [`DeviceError::VirtualCoreSize`], [`DeviceError::VirtualCoreSizeCap`]; both are NRT_INVALID to the original's
/// caller.
pub fn virtual_core_size(
    arch: Arch,
    cores_per_device: u32,
    logical_nc_config: Option<u32>,
    virtual_core_size: Option<u32>,
) -> Result<u32, DeviceError> {
    let size = match arch {
        Arch::Sunda => 1,
        Arch::Cayman | Arch::Mariana => {
            let default = if cores_per_device == 1 { 1 } else { 2 };
            logical_nc_config.or(virtual_core_size).unwrap_or(default)
        }
    };
    if !size.is_power_of_two() || !cores_per_device.is_multiple_of(size) {
        return Err(DeviceError::VirtualCoreSize { size, cores: cores_per_device });
    }
    if size > arch.max_virtual_core_size() {
        return Err(DeviceError::VirtualCoreSizeCap { size, arch: arch.name() });
    }
    Ok(size)
}

/// `family.size` by names or by numbers. A family alone means its largest server.
fn parse_instance_type(value: &str) -> Result<(Family, Size), DeviceError> {
    let (family_text, size_text) = value.split_once('.').map_or((value, None), |(f, s)| (f, Some(s)));
    let by_number = |text: &str| text.parse::<u32>().ok();
    let family = Family::from_name(family_text)
        .or_else(|| by_number(family_text).and_then(Family::from_number))
        .ok_or_else(|| DeviceError::UnknownFamily { value: value.to_owned(), known: Family::modelled_names() })?;
    let Some(size_text) = size_text else {
        return Ok((family, if family.is_trn1_family() { Size::Xl32 } else { Size::Xl48 }));
    };
    let size = Size::from_name(size_text)
        .or_else(|| by_number(size_text).and_then(Size::from_number))
        .ok_or_else(|| DeviceError::UnknownSize { value: value.to_owned(), known: Size::known_names() })?;
    Ok((family, size))
}

/// `0-3,8`: cores and ranges, each core once, in the order given.
fn parse_core_list(value: &str) -> Result<Vec<u32>, DeviceError> {
    let bad = || DeviceError::BadVariable {
        name: VISIBLE_CORES,
        value: value.to_owned(),
        expected: "a list of different cores and ascending ranges below 256, such as 0-3,8",
    };
    let mut cores: Vec<u32> = Vec::new();
    for item in value.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let first: u32 = first.trim().parse().map_err(|_| bad())?;
        let last: u32 = last.trim().parse().map_err(|_| bad())?;
        // The bound comes before the expansion, so that a huge range allocates nothing.
        if first > last || last >= MAX_LOGICAL_CORES {
            return Err(bad());
        }
        for core in first..=last {
            if cores.contains(&core) {
                return Err(bad());
            }
            cores.push(core);
        }
    }
    Ok(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> Result<DeviceConfig, DeviceError> {
        DeviceConfig::from_vars(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
    }

    #[test]
    fn nothing_set_is_the_project_default() {
        assert_eq!(from(&[]), Ok(DeviceConfig::default()));
        assert_eq!(from(&[(FAKE_INSTANCE_TYPE, " "), (DEVICE_COUNT, "")]), Ok(DeviceConfig::default()));
        let config = DeviceConfig::default();
        assert_eq!((config.family, config.size, config.logical_nc_config), (Family::Trn2, Size::Xl48, Some(1)));
        // Another variable does not change the logical core size.
        assert_eq!(from(&[(DEVICE_COUNT, "4")]).unwrap().logical_nc_config, Some(1));
        // A core size or an instance type brings the original's rule.
        let config = from(&[(VIRTUAL_CORE_SIZE, "2")]).unwrap();
        assert_eq!((config.logical_nc_config, config.virtual_core_size), (None, Some(2)));
        assert_eq!(from(&[(FAKE_INSTANCE_TYPE, "trn2.48xlarge")]).unwrap().logical_nc_config, None);
    }

    #[test]
    fn a_value_that_is_no_text_is_refused_by_name() {
        use std::os::unix::ffi::OsStringExt;
        for name in [FAKE_INSTANCE_TYPE, LOGICAL_NC_CONFIG, VIRTUAL_CORE_SIZE, DEVICE_COUNT, NUM_CORES, VISIBLE_CORES] {
            let look_up = |asked: &str| (asked == name).then(|| OsString::from_vec(b"1\xff".to_vec()));
            let e = DeviceConfig::from_vars(look_up).unwrap_err().to_string();
            assert!(e.contains(&format!("{name} is \"1\\xff\", expected text in UTF-8")), "{e}");
        }
    }

    #[test]
    fn instance_types_are_names_or_numbers() {
        let parse = |value: &str| from(&[(FAKE_INSTANCE_TYPE, value)]).map(|c| (c.family, c.size));
        assert_eq!(parse("trn2.48xlarge"), Ok((Family::Trn2, Size::Xl48)));
        assert_eq!(parse("TRN1.32XL"), Ok((Family::Trn1, Size::Xl32)));
        assert_eq!(parse("inf2.48xlarge"), Ok((Family::Inf2, Size::Xl48)));
        assert_eq!(parse("inf2.xlarge"), Ok((Family::Inf2, Size::Xl1)));
        assert_eq!(parse("trn3pds98.48xlarge"), Ok((Family::Trn3Pds98, Size::Xl48)));
        assert_eq!(parse("5.7"), Ok((Family::Trn2, Size::Xl48)));
        assert_eq!(parse("15.9"), Ok((Family::Trn3Pds98, Size::Unknown)));
        assert_eq!(parse("trn3"), Ok((Family::Trn3, Size::Xl48)));
        assert_eq!(parse("trn1"), Ok((Family::Trn1, Size::Xl32)));
        assert_eq!(
            parse("p5.48xlarge").unwrap_err().to_string(),
            "NEURON_RT_FAKE_INSTANCE_TYPE is \"p5.48xlarge\", whose family is unknown; set it to family.size, with one of \
             the families trn1, trn1n, inf2, trn2, trn2n, inf2e, trn2p, trn2u, trn2e, trn2eu, trn2ac, trn2uac, trn3, \
             trn3pds98 (or the family's number)"
        );
        assert_eq!(
            parse("trn2.5xlarge").unwrap_err().to_string(),
            "NEURON_RT_FAKE_INSTANCE_TYPE is \"trn2.5xlarge\", whose size is unknown; set it to family.size, with one of \
             the sizes xlarge, 2xlarge, 4xlarge, 6xlarge, 8xlarge, 24xlarge, 32xlarge, 48xlarge, 3xlarge (or the size's \
             number)"
        );
        assert!(matches!(parse("16.7"), Err(DeviceError::UnknownFamily { .. })));
        assert!(matches!(parse("5.10"), Err(DeviceError::UnknownSize { .. })));
        assert!(matches!(parse("trn2."), Err(DeviceError::UnknownSize { .. })));
        assert!(matches!(parse("."), Err(DeviceError::UnknownFamily { .. })));
    }

    #[test]
    fn core_lists_are_parsed_and_bounded() {
        let parse = |value: &str| from(&[(VISIBLE_CORES, value)]).map(|c| c.visible_cores);
        assert_eq!(parse("0-3,8, 6"), Ok(Some(vec![0, 1, 2, 3, 8, 6])));
        assert_eq!(parse("255"), Ok(Some(vec![255])));
        for bad in ["3-0", "1,1", "0-3,2", "256", "0-4294967295", "-1", "a", ",", "1,,2", "1-2-3"] {
            assert!(matches!(parse(bad), Err(DeviceError::BadVariable { name: VISIBLE_CORES, .. })), "{bad}");
        }
    }

    #[test]
    fn numbers_are_checked() {
        assert_eq!(from(&[(NUM_CORES, "0")]).unwrap().num_cores, None);
        assert_eq!(from(&[(NUM_CORES, "3")]).unwrap().num_cores, Some(3));
        for name in [LOGICAL_NC_CONFIG, VIRTUAL_CORE_SIZE, DEVICE_COUNT, NUM_CORES] {
            for value in ["x", "-1", "4294967296", "1.5"] {
                assert!(matches!(from(&[(name, value)]), Err(DeviceError::BadVariable { .. })), "{name}={value}");
            }
        }
        assert_eq!(
            from(&[(DEVICE_COUNT, "four")]).unwrap_err().to_string(),
            "NEURON_DEVICE_COUNT is \"four\", expected a number of accelerators; correct or unset the variable"
        );
    }

    #[test]
    fn virtual_core_size_follows_the_rule() {
        // Sunda is forced to 1 whatever the variables say, even nonsense.
        assert_eq!(virtual_core_size(Arch::Sunda, 2, Some(2), Some(7)), Ok(1));
        for arch in [Arch::Cayman, Arch::Mariana] {
            assert_eq!(virtual_core_size(arch, 8, None, None), Ok(2));
            assert_eq!(virtual_core_size(arch, 1, None, None), Ok(1));
            assert_eq!(virtual_core_size(arch, 8, Some(1), Some(2)), Ok(1), "the first choice wins");
            assert_eq!(virtual_core_size(arch, 8, None, Some(1)), Ok(1));
            for size in [0, 3, 16] {
                let error = virtual_core_size(arch, 8, Some(size), None).unwrap_err();
                assert_eq!(error, DeviceError::VirtualCoreSize { size, cores: 8 });
            }
            assert!(matches!(virtual_core_size(arch, 7, None, None), Err(DeviceError::VirtualCoreSize { .. })));
            assert!(matches!(virtual_core_size(arch, 1, Some(2), None), Err(DeviceError::VirtualCoreSize { .. })));
            for size in [4, 8] {
                let error = virtual_core_size(arch, 8, Some(size), None).unwrap_err();
                assert!(error.to_string().starts_with("Only LNC Size of 2 is supported"), "{error}");
            }
        }
        assert_eq!(
            virtual_core_size(Arch::Cayman, 8, Some(0), None).unwrap_err().to_string(),
            "logical core size 0 is not possible, expected a power of two that divides the 8 cores of an accelerator; \
             correct NEURON_LOGICAL_NC_CONFIG or NEURON_RT_VIRTUAL_CORE_SIZE"
        );
    }
}
