//! A relay, and the ends of three hosts, `job-h0` to `job-h2`.

use std::net::{IpAddr, TcpListener};
use std::time::Duration;

use sky_monarch_core::Result;
use sky_monarch_core::tunnel::{Limits, Place, Relay, Tunnel, address_of};
use sky_monarch_core::wire::Address;
use sky_monarch_core::wire::tls::{Authority, Identity};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::time::timeout;

pub const RUN: &str = "job-20261130-120000-beef";
pub const SOON: Duration = Duration::from_secs(20);
const TOKEN: &str = "the token of the run";
const HOUR: Duration = Duration::from_secs(3600);

pub struct Scene {
    run: Authority,
    limits: Limits,
    listener: TcpListener,
    /// In a runtime of its own: ended with all of its connections, as a process is.
    runtime: Option<Runtime>,
    pub relay: Relay,
    pub hosts: Vec<Tunnel>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn serve(run: &Authority, listener: &TcpListener, limits: &Limits) -> (Runtime, Relay) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = listener.try_clone().unwrap();
    let identity = run.issue("relay").unwrap();
    let relay =
        runtime.block_on(async { Relay::open(listener, &identity, RUN, TOKEN, limits.clone()) }).unwrap();
    let serving = relay.clone();
    runtime.spawn(async move { serving.serve().await });
    (runtime, relay)
}

impl Scene {
    pub async fn open(limits: Limits) -> Self {
        let run = Authority::new(RUN, HOUR).unwrap();
        let limits = Limits { line: Duration::from_millis(500), ..limits };
        tokio::task::block_in_place(|| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (runtime, relay) = serve(&run, &listener, &limits);
            let mut scene = Self { run, limits, listener, runtime: Some(runtime), relay, hosts: Vec::new() };
            let names = ["job-h0", "job-h1", "job-h2"];
            scene.hosts = names.map(|name| scene.host(name, 1, &format!("{name}-a1")).unwrap()).into();
            scene
        })
    }

    /// The relay dies, and another one is there, at the same socket.
    pub async fn restart(&mut self) {
        tokio::task::block_in_place(|| {
            self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
            let (runtime, relay) = serve(&self.run, &self.listener, &self.limits);
            (self.runtime, self.relay) = (Some(runtime), relay);
        });
    }

    /// Where the relay is dialled.
    pub fn listening(&self) -> std::net::SocketAddr {
        self.listener.local_addr().unwrap()
    }

    fn place(&self, by: &Authority, host: &str, attempt: u32, certificate: &str, address: IpAddr) -> Place {
        let port = self.listener.local_addr().unwrap().port();
        Place {
            relay: Address::Tls { host: "127.0.0.1".into(), port },
            identity: by.issue(certificate).unwrap(),
            run_id: RUN.into(),
            token: TOKEN.into(),
            host: host.into(),
            attempt,
            address,
        }
    }

    pub fn host(&self, host: &str, attempt: u32, certificate: &str) -> Result<Tunnel> {
        let address = address_of(host).unwrap().into();
        Tunnel::start(self.place(&self.run, host, attempt, certificate, address), self.limits.clone())
    }

    /// A certificate of the run.
    pub fn identity(&self, name: &str) -> Identity {
        self.run.issue(name).unwrap()
    }

    /// A host with a certificate of another run.
    pub fn stranger(&self, host: &str) -> Tunnel {
        let other = Authority::new(RUN, HOUR).unwrap();
        let mut place = self.place(&other, host, 1, &format!("{host}-a1"), address_of(host).unwrap().into());
        place.identity.ca_pem = self.run.issue("relay").unwrap().ca_pem;
        Tunnel::start(place, self.limits.clone()).unwrap()
    }

    pub fn misplaced(&self, host: &str, address: IpAddr) -> Result<Tunnel> {
        Tunnel::start(self.place(&self.run, host, 1, &format!("{host}-a1"), address), self.limits.clone())
    }
}

pub fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index % 251) as u8).collect()
}

/// Writes all and ends its way, while it reads until the other way ends.
pub async fn there_and_back(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), sent: &[u8]) -> Vec<u8> {
    let (mut read, mut write) = tokio::io::split(stream);
    let mut back = Vec::new();
    let writing = async {
        write.write_all(sent).await?;
        write.shutdown().await
    };
    let both = async { tokio::try_join!(writing, read.read_to_end(&mut back)) };
    timeout(SOON, both).await.expect("in time").unwrap();
    back
}
