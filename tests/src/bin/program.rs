//! The program `wccl` itself, for tests that make the plugins it is given.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wccl_cli::main()
}
