//! Host side of the contracts under wit/, generated. The only types that a guest's words take before they are checked.
#![allow(missing_docs)]

wasmtime::component::bindgen!({
    path: ["../wit/nrt", "../wit/hw", "../wit/nccom", "../wit/lifecycle", "../wit/net", "../wit/worlds"],
    world: "wccl:worlds/transport-swappable",
    imports: { default: trappable },
    with: {
        "neuron:nrt/types.semaphore": crate::hw::objects::SemaphoreObject,
        "neuron:nrt/types.host-mem": crate::hw::objects::HostMemObject,
        "neuron:nrt/types.net-library": crate::hw::objects::NetLibraryObject,
        "neuron:hw/objects.communicator": crate::hw::objects::CommunicatorObject,
        "neuron:hw/objects.connector": crate::hw::objects::ConnectorObject,
        "neuron:hw/objects.net-comm": crate::hw::objects::NetCommObject,
        "neuron:hw/objects.registration": crate::hw::objects::RegistrationObject,
        "neuron:hw/objects.request": crate::hw::objects::RequestObject,
        "neuron:hw/objects.region": crate::hw::objects::RegionObject,
        "neuron:hw/objects.listener": crate::hw::objects::ListenerObject,
        "neuron:hw/objects.connection": crate::hw::objects::ConnectionObject,
    },
});

/// The net plug-in's world, for its exports' types.
pub mod net_plugin {
    wasmtime::component::bindgen!({
        path: ["../wit/nrt", "../wit/hw", "../wit/nccom", "../wit/lifecycle", "../wit/net", "../wit/worlds"],
        world: "wccl:worlds/net-plugin",
    });
}
