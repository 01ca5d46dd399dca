//! `wccl`: collectives whose transport logic is a sandboxed WebAssembly component.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wccl_cli::main()
}
