//! The lighthouse: forms quorums for TorchFT's managers, and is *told* who died.
//!
//! ```text
//!  torchft.Manager ──gRPC Quorum, Heartbeat──▶ http ─▶ service ─▶ registry ─▶ quorum_compute (pure)
//!  agent ──Evict over the framed channel─────▶ control ──────────▶    │
//!  you ──GET /status.json, /metrics──────────▶ http ◀── snapshot ◀────┤
//!                                                       ledger ◀──────┘ ids and fences, over restarts
//! ```

pub mod config;
pub mod http;
pub mod identity;
pub mod ledger;
pub mod listener;
pub mod metrics;
pub mod quorum;
pub mod refusal;
pub mod registry;
pub mod service;
pub mod snapshot;
