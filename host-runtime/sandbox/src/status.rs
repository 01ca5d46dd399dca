//! NRT_STATUS (reverse-abi 6): the 28 numbers, their names, and which wins when several race.

use crate::bindings::neuron::nrt::types::NrtStatus;

/// An NRT_STATUS number. Zero is success; a wrapper passes any number on verbatim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

macro_rules! statuses {
    ($($number:literal $constant:ident $variant:ident $rank:literal)*) => {
        impl Status {
            $(
                #[doc = concat!("NRT_", stringify!($constant), " (", stringify!($number), ")")]
                pub const $constant: Status = Status($number);
            )*
            /// The 28 statuses with a name.
            pub const ALL: [Status; 28] = [$(Status($number)),*];

            /// The bare identifier; `UNKNOWN` for anything else.
            pub fn name(self) -> &'static str {
                match self.0 {
                    $($number => concat!("NRT_", stringify!($constant)),)*
                    _ => "UNKNOWN",
                }
            }

            /// Which of several racing statuses wins: the higher. Not monotonic in the number.
            pub fn rank(self) -> u8 {
                match self.0 {
                    $($number => $rank,)*
                    _ => 1,
                }
            }
        }

        impl From<&NrtStatus> for Status {
            fn from(s: &NrtStatus) -> Status {
                match s {
                    $(NrtStatus::$variant => Status($number),)*
                    NrtStatus::Other(n) => Status(*n),
                }
            }
        }

        impl From<Status> for NrtStatus {
            fn from(s: Status) -> NrtStatus {
                match s.0 {
                    $($number => NrtStatus::$variant,)*
                    n => NrtStatus::Other(n),
                }
            }
        }
    };
}

statuses! {
    0 SUCCESS Success 0
    1 FAILURE Failure 1
    2 INVALID Invalid 1
    3 INVALID_HANDLE InvalidHandle 1
    4 RESOURCE Resource 1
    5 TIMEOUT Timeout 1
    6 HW_ERROR HwError 3
    7 QUEUE_FULL QueueFull 1
    9 LOAD_NOT_ENOUGH_NC LoadNotEnoughNc 1
    10 UNSUPPORTED_NEFF_VERSION UnsupportedNeffVersion 1
    11 FAIL_HOST_MEM_ALLOC FailHostMemAlloc 1
    13 UNINITIALIZED Uninitialized 1
    14 CLOSED Closed 1
    15 QUEUE_EMPTY QueueEmpty 1
    101 EXEC_UNIT_UNRECOVERABLE ExecUnitUnrecoverable 4
    1002 EXEC_BAD_INPUT ExecBadInput 1
    1003 EXEC_COMPLETED_WITH_NUM_ERR ExecCompletedWithNumErr 1
    1004 EXEC_COMPLETED_WITH_ERR ExecCompletedWithErr 1
    1005 EXEC_NC_BUSY ExecNcBusy 1
    1006 EXEC_OOB ExecOob 1
    1100 COLL_PENDING CollPending 1
    1200 EXEC_HW_ERR_COLLECTIVES ExecHwErrCollectives 2
    1201 EXEC_HW_ERR_HBM_UE ExecHwErrHbmUe 2
    1202 EXEC_HW_ERR_NC_UE ExecHwErrNcUe 2
    1203 EXEC_HW_ERR_DMA_ABORT ExecHwErrDmaAbort 2
    1204 EXEC_SW_NQ_OVERFLOW ExecSwNqOverflow 2
    1205 EXEC_HW_ERR_REPAIRABLE_HBM_UE ExecHwErrRepairableHbmUe 2
    1206 NETWORK_PROXY_FAILURE NetworkProxyFailure 2
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_28_round_trip_and_any_other_number_passes() {
        let mut seen = std::collections::HashSet::new();
        for s in Status::ALL {
            assert!(seen.insert(s.0));
            assert_ne!(s.name(), "UNKNOWN");
            assert_eq!(Status::from(&NrtStatus::from(s)), s);
        }
        assert_eq!(seen.len(), 28);
        for n in [8, 12, 77, u32::MAX] {
            assert_eq!(Status(n).name(), "UNKNOWN");
            assert_eq!(Status::from(&NrtStatus::from(Status(n))), Status(n));
        }
    }

    #[test]
    fn the_rank_is_not_the_number() {
        assert!(Status::HW_ERROR.rank() > Status::EXEC_HW_ERR_NC_UE.rank());
        assert!(Status::EXEC_UNIT_UNRECOVERABLE.rank() > Status::HW_ERROR.rank());
    }
}
