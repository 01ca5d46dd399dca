//! Silicon facts: instance families and sizes, architectures, and the four numberings of the same core
//! (reverse-abi.md §4.2, §7).
//!
//! Everything that depends on the kind of machine is a function of [`Family`] or [`Arch`], asked at run time: the
//! size of the fabric and the number of mesh folds double on the switch-v1 family although its silicon is the
//! same as that of TRN3 (INV-15). A core-type number means nothing without its [`Numbering`] (INV-16).

use thiserror::Error;

/// Instance family, with the original's numbers 0 to 15 (`nrt_instance_info_t.family`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Family {
    /// 0: not recognised.
    Unknown = 0,
    /// 1: first generation Inferentia; named, not modelled.
    Inf1 = 1,
    /// 2: Trainium.
    Trn1 = 2,
    /// 3: Trainium with twice the network.
    Trn1N = 3,
    /// 4: Inferentia 2.
    Inf2 = 4,
    /// 5: Trainium 2.
    Trn2 = 5,
    /// 6.
    Trn2N = 6,
    /// 7.
    Inf2E = 7,
    /// 8.
    Trn2P = 8,
    /// 9: Trainium 2 in an UltraServer.
    Trn2U = 9,
    /// 10.
    Trn2E = 10,
    /// 11.
    Trn2EU = 11,
    /// 12.
    Trn2AC = 12,
    /// 13.
    Trn2UAC = 13,
    /// 14: Trainium 3.
    Trn3 = 14,
    /// 15: Trainium 3 behind a switch, the switch-v1 family.
    Trn3Pds98 = 15,
}

impl Family {
    /// Every family, in the order of the numbers.
    pub const ALL: [Family; 16] = [
        Family::Unknown,
        Family::Inf1,
        Family::Trn1,
        Family::Trn1N,
        Family::Inf2,
        Family::Trn2,
        Family::Trn2N,
        Family::Inf2E,
        Family::Trn2P,
        Family::Trn2U,
        Family::Trn2E,
        Family::Trn2EU,
        Family::Trn2AC,
        Family::Trn2UAC,
        Family::Trn3,
        Family::Trn3Pds98,
    ];

    /// The original's number.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The family of a number, if there is one.
    pub fn from_number(number: u32) -> Option<Family> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// The original's name, in upper case.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Unknown => "UNKNOWN",
            Family::Inf1 => "INF1",
            Family::Trn1 => "TRN1",
            Family::Trn1N => "TRN1N",
            Family::Inf2 => "INF2",
            Family::Trn2 => "TRN2",
            Family::Trn2N => "TRN2N",
            Family::Inf2E => "INF2E",
            Family::Trn2P => "TRN2P",
            Family::Trn2U => "TRN2U",
            Family::Trn2E => "TRN2E",
            Family::Trn2EU => "TRN2EU",
            Family::Trn2AC => "TRN2AC",
            Family::Trn2UAC => "TRN2UAC",
            Family::Trn3 => "TRN3",
            Family::Trn3Pds98 => "TRN3PDS98",
        }
    }

    /// The family named so, in any case of letters; `UNKNOWN` is not a name one can ask for.
    pub fn from_name(name: &str) -> Option<Family> {
        Self::ALL[1..].iter().copied().find(|family| family.name().eq_ignore_ascii_case(name))
    }

    /// The silicon, or `None` for the two families that this model does not have (`UNKNOWN`, `INF1`).
    pub const fn arch(self) -> Option<Arch> {
        match self {
            Family::Unknown | Family::Inf1 => None,
            Family::Trn1 | Family::Trn1N | Family::Inf2 | Family::Inf2E => Some(Arch::Sunda),
            Family::Trn2
            | Family::Trn2N
            | Family::Trn2P
            | Family::Trn2U
            | Family::Trn2E
            | Family::Trn2EU
            | Family::Trn2AC
            | Family::Trn2UAC => Some(Arch::Cayman),
            Family::Trn3 | Family::Trn3Pds98 => Some(Arch::Mariana),
        }
    }

    /// TRN1 and TRN1N.
    pub const fn is_trn1_family(self) -> bool {
        matches!(self, Family::Trn1 | Family::Trn1N)
    }

    /// INF2 and INF2E.
    pub const fn is_inf2_family(self) -> bool {
        matches!(self, Family::Inf2 | Family::Inf2E)
    }

    /// The Trn2 variants: 5, 6 and 8 to 13.
    pub const fn is_trn2_family(self) -> bool {
        matches!(self, Family::Trn2 | Family::Trn2N) || (self as u32 >= 8 && self as u32 <= 13)
    }

    /// The Trn3 variants: 14 and 15. The switch-v1 family is one of them, so ask for that first (INV-46).
    pub const fn is_trn3_family(self) -> bool {
        matches!(self, Family::Trn3 | Family::Trn3Pds98)
    }

    /// The originals' "TRN2/TRN3 class": 5, 6 and 8 to 15. Only these remap ports.
    pub const fn is_trn2_or_trn3_family(self) -> bool {
        self.is_trn2_family() || self.is_trn3_family()
    }

    /// The family whose accelerators hang on a switch: 15.
    pub const fn is_switch_v1(self) -> bool {
        matches!(self, Family::Trn3Pds98)
    }

    /// Accelerators in the fabric: 32 on switch-v1, else 16 (`get_max_devs`, INV-15).
    pub const fn max_devices(self) -> u32 {
        if self.is_switch_v1() { 32 } else { 16 }
    }

    /// Folds of a mesh: 16 on switch-v1, else 8 (`get_mesh_max_folds`, INV-15).
    pub const fn max_mesh_folds(self) -> u32 {
        if self.is_switch_v1() { 16 } else { 8 }
    }

    /// PCI device ids that accelerators of this family may report; empty for a family that is not modelled.
    pub const fn pci_device_ids(self) -> &'static [u16] {
        match self.arch() {
            None => &[],
            Some(Arch::Sunda) if self.is_inf2_family() => &[0x7264],
            Some(Arch::Sunda) => &[0x7164],
            Some(Arch::Cayman) => &[0x7364],
            Some(Arch::Mariana) => &[0x7564, 0x7565],
        }
    }

    /// The names that [`Family::from_name`] knows and the model has, for error texts.
    pub(super) fn modelled_names() -> String {
        let names: Vec<String> =
            Self::ALL.iter().filter(|f| f.arch().is_some()).map(|f| f.name().to_ascii_lowercase()).collect();
        names.join(", ")
    }
}

/// Instance size, with the original's numbers 0 to 9 (`nrt_instance_info_t.size`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Size {
    /// 0: xlarge.
    Xl1 = 0,
    /// 1: 2xlarge.
    Xl2 = 1,
    /// 2: 4xlarge.
    Xl4 = 2,
    /// 3: 6xlarge.
    Xl6 = 3,
    /// 4: 8xlarge.
    Xl8 = 4,
    /// 5: 24xlarge.
    Xl24 = 5,
    /// 6: 32xlarge.
    Xl32 = 6,
    /// 7: 48xlarge.
    Xl48 = 7,
    /// 8: 3xlarge.
    Xl3 = 8,
    /// 9: not recognised; also the count of sizes.
    Unknown = 9,
}

impl Size {
    /// Every size, in the order of the numbers.
    pub const ALL: [Size; 10] = [
        Size::Xl1,
        Size::Xl2,
        Size::Xl4,
        Size::Xl6,
        Size::Xl8,
        Size::Xl24,
        Size::Xl32,
        Size::Xl48,
        Size::Xl3,
        Size::Unknown,
    ];

    /// The original's number.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The size of a number, if there is one.
    pub fn from_number(number: u32) -> Option<Size> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// The original's name, such as `48XL`.
    pub const fn name(self) -> &'static str {
        match self {
            Size::Xl1 => "1XL",
            Size::Xl2 => "2XL",
            Size::Xl4 => "4XL",
            Size::Xl6 => "6XL",
            Size::Xl8 => "8XL",
            Size::Xl24 => "24XL",
            Size::Xl32 => "32XL",
            Size::Xl48 => "48XL",
            Size::Xl3 => "3XL",
            Size::Unknown => "UNKNOWN",
        }
    }

    /// The product's name, such as `48xlarge`.
    pub const fn product_name(self) -> &'static str {
        match self {
            Size::Xl1 => "xlarge",
            Size::Xl2 => "2xlarge",
            Size::Xl4 => "4xlarge",
            Size::Xl6 => "6xlarge",
            Size::Xl8 => "8xlarge",
            Size::Xl24 => "24xlarge",
            Size::Xl32 => "32xlarge",
            Size::Xl48 => "48xlarge",
            Size::Xl3 => "3xlarge",
            Size::Unknown => "unknown",
        }
    }

    /// The size named so, as product (`48xlarge`, `xlarge`) or short (`48XL`), in any case of letters; `UNKNOWN` is
    /// not a name one can ask for.
    pub fn from_name(name: &str) -> Option<Size> {
        let known = &Self::ALL[..Self::ALL.len() - 1];
        if name.eq_ignore_ascii_case("1xlarge") || name.eq_ignore_ascii_case("xl") {
            return Some(Size::Xl1);
        }
        known
            .iter()
            .copied()
            .find(|size| size.name().eq_ignore_ascii_case(name) || size.product_name().eq_ignore_ascii_case(name))
    }

    /// The names that [`Size::from_name`] knows, for error texts.
    pub(super) fn known_names() -> String {
        let names: Vec<&str> = Self::ALL[..Self::ALL.len() - 1].iter().map(|s| s.product_name()).collect();
        names.join(", ")
    }
}

/// Family and size from a product name as hardware reports it, split at the first ".".
///
/// The exceptions of reverse-abi.md §4.2: a product starting `EPIC-TGH7` is TRN2; an unrecognised product on mariana
/// is TRN3; the unknown size on mariana is 2XL. Elsewhere the unrecognised stays `UNKNOWN`.
pub fn identify_product(product: &str, arch: Arch) -> (Family, Size) {
    let (family_name, size_name) = product.split_once('.').unwrap_or((product, ""));
    let family = match Family::from_name(family_name) {
        _ if product.starts_with("EPIC-TGH7") => Family::Trn2,
        Some(family) => family,
        None if arch == Arch::Mariana => Family::Trn3,
        None => Family::Unknown,
    };
    let size = match Size::from_name(size_name) {
        Some(size) => size,
        None if arch == Arch::Mariana => Size::Xl2,
        None => Size::Unknown,
    };
    (family, size)
}

/// Architecture of the silicon, in the numbering of kernel, HAL and encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Arch {
    /// 2: Trn1 and Inf2.
    Sunda = 2,
    /// 3: Trn2.
    Cayman = 3,
    /// 4: Trn3.
    Mariana = 4,
}

/// Queues of an engine that collectives may use; the position is the relative index.
const CC_QUEUES: [u32; 4] = [11, 12, 13, 15];

impl Arch {
    /// Every architecture.
    pub const ALL: [Arch; 3] = [Arch::Sunda, Arch::Cayman, Arch::Mariana];

    /// The encoder's number.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The name, at most 15 characters.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Sunda => "sunda",
            Arch::Cayman => "cayman",
            Arch::Mariana => "mariana",
        }
    }

    /// Physical cores of one accelerator.
    pub const fn cores_per_device(self) -> u32 {
        match self {
            Arch::Sunda => 2,
            Arch::Cayman | Arch::Mariana => 8,
        }
    }

    /// Sequencer engines of one accelerator.
    pub const fn sengines_per_device(self) -> u32 {
        match self {
            Arch::Sunda => 2,
            Arch::Cayman | Arch::Mariana => 4,
        }
    }

    /// Sequencer engine of a physical core: `core >> 1` on all silicon.
    pub const fn sengine_of_core(self, core: u32) -> u32 {
        core >> 1
    }

    /// Die of a physical core, on silicon that has more than one die.
    pub const fn die_of_core(self, core: u32) -> Option<u32> {
        match self {
            Arch::Sunda => None,
            Arch::Cayman | Arch::Mariana => Some(core >> 2),
        }
    }

    /// `max_links_per_pod_port`, on silicon that has pod ports.
    pub const fn max_links_per_pod_port(self) -> Option<u32> {
        match self {
            Arch::Sunda => None,
            Arch::Cayman => Some(1),
            Arch::Mariana => Some(2),
        }
    }

    /// DMA engine of an inter-RDH index, or -1 outside the map.
    pub fn inter_rdh_dma(self, index: u32) -> i32 {
        let map: [i32; 2] = match self {
            Arch::Sunda => [0, 1],
            Arch::Cayman | Arch::Mariana => [4, 5],
        };
        usize::try_from(index).ok().and_then(|i| map.get(i).copied()).unwrap_or(-1)
    }

    /// Folds of inter-RDH. The sources give mariana's value only; the other two follow it.
    pub const fn inter_rdh_folds(self) -> u32 {
        2
    }

    /// Relative index (0 to 3) of a queue that collectives may use.
    pub fn relative_queue(self, queue: u32) -> Option<u32> {
        CC_QUEUES.iter().zip(0..).find(|(q, _)| **q == queue).map(|(_, index)| index)
    }

    /// Valid size of one state-buffer partition in bytes.
    pub const fn state_buffer_partition_bytes(self) -> u32 {
        match self {
            Arch::Sunda => 0x30000,
            Arch::Cayman => 0x38000,
            Arch::Mariana => 0x40000,
        }
    }

    /// State-buffer ports.
    pub const fn state_buffer_ports(self) -> u32 {
        16
    }

    /// State-buffer partitions.
    pub const fn state_buffer_partitions(self) -> u32 {
        128
    }

    /// Largest number of physical cores that may be fused into a logical one.
    pub const fn max_virtual_core_size(self) -> u32 {
        match self {
            Arch::Sunda => 1,
            Arch::Cayman | Arch::Mariana => 2,
        }
    }
}

/// A core type, independent of how a layer numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CoreType {
    /// Trn1 and Inf2.
    Sunda,
    /// Trn2.
    Cayman,
    /// Trn3.
    Mariana,
    /// A microcode tier of the same silicon as mariana; the encoder does not tell the two apart.
    MarianaPlus,
}

/// Who numbers core types (reverse-abi.md §7). The same number means different things in two of them: 2 is sunda to
/// the encoder and to the GPSIMD, and no core at all to the carriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numbering {
    /// Kernel, HAL and encoder: 2, 3, 4.
    Encoder,
    /// Firmware carrier: 5, 12, 20, 28.
    FirmwareCarrier,
    /// Extended-instruction provider: 6, 13, 21, 29.
    ExtendedInstruction,
    /// GPSIMD core kind: 2, 9, 17, 25.
    GpsimdCoreKind,
}

/// A core-type number that its layer does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "core type {number} does not exist in the {numbering:?} numbering, which has {known}; translate the number at the \
     boundary of the layer it came from"
)]
pub struct CoreTypeError {
    /// The number.
    pub number: u32,
    /// The layer it was said to come from.
    pub numbering: Numbering,
    /// The numbers of that layer.
    pub known: &'static str,
}

impl Numbering {
    /// Every numbering.
    pub const ALL: [Numbering; 4] =
        [Numbering::Encoder, Numbering::FirmwareCarrier, Numbering::ExtendedInstruction, Numbering::GpsimdCoreKind];

    const fn known(self) -> &'static str {
        match self {
            Numbering::Encoder => "2, 3, 4",
            Numbering::FirmwareCarrier => "5, 12, 20, 28",
            Numbering::ExtendedInstruction => "6, 13, 21, 29",
            Numbering::GpsimdCoreKind => "2, 9, 17, 25",
        }
    }
}

impl CoreType {
    /// Every core type.
    pub const ALL: [CoreType; 4] = [CoreType::Sunda, CoreType::Cayman, CoreType::Mariana, CoreType::MarianaPlus];

    /// The silicon.
    pub const fn arch(self) -> Arch {
        match self {
            CoreType::Sunda => Arch::Sunda,
            CoreType::Cayman => Arch::Cayman,
            CoreType::Mariana | CoreType::MarianaPlus => Arch::Mariana,
        }
    }

    /// The number of this core type in a layer's numbering.
    pub const fn number(self, numbering: Numbering) -> u32 {
        match (numbering, self) {
            (Numbering::Encoder, core_type) => core_type.arch().number(),
            (Numbering::FirmwareCarrier, CoreType::Sunda) => 5,
            (Numbering::FirmwareCarrier, CoreType::Cayman) => 12,
            (Numbering::FirmwareCarrier, CoreType::Mariana) => 20,
            (Numbering::FirmwareCarrier, CoreType::MarianaPlus) => 28,
            (Numbering::ExtendedInstruction, CoreType::Sunda) => 6,
            (Numbering::ExtendedInstruction, CoreType::Cayman) => 13,
            (Numbering::ExtendedInstruction, CoreType::Mariana) => 21,
            (Numbering::ExtendedInstruction, CoreType::MarianaPlus) => 29,
            (Numbering::GpsimdCoreKind, CoreType::Sunda) => 2,
            (Numbering::GpsimdCoreKind, CoreType::Cayman) => 9,
            (Numbering::GpsimdCoreKind, CoreType::Mariana) => 17,
            (Numbering::GpsimdCoreKind, CoreType::MarianaPlus) => 25,
        }
    }

    /// The core type that a layer means by a number. From the encoder, 4 is mariana: the tier is lost there.
    ///
    /// # Errors
    /// [`CoreTypeError`] if that layer has no such number.
    pub fn from_number(numbering: Numbering, number: u32) -> Result<CoreType, CoreTypeError> {
        Self::ALL.into_iter().find(|core_type| core_type.number(numbering) == number).ok_or(CoreTypeError {
            number,
            numbering,
            known: numbering.known(),
        })
    }

    /// Translates a number at the boundary between two layers (INV-16).
    ///
    /// # Errors
    /// [`CoreTypeError`] if the layer it comes from has no such number.
    pub fn translate(number: u32, from: Numbering, to: Numbering) -> Result<u32, CoreTypeError> {
        Ok(Self::from_number(from, number)?.number(to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_the_original_numbers_and_names() {
        let names = [
            "UNKNOWN",
            "INF1",
            "TRN1",
            "TRN1N",
            "INF2",
            "TRN2",
            "TRN2N",
            "INF2E",
            "TRN2P",
            "TRN2U",
            "TRN2E",
            "TRN2EU",
            "TRN2AC",
            "TRN2UAC",
            "TRN3",
            "TRN3PDS98",
        ];
        for (number, name) in (0u32..).zip(names) {
            let family = Family::from_number(number).unwrap();
            assert_eq!((family.number(), family.name()), (number, name));
            if number > 0 {
                assert_eq!(Family::from_name(&name.to_ascii_lowercase()), Some(family));
            }
        }
        assert_eq!(Family::from_number(16), None);
        assert_eq!(Family::from_name("UNKNOWN"), None);
        assert_eq!(Family::from_name("trn"), None);
    }

    #[test]
    fn sizes_have_the_original_numbers_and_names() {
        let names = ["1XL", "2XL", "4XL", "6XL", "8XL", "24XL", "32XL", "48XL", "3XL", "UNKNOWN"];
        for (number, name) in (0u32..).zip(names) {
            let size = Size::from_number(number).unwrap();
            assert_eq!((size.number(), size.name()), (number, name));
            if number < 9 {
                assert_eq!(Size::from_name(&name.to_ascii_lowercase()), Some(size));
                assert_eq!(Size::from_name(size.product_name()), Some(size));
            }
        }
        assert_eq!(Size::from_number(10), None);
        assert_eq!(Size::from_name("unknown"), None);
        assert_eq!(Size::from_name("1xlarge"), Some(Size::Xl1));
    }

    #[test]
    fn family_predicates_hold_for_exactly_the_listed_numbers() {
        let holding = |predicate: fn(Family) -> bool| -> Vec<u32> {
            Family::ALL.into_iter().filter(|f| predicate(*f)).map(Family::number).collect()
        };
        assert_eq!(holding(Family::is_trn1_family), [2, 3]);
        assert_eq!(holding(Family::is_inf2_family), [4, 7]);
        assert_eq!(holding(Family::is_trn2_family), [5, 6, 8, 9, 10, 11, 12, 13]);
        assert_eq!(holding(Family::is_trn3_family), [14, 15]);
        assert_eq!(holding(Family::is_trn2_or_trn3_family), [5, 6, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(holding(Family::is_switch_v1), [15]);
        assert_eq!(holding(|f| f.arch() == Some(Arch::Sunda)), [2, 3, 4, 7]);
        assert_eq!(holding(|f| f.arch() == Some(Arch::Cayman)), [5, 6, 8, 9, 10, 11, 12, 13]);
        assert_eq!(holding(|f| f.arch() == Some(Arch::Mariana)), [14, 15]);
        assert_eq!(holding(|f| f.arch().is_none()), [0, 1]);
    }

    /// Proves INV-15.
    #[test]
    fn fabric_size_and_mesh_folds_depend_on_switch_v1_and_not_on_the_silicon() {
        for family in Family::ALL {
            let expected = if family.number() == 15 { (32, 16) } else { (16, 8) };
            assert_eq!((family.max_devices(), family.max_mesh_folds()), expected, "{}", family.name());
        }
        // The same silicon answers both ways, so no constant of the architecture can be right.
        assert_eq!(Family::Trn3.arch(), Family::Trn3Pds98.arch());
        assert_ne!(Family::Trn3.max_devices(), Family::Trn3Pds98.max_devices());
        assert_ne!(Family::Trn3.max_mesh_folds(), Family::Trn3Pds98.max_mesh_folds());
    }

    #[test]
    fn silicon_table_is_that_of_the_spec() {
        let row = |a: Arch| {
            (
                a.number(),
                a.cores_per_device(),
                a.sengines_per_device(),
                a.max_links_per_pod_port(),
                (a.inter_rdh_dma(0), a.inter_rdh_dma(1), a.inter_rdh_dma(2)),
                a.state_buffer_partition_bytes(),
                a.max_virtual_core_size(),
            )
        };
        assert_eq!(row(Arch::Sunda), (2, 2, 2, None, (0, 1, -1), 0x30000, 1));
        assert_eq!(row(Arch::Cayman), (3, 8, 4, Some(1), (4, 5, -1), 0x38000, 2));
        assert_eq!(row(Arch::Mariana), (4, 8, 4, Some(2), (4, 5, -1), 0x40000, 2));
        for arch in Arch::ALL {
            assert_eq!([0, 1, 2, 3, 7].map(|core| arch.sengine_of_core(core)), [0, 0, 1, 1, 3]);
            assert_eq!(
                [11, 12, 13, 14, 15, 0].map(|q| arch.relative_queue(q)),
                [Some(0), Some(1), Some(2), None, Some(3), None]
            );
            assert_eq!(
                (arch.state_buffer_ports(), arch.state_buffer_partitions(), arch.inter_rdh_folds()),
                (16, 128, 2)
            );
            assert!(arch.name().len() <= 15);
        }
        assert_eq!(Arch::Sunda.die_of_core(1), None);
        assert_eq!([0, 3, 4, 7].map(|core| Arch::Cayman.die_of_core(core)), [Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!(Family::Trn1.pci_device_ids(), [0x7164]);
        assert_eq!(Family::Inf2.pci_device_ids(), [0x7264]);
        assert_eq!(Family::Trn2U.pci_device_ids(), [0x7364]);
        assert_eq!(Family::Trn3.pci_device_ids(), [0x7564, 0x7565]);
        assert!(Family::Inf1.pci_device_ids().is_empty());
    }

    /// Between every two numberings, in both directions. The layers behind three of them (firmware and microcode carriers, what
    /// runs on the device) are out of scope (spec §5), so that no boundary but this table is there to be proven.
    ///
    /// Proves INV-16.
    #[test]
    fn core_type_numbers_are_translated_between_all_four_layers() {
        let table = [
            (Numbering::Encoder, [2, 3, 4, 4]),
            (Numbering::FirmwareCarrier, [5, 12, 20, 28]),
            (Numbering::ExtendedInstruction, [6, 13, 21, 29]),
            (Numbering::GpsimdCoreKind, [2, 9, 17, 25]),
        ];
        for (from, from_numbers) in table {
            for (to, to_numbers) in table {
                for (i, (number, expected)) in from_numbers.into_iter().zip(to_numbers).enumerate() {
                    // The encoder's 4 stands for both tiers and is read as the plain one.
                    let expected = if from == Numbering::Encoder && i == 3 { to_numbers[2] } else { expected };
                    assert_eq!(CoreType::translate(number, from, to), Ok(expected), "{number} {from:?} -> {to:?}");
                }
            }
            for number in (0..40).filter(|n| !from_numbers.contains(n)) {
                let error = CoreType::translate(number, from, Numbering::Encoder).unwrap_err();
                assert_eq!((error.number, error.numbering), (number, from));
            }
        }
        // Passing a number through untranslated is the mistake: no carrier's number means anything to the encoder.
        assert_eq!(
            CoreType::from_number(Numbering::Encoder, 12).unwrap_err().to_string(),
            "core type 12 does not exist in the Encoder numbering, which has 2, 3, 4; translate the number at the \
             boundary of the layer it came from"
        );
    }

    #[test]
    fn product_names_follow_the_exceptions() {
        assert_eq!(identify_product("trn2.48xlarge", Arch::Cayman), (Family::Trn2, Size::Xl48));
        assert_eq!(identify_product("trn1n.32xlarge", Arch::Sunda), (Family::Trn1N, Size::Xl32));
        assert_eq!(identify_product("EPIC-TGH7-x.48xlarge", Arch::Cayman), (Family::Trn2, Size::Xl48));
        assert_eq!(identify_product("prototype", Arch::Mariana), (Family::Trn3, Size::Xl2));
        assert_eq!(identify_product("trn3pds98.48xlarge", Arch::Mariana), (Family::Trn3Pds98, Size::Xl48));
        assert_eq!(identify_product("prototype", Arch::Cayman), (Family::Unknown, Size::Unknown));
        assert_eq!(identify_product("trn2.17xlarge", Arch::Cayman), (Family::Trn2, Size::Unknown));
    }
}
