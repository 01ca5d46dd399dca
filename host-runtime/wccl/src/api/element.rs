//! The element types of typed buffers: one Rust type for each of the 15 that collectives know.

use std::fmt::Debug;

use half::{bf16, f16};
use hw_bridge::call::{DataType, Fp8};
use zerocopy::{FromBytes, Immutable, IntoBytes};

mod sealed {
    /// Which types there are is the runtime's word.
    pub trait Known {}
}

/// A type whose values collectives move and reduce as they lie in memory (little-endian, as the host).
pub trait Element:
    sealed::Known + Copy + Debug + Default + PartialEq + FromBytes + IntoBytes + Immutable + Send + Sync + 'static
{
    /// As the runtime numbers it.
    const TYPE: DataType;
}

/// An fp32 that the matrix unit may read with fewer mantissa bits. Moved and reduced exactly as an `f32`.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, FromBytes, IntoBytes, Immutable)]
#[repr(transparent)]
pub struct Fp32r(pub f32);

/// Declares an 8-bit float by its code; two are equal if their codes are.
macro_rules! fp8 {
    ($name:ident, $format:expr, $what:literal) => {
        #[doc = $what]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable)]
        #[repr(transparent)]
        pub struct $name(
            /// The code.
            pub u8,
        );

        impl $name {
            /// The nearest one, ties to even; what rounds beyond the largest finite value is an infinity.
            #[must_use]
            pub fn from_f32(value: f32) -> $name {
                $name($format.encode(value))
            }

            /// Its value, exactly.
            #[must_use]
            pub fn to_f32(self) -> f32 {
                $format.decode(self.0)
            }
        }
    };
}

fp8!(Fp8E3, Fp8::E3, "An 8-bit float of 3 exponent and 4 mantissa bits.");
fp8!(Fp8E4, Fp8::E4, "An 8-bit float of 4 exponent and 3 mantissa bits.");
fp8!(Fp8E5, Fp8::E5, "An 8-bit float of 5 exponent and 2 mantissa bits.");

macro_rules! elements {
    ($($rust:ty => $nrt:ident),* $(,)?) => {
        $(
            impl sealed::Known for $rust {}
            impl Element for $rust {
                const TYPE: DataType = DataType::$nrt;
            }
        )*

        #[cfg(test)]
        const ALL: &[(DataType, usize)] = &[$((<$rust as Element>::TYPE, size_of::<$rust>())),*];
    };
}

elements! {
    u64 => Uint64, i8 => Int8, u8 => Uint8, i16 => Int16, u16 => Uint16, bf16 => Bf16, f16 => Fp16, i32 => Int32, u32 => Uint32,
    f32 => Fp32, Fp32r => Fp32r, i64 => Int64, Fp8E3 => Fp8E3, Fp8E4 => Fp8E4, Fp8E5 => Fp8E5,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_data_type_has_one_rust_type_of_its_size() {
        assert_eq!(ALL.iter().map(|(t, _)| *t).collect::<Vec<_>>(), DataType::ALL);
        for (dtype, size) in ALL {
            assert_eq!(dtype.size(), *size, "{dtype}");
        }
    }

    #[test]
    fn eight_bit_floats_round_once() {
        assert_eq!(Fp8E4::from_f32(1.0).to_f32(), 1.0);
        assert_eq!(Fp8E5::from_f32(1.1).to_f32(), 1.0);
        assert_eq!(Fp8E3::from_f32(-0.5).to_f32(), -0.5);
        assert!(Fp8E5::from_f32(1e9).to_f32().is_infinite());
    }
}
