//! The hostile zoo: plugins and clients that try to hurt, starve, see or impersonate others.
//!
//! Each animal is let loose in a tenant of its own, beside a victim whose two ranks never stop working. It is refused or
//! stopped with the sentence that stands beside it, and docs/hostile-zoo.md is written from the same data; the victim
//! completes every operation with right results.
//!
//! | file | holds |
//! |---|---|
//! | `zoo` | what an animal is, its cage, how one is run and checked |
//! | `victim` | the tenant that must not notice |
//! | `calls` | loops, traps, memory and stack in every entry |
//! | `handles` | handles that were forged, kept, closed twice, or are another tenant's |
//! | `floods` | too much of everything the host hands out |
//! | `reach` | files, addresses and interfaces |
//! | `policy` | what a policy does not grant |
//! | `lifecycle` | plugins that misbehave when one takes over from another |
//! | `strangers` | who reaches the sockets of a group without being of it |
//! | `clients` | programs that talk to the service as they should not |

mod calls;
mod clients;
mod floods;
mod handles;
mod lifecycle;
mod policy;
mod reach;
mod strangers;
mod victim;
#[expect(unsafe_code, reason = "a variable for this process, before there are threads")]
mod zoo;

use zoo::{Group, run};

fn groups() -> Vec<Group> {
    vec![
        calls::group(),
        handles::group(),
        floods::group(),
        reach::group(),
        policy::group(),
        lifecycle::group(),
        clients::group(),
        strangers::group(),
    ]
}

#[test]
fn calls_that_do_not_come_back() {
    run(&calls::group());
}

#[test]
fn handles_that_are_not_theirs() {
    run(&handles::group());
}

#[test]
fn floods_of_everything() {
    run(&floods::group());
}

#[test]
fn what_they_must_not_reach() {
    run(&reach::group());
}

#[test]
fn what_no_policy_grants() {
    run(&policy::group());
}

#[test]
fn those_that_take_over_badly() {
    run(&lifecycle::group());
}

#[test]
fn programs_at_the_service() {
    run(&clients::group());
}

#[test]
fn strangers_at_the_sockets_of_a_group() {
    run(&strangers::group());
}

/// docs/hostile-zoo.md is what the data says, and there are at least 60 animals.
#[test]
fn the_document_is_what_the_zoo_says() {
    let groups = groups();
    let animals: usize = groups.iter().flat_map(|g| &g.animals).map(|a| a.cases.len()).sum();
    assert!(animals >= 60, "{animals} animals");
    zoo::document(&groups);
}
