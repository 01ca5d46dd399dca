//! Tenants of one machine that take turns: right results, no deadlock, no time-out that only load would explain.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_bridge::exec::share::{self, Market, Terms};
use hw_bridge::limits::MARKET_TENANTS;
use sandbox::policy::{Rate, SharePolicy};
use sandbox::status::Status;
use wccl::{DataType, Io, ReduceOp, Runtime, RuntimeConfig};

use crate::common::{HANG, bytes_of, config, values_of, world};

/// A tenant with that share.
fn tenant(tenant_id: u64, share: SharePolicy) -> RuntimeConfig {
    RuntimeConfig { tenant: format!("t{tenant_id}"), tenant_id, share, ..config() }
}

#[test]
fn tenants_of_other_weights_and_caps_get_right_results_side_by_side() {
    let heavy = SharePolicy { weight: 1000, ..SharePolicy::default() };
    let light = SharePolicy { weight: 1, ..SharePolicy::default() };
    let capped = SharePolicy { bandwidth: Some(Rate(256 << 20)), ..SharePolicy::default() };
    let tenants = [(1, heavy, 12), (2, light, 4), (3, capped, 4)].map(|(id, share, rounds)| {
        std::thread::spawn(move || {
            world(2, &tenant(id, share), move |mut comm| {
                // From a record's inside to several stretches; private memory, and device memory.
                for round in 0..rounds {
                    for count in [2usize, 3001, 1_000_003] {
                        let mine: Vec<f32> = (0..count).map(|i| (i % 97 + comm.rank() + round) as f32).collect();
                        let both: Vec<f32> = (0..count).map(|i| (2 * (i % 97 + round) + 1) as f32).collect();
                        let mut private = bytes_of(&mine);
                        comm.raw()
                            .all_reduce(Io::HostInPlace(&mut private), count as u64, DataType::Fp32, ReduceOp::Sum)
                            .unwrap();
                        assert!(values_of(&private) == both, "tenant {id}, {count} elements of private memory");
                        let tensor = comm.allocate(count as u64 * 4).unwrap();
                        tensor.write(0, &bytes_of(&mine)).unwrap();
                        comm.raw()
                            .all_reduce(Io::in_place(&tensor), count as u64, DataType::Fp32, ReduceOp::Avg)
                            .unwrap();
                        let mut back = vec![0; count * 4];
                        tensor.read(0, &mut back).unwrap();
                        let halves: Vec<f32> = both.iter().map(|v| v / 2.0).collect();
                        assert!(values_of(&back) == halves, "tenant {id}, {count} elements of device memory");
                    }
                }
            })
        })
    });
    tenants.into_iter().for_each(|t| drop(t.join().unwrap()));
}

/// The operation takes three times its deadline, for its cap's sake: nobody is late.
#[test]
fn a_cap_is_no_time_out() {
    let capped = SharePolicy { bandwidth: Some(Rate(16 << 20)), ..SharePolicy::default() };
    let patient = RuntimeConfig { timeout: Duration::from_secs(1), ..tenant(11, capped) };
    world(2, &patient, |mut comm| {
        let mut ones = bytes_of(&vec![1.0; 2 << 20]);
        comm.raw().all_reduce(Io::HostInPlace(&mut ones), 2 << 20, DataType::Fp32, ReduceOp::Sum).unwrap();
        assert!(values_of(&ones).iter().all(|v| *v == 2.0));
    });
}

#[test]
fn an_abort_ends_the_wait_for_a_cap() {
    // It would take a quarter of an hour, and its deadline is later.
    let capped = SharePolicy { bandwidth: Some(Rate(64 << 10)), ..SharePolicy::default() };
    let patient = RuntimeConfig { timeout: Duration::from_secs(3600), ..tenant(12, capped) };
    world(2, &patient, |mut comm| {
        let (abort, core) = (comm.abort_token().clone(), comm.core().clone());
        let begun = Instant::now();
        let aborter = std::thread::spawn(move || {
            // Until the rank is inside the operation, at work or waiting for its turn.
            let moved = || {
                let c = core.endpoint.control().lane(0).tally().read();
                c.copied + c.reduced
            };
            let before = moved();
            while moved() == before {
                assert!(begun.elapsed() < HANG, "the operation never began");
                std::thread::sleep(Duration::from_millis(5));
            }
            abort.abort("enough");
        });
        let mut ones = vec![1; 16 << 20];
        let e = comm.raw().all_reduce(Io::HostInPlace(&mut ones), 4 << 20, DataType::Fp32, ReduceOp::Sum).unwrap_err();
        aborter.join().unwrap();
        // Whichever rank was aborted first says so to the other.
        assert!(e.to_string().contains("enough"), "{e}");
    });
}

#[test]
fn operations_in_progress_are_bounded_by_the_slots() {
    let two = SharePolicy { proxy_slots: 2, ..SharePolicy::default() };
    world(2, &tenant(13, two), |mut comm| {
        let stream = comm.stream(0).unwrap();
        let e = comm.stream(1).unwrap_err();
        assert_eq!(e.status(), Status::RESOURCE);
        let sentence = e.to_string();
        assert!(sentence.contains("2 operations in progress") && sentence.contains("share.proxy-slots"), "{sentence}");
        // It is still there for whoever frees a slot, and the communicator goes on.
        drop(stream);
        comm.stream(1).unwrap().barrier().wait().unwrap();
        comm.barrier().unwrap();
    });
}

#[test]
fn a_full_market_refuses_a_tenant_with_a_sentence() {
    let market = Arc::new(Market::create().unwrap());
    let enter = |id| share::Share::new(market.clone(), id, Terms::default()).unwrap();
    let others: Vec<_> = (100..).take(MARKET_TENANTS).map(enter).collect();
    let late = RuntimeConfig { market: Some(market.clone()), ..tenant(14, SharePolicy::default()) };
    let e = Runtime::open(late.clone()).unwrap_err().to_string();
    assert!(e.contains("tenant t14 cannot be opened") && e.contains("no room for another"), "{e}");
    drop(others);
    Runtime::open(late).unwrap();
}
