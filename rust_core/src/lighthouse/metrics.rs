//! Prometheus text from a snapshot.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

use super::snapshot::Snapshot;

/// The snapshot in Prometheus' text format, version 0.0.4.
pub fn render(snapshot: &Snapshot) -> String {
    let mut page = Page(String::new());
    let counters = &snapshot.counters;
    if let Some(quorum_id) = snapshot.quorum_id {
        page.family("quorum_id", "gauge", "Last quorum id given out.").sample(quorum_id);
    }
    page.family("participants", "gauge", "Live members of the last quorum.").sample(snapshot.participants);
    page.family("replicas", "gauge", "Live replicas.").sample(snapshot.replicas.len());
    let asking = snapshot.replicas.iter().filter(|replica| replica.asking).count();
    page.family("asking", "gauge", "Replicas that wait for a quorum.").sample(asking);
    page.family("step", "gauge", "Step of each live replica, from its last quorum request.");
    for replica in &snapshot.replicas {
        if let Some(step) = replica.step {
            let mut labels = format!("id=\"{}\"", escape(&replica.id));
            if let Some(identity) = replica.identity {
                let _ = write!(
                    labels,
                    ",replica=\"{}\",generation=\"{}\"",
                    identity.replica, identity.generation
                );
            }
            page.sample_of("step", &labels, step);
        }
    }
    page.family("quorums_total", "counter", "Quorums formed, by reason.").by_reason(&counters.quorums);
    page.family("refusals_total", "counter", "Requests refused, by reason.").by_reason(&counters.refusals);
    page.family("drops_total", "counter", "Members that left their quorum, by reason.")
        .by_reason(&counters.drops);
    let plain = [
        ("heartbeats_total", "Heartbeats accepted.", counters.heartbeats),
        ("asks_total", "Quorum requests accepted.", counters.asks),
        (
            "withdrawn_total",
            "Quorum requests whose client left or whose deadline passed.",
            counters.withdrawn,
        ),
        ("evictions_total", "Evictions told by a supervisor.", counters.evictions),
        ("pauses_total", "Times this process was stopped or starved.", counters.pauses),
        ("store_failures_total", "Writes of the state file that failed.", counters.store_failures),
    ];
    for (name, help, value) in plain {
        page.family(name, "counter", help).sample(value);
    }
    page.family("wait_seconds", "summary", "Time that answered quorum requests waited.");
    page.sample_of("wait_seconds_sum", "", counters.wait_s);
    page.sample_of("wait_seconds_count", "", counters.answered);
    page.0
}

struct Page(String);

const PREFIX: &str = "sky_monarch_lighthouse_";

/// A family just opened, for its samples.
struct Family<'a> {
    page: &'a mut Page,
    name: &'a str,
}

impl Page {
    fn family<'a>(&'a mut self, name: &'a str, kind: &str, help: &str) -> Family<'a> {
        let _ = writeln!(self.0, "# HELP {PREFIX}{name} {help}\n# TYPE {PREFIX}{name} {kind}");
        Family { page: self, name }
    }

    fn sample_of(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = if labels.is_empty() {
            writeln!(self.0, "{PREFIX}{name} {value}")
        } else {
            writeln!(self.0, "{PREFIX}{name}{{{labels}}} {value}")
        };
    }
}

impl Family<'_> {
    fn sample(self, value: impl Display) {
        self.page.sample_of(self.name, "", value);
    }

    fn by_reason(self, values: &BTreeMap<&'static str, u64>) {
        for (reason, value) in values {
            self.page.sample_of(self.name, &format!("reason=\"{reason}\""), value);
        }
    }
}

/// A label's value: replica ids are the peer's text.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
