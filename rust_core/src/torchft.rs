//! The generated wire of TorchFT's lighthouse: messages, client and server of `proto/torchft.proto`.

#![allow(missing_docs, clippy::all, clippy::unwrap_used, reason = "generated from the proto file")]

tonic::include_proto!("torchft");
