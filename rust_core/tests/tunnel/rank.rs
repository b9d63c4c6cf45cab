//! Ranks: processes of their own, which the kernel ends as it ends real ones.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};

const ROLE: &str = "TUNNEL_TEST_ROLE";
const ADDRESS: &str = "TUNNEL_TEST_ADDRESS";

pub struct Rank {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
    address: Ipv4Addr,
    pub port: u16,
}

impl Rank {
    /// Starts a process of `run` that listens at `address`, and does with each connection what its role says.
    pub fn start(role: &str, address: &str, run: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank::be_one", "--nocapture"])
            .envs([(ROLE, role), (ADDRESS, address), ("SKY_MONARCH_RUN_ID", run)])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let port = next(&mut lines).parse().unwrap();
        Self { child, lines, address: address.parse().unwrap(), port }
    }

    pub fn at(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.address, self.port)
    }

    /// The next thing that it says.
    pub fn line(&mut self) -> String {
        next(&mut self.lines)
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Between what the test harness of that process says itself.
fn next(lines: &mut impl BufRead) -> String {
    loop {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the rank has ended");
        if let Some((_, said)) = line.split_once("rank: ") {
            return said.trim_end().to_owned();
        }
    }
}

fn say(what: &str) {
    // The harness may hold a part of a line of its own.
    println!("\nrank: {what}");
    std::io::stdout().flush().unwrap();
}

#[test]
fn be_one() {
    let (Ok(role), Ok(address)) = (std::env::var(ROLE), std::env::var(ADDRESS)) else { return };
    let listener = TcpListener::bind((address.as_str(), 0)).unwrap();
    say(&listener.local_addr().unwrap().port().to_string());
    for stream in listener.incoming() {
        let (stream, role) = (stream.unwrap(), role.clone());
        std::thread::spawn(move || serve(stream, &role));
    }
}

fn serve(mut stream: TcpStream, role: &str) {
    let mut buffer = vec![0; 1 << 16];
    match role {
        "echo" => loop {
            let Ok(length @ 1..) = stream.read(&mut buffer) else { return };
            // Who asked may be gone, and its test over.
            if stream.write_all(&buffer[..length]).is_err() {
                return;
            }
        },
        "abort" => {
            let _ = stream.read(&mut buffer[..1]);
            let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
            nix::sys::socket::setsockopt(&stream.as_fd(), nix::sys::socket::sockopt::Linger, &at_once)
                .unwrap();
        }
        "tell" => loop {
            match stream.read(&mut buffer) {
                Ok(0) => return say("end"),
                Ok(length) => say(&format!("{length} bytes")),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return say("reset"),
                Err(error) => return say(&error.to_string()),
            }
        },
        // Holds the connection, and reads nothing.
        _ => loop {
            std::thread::park();
        },
    }
}
