//! Asks a cloud's metadata service, again and again, whether the host is about to be taken away.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::documents::{self, Doom};
use super::{Kind, Notice, Notices};
use crate::agent::group::seconds;
use crate::agent::outbox::Outbox;
use crate::protocol::Event;

/// The service is on this very host, or next to it.
const CONNECT: Duration = Duration::from_secs(2);
const ANSWER: Duration = Duration::from_secs(5);
/// Azure: "You should expect a delayed response in your first call of up to two minutes".
const FIRST_ANSWER: Duration = Duration::from_secs(150);
/// Between two tries of a service that gives no answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// After so many failures in a row it is an event.
const TOLD_AT: u32 = 3;
const LARGEST_ANSWER: usize = 1 << 20;

const AZURE: &[(&str, &str)] = &[("Metadata", "true")];
const OCI: &[(&str, &str)] = &[("Authorization", "Bearer Oracle")];
const GCP: &[(&str, &str)] = &[("Metadata-Flavor", "Google")];
const AWS_LIFETIME: &[(&str, &str)] = &[("X-aws-ec2-metadata-token-ttl-seconds", "60")];

/// A metadata service.
pub struct Source {
    settings: Notices,
    client: Client<HttpConnector, Body>,
    /// What it calls this host.
    own: Option<String>,
}

impl Source {
    /// None where nobody is asked.
    pub fn new(settings: &Notices) -> Option<Self> {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        let client = Client::builder(TokioExecutor::new()).build(connector);
        let is_asked = !matches!(settings.kind, Kind::Off | Kind::Runpod);
        is_asked.then(|| Self { settings: settings.clone(), client, own: None })
    }

    /// Asks until there is a notice.
    pub async fn watch(mut self, tell: mpsc::Sender<Notice>, outbox: Outbox) {
        let kind = format!("{:?}", self.settings.kind).to_lowercase();
        let every = seconds(self.settings.every_s);
        let (mut failures, mut has_answered) = (0_u32, false);
        loop {
            let limit = if has_answered { ANSWER } else { FIRST_ANSWER };
            let answer = timeout(limit, self.ask()).await;
            match answer.unwrap_or_else(|_| Err(format!("no answer within {limit:?}"))) {
                Ok(Some(Doom { reason, grace })) => {
                    let _ = tell.send(Notice { kind, reason, grace: Some(grace) }).await;
                    return;
                }
                Ok(None) => (failures, has_answered) = (0, true),
                Err(why) => {
                    failures += 1;
                    if failures == TOLD_AT {
                        let message =
                            format!("notices of pre-emption cannot be had from {kind}, deaths can: {why}");
                        outbox.emit(Event::Notice { replica: None, message });
                    }
                }
            }
            sleep((every * 2_u32.pow(failures.min(8))).min(LONGEST_PAUSE.max(every))).await;
        }
    }

    async fn ask(&mut self) -> Result<Option<Doom>, String> {
        let now = OffsetDateTime::now_utc();
        match self.settings.kind {
            Kind::Off | Kind::Runpod => Ok(None),
            Kind::Azure => {
                if self.own.is_none() {
                    let name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
                    self.own = Some(self.require(name, AZURE).await?.trim().to_owned());
                }
                let events = "/metadata/scheduledevents?api-version=2020-07-01";
                let own = self.own.as_deref().unwrap_or_default();
                documents::azure(&self.require(events, AZURE).await?, own, now)
            }
            Kind::Oci => {
                let (own, doom) = documents::oci_instance(&self.require("/opc/v2/instance/", OCI).await?)?;
                let Some(events) = self.settings.events.as_ref().filter(|_| doom.is_none()) else {
                    return Ok(doom);
                };
                match self.send(Method::GET, events, &[]).await? {
                    Some(text) if !text.trim().is_empty() => documents::oci_event(&text, &own, now),
                    _ => Ok(None),
                }
            }
            Kind::Aws => {
                let token = self.at("/latest/api/token");
                let token = self.send(Method::PUT, &token, AWS_LIFETIME).await?;
                let token = token.ok_or("it gives no token")?;
                let action = self.at("/latest/meta-data/spot/instance-action");
                let headers = [("X-aws-ec2-metadata-token", token.trim())];
                match self.send(Method::GET, &action, &headers).await? {
                    Some(text) => documents::aws(&text, now),
                    None => Ok(None),
                }
            }
            Kind::Gcp => documents::gcp(&self.require("/computeMetadata/v1/instance/preempted", GCP).await?),
        }
    }

    fn at(&self, path: &str) -> String {
        format!("{}{path}", self.settings.url.trim_end_matches('/'))
    }

    async fn require(&self, path: &str, headers: &[(&str, &str)]) -> Result<String, String> {
        let found = self.send(Method::GET, &self.at(path), headers).await?;
        found.ok_or_else(|| format!("{path} is not there"))
    }

    /// The text of an answer; none where there is nothing at that address. A proxy is never asked.
    async fn send(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
    ) -> Result<Option<String>, String> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).map_err(|cause| cause.to_string())?;
        let response = self.client.request(request).await.map_err(|cause| format!("{url}: {cause}"))?;
        let status = response.status();
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !status.is_success() {
            return Err(format!("{url} answers {status}"));
        }
        let body = to_bytes(Body::new(response.into_body()), LARGEST_ANSWER).await;
        let body = body.map_err(|cause| format!("{url}: {cause}"))?;
        Ok(Some(String::from_utf8_lossy(&body).into_owned()))
    }
}
