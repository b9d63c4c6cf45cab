//! The agent as a real process, with real ranks and a controller that is a real listener on the real channel.
//!
//! Each scenario takes a mutant: with none it must pass, with the defect that it is there to catch it must fail.

mod door;
mod door_tls;
mod examined;
mod hosts;
mod lifecycle;
mod news;
mod notices;
mod output;
mod parts;
mod process;
mod recovery;
mod scene;
mod sidekicks;
