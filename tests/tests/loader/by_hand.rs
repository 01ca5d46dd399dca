//! The plugin written by hand: proof that the contracts need no particular language.

use sandbox::status::Status;
use tests::zoo::{TRANSPORT, componentise};
use wccl::CommOptions;
use wccl::error::{Error, PluginError};

use crate::support::{Folder, config, loaded, log};

#[test]
fn a_transport_written_by_hand_loads_and_answers() {
    let core = include_bytes!("../../fixtures/by-hand.wat");
    let folder = Folder::new();
    log();
    let rt = loaded(config(&folder.put("by-hand.wasm", &componentise(core, TRANSPORT).unwrap())));
    assert!(log().iter().any(|l| l == "Using CCOM 2.31.24.0-00000000"));
    let version = rt.forward().version_info().unwrap();
    assert_eq!((version.numbers, version.git_hash, version.compatibility), ([2, 31, 24, 0], [0; 16], 89));

    log();
    let err = rt.unique_id(2).unwrap_err();
    assert_eq!(err.status(), Status::INVALID);
    assert_eq!(
        err.to_string(),
        "neuronGetUniqueId of plugin by-hand.wasm failed on tenant default: NRT_INVALID (2): this plugin makes no ids"
    );
    assert!(log().iter().any(|l| l == "by hand: asked for an id"));

    for options in [CommOptions::with_id([1; 128], 0, 1), CommOptions::with_root("127.0.0.1:1", 0, 1)] {
        let err = rt.init_comm(options).unwrap_err();
        assert!(matches!(err, Error::Plugin(PluginError::Entry { status: Status::FAILURE, .. })), "{err}");
    }
    assert_eq!(rt.tenant().counters.traps(), 0);
    assert_eq!(rt.tenant().communicators(), 0);
}
