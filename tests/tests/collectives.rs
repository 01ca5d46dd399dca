//! Collectives end to end: the real plugin, bootstrap over loopback, links, native schedules. Every result is compared with
//! an independent reference.

mod common;

use common::{bytes_of, config, values_of, world};
use host_runtime::nrt::Io;
use host_runtime::{DataType, ReduceOp};

#[test]
fn two_ranks_reduce_fp32() {
    let results = world(2, &config(), |mut comm| {
        let mine: Vec<f32> = (0..1000).map(|i| (i * (comm.rank() + 1)) as f32).collect();
        let t = comm.tensor(4000).unwrap();
        t.write(0, &bytes_of(&mine)).unwrap();
        comm.all_reduce(Io::in_place(&t), 1000, DataType::Fp32, ReduceOp::Sum).unwrap();
        let mut out = vec![0; 4000];
        t.read(0, &mut out).unwrap();
        (values_of(&out), comm.rings().to_vec())
    });
    let expected: Vec<f32> = (0..1000).map(|i| (i * 3) as f32).collect();
    for (got, rings) in results {
        assert_eq!(got, expected);
        assert!(!rings.is_empty());
    }
}
