//! Host side of the contracts under wit/, generated. The only types that a guest's words take before they are checked.
#![allow(missing_docs)]

wasmtime::component::bindgen!({
    path: ["../../wit/nrt", "../../wit/hw", "../../wit/nccom", "../../wit/lifecycle", "../../wit/net", "../../wit/worlds"],
    world: "wccl:worlds/transport-swappable",
    imports: { default: trappable },
    with: {
        "neuron:nrt/types.semaphore": crate::objects::SemaphoreObject,
        "neuron:nrt/types.host-mem": crate::objects::HostMemObject,
        "neuron:nrt/types.net-library": crate::objects::NetLibraryObject,
        "neuron:hw/objects.communicator": crate::objects::CommunicatorObject,
        "neuron:hw/objects.connector": crate::objects::ConnectorObject,
        "neuron:hw/objects.net-comm": crate::objects::NetCommObject,
        "neuron:hw/objects.registration": crate::objects::RegistrationObject,
        "neuron:hw/objects.request": crate::objects::RequestObject,
        "neuron:hw/objects.region": crate::objects::RegionObject,
        "neuron:hw/objects.listener": crate::objects::ListenerObject,
        "neuron:hw/objects.connection": crate::objects::ConnectionObject,
    },
});

/// The net plug-in's world, for its exports' types.
pub mod net_plugin {
    wasmtime::component::bindgen!({
        path: ["../../wit/nrt", "../../wit/hw", "../../wit/nccom", "../../wit/lifecycle", "../../wit/net", "../../wit/worlds"],
        world: "wccl:worlds/net-plugin",
    });
}
