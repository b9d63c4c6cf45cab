//! Generates the TorchFT wire from `proto/torchft.proto`, without a `protoc` binary.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto/torchft.proto");
    let files = protox::compile(["proto/torchft.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
