//! Certificates of a run's own authority, and TLS 1.3 in which both sides show one.
//!
//! No public authority is trusted: whoever holds no certificate of *this run* is refused before a byte of it is
//! decoded.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use serde::{Deserialize, Serialize};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::{Error, ErrorKind, Result};

/// Clocks of two hosts may differ by this much.
const CLOCK_SKEW: Duration = Duration::from_secs(300);

/// A run's certificate authority: exists once, where the run was launched.
pub struct Authority {
    run_id: String,
    issuer: Issuer<'static, KeyPair>,
    ca_pem: String,
    expires: SystemTime,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// An authority as it is kept over the life of a process. Secret.
#[derive(Clone, Serialize, Deserialize)]
pub struct KeptAuthority {
    /// The run.
    pub run_id: String,
    /// Its own certificate, PEM.
    pub ca_pem: String,
    /// Its private key, PEM.
    pub key_pem: String,
    /// Unix time at which it, and all that it issues, ceases to be valid.
    pub expires_s: u64,
}

impl fmt::Debug for KeptAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptAuthority").field("run_id", &self.run_id).finish_non_exhaustive()
    }
}

/// What one peer shows: its certificate and key, and the authority it trusts. Secret.
#[derive(Clone, Serialize, Deserialize)]
pub struct Identity {
    /// Name in the certificate.
    pub name: String,
    /// The run's authority, PEM.
    pub ca_pem: String,
    /// The peer's certificate, PEM.
    pub cert_pem: String,
    /// The peer's private key, PEM.
    pub key_pem: String,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("name", &self.name).finish_non_exhaustive()
    }
}

fn cannot(operation: &'static str, error: impl fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidInput, operation, error.to_string())
}

impl Authority {
    /// A fresh authority for one run, good for `lifetime` from now.
    pub fn new(run_id: &str, lifetime: Duration) -> Result<Self> {
        const MAKE: &str = "make a certificate authority";
        let expires = SystemTime::now().checked_add(lifetime).ok_or_else(|| cannot(MAKE, "it never ends"))?;
        let params = ca_params(run_id, expires).map_err(|error| cannot(MAKE, error))?;
        let key = KeyPair::generate().map_err(|error| cannot(MAKE, error))?;
        let ca_pem = params.self_signed(&key).map_err(|error| cannot(MAKE, error))?.pem();
        Ok(Self { run_id: run_id.to_owned(), issuer: Issuer::new(params, key), ca_pem, expires })
    }

    /// What another process makes the same authority of.
    pub fn keep(&self) -> KeptAuthority {
        let expires = self.expires.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        KeptAuthority {
            run_id: self.run_id.clone(),
            ca_pem: self.ca_pem.clone(),
            key_pem: self.issuer.key().serialize_pem(),
            expires_s: expires.as_secs(),
        }
    }

    /// The authority that was kept.
    pub fn from_kept(kept: KeptAuthority) -> Result<Self> {
        const TAKE: &str = "take up a certificate authority";
        let KeptAuthority { run_id, ca_pem, key_pem, expires_s } = kept;
        let expires = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(expires_s));
        let expires = expires.ok_or_else(|| cannot(TAKE, "it never ends"))?;
        CertificateDer::from_pem_slice(ca_pem.as_bytes()).map_err(|error| cannot(TAKE, error))?;
        // The words of the error could repeat the key.
        let key = KeyPair::from_pem(&key_pem).map_err(|_| cannot(TAKE, "its key is damaged"))?;
        // A certificate names its issuer by these, so they need not be read out of the authority's own.
        let params = ca_params(&run_id, expires).map_err(|error| cannot(TAKE, error))?;
        Ok(Self { run_id, issuer: Issuer::new(params, key), ca_pem, expires })
    }

    /// A certificate for the peer `name` (a DNS label: letters, digits, hyphens), good as long as the authority.
    pub fn issue(&self, name: &str) -> Result<Identity> {
        self.issue_until(name, self.expires)
    }

    /// The same with an end of its own.
    pub fn issue_until(&self, name: &str, expires: SystemTime) -> Result<Identity> {
        const ISSUE: &str = "issue a certificate";
        server_name(name)?;
        let mut params =
            params(name, vec![name.to_owned()], expires).map_err(|error| cannot(ISSUE, error))?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().map_err(|error| cannot(ISSUE, error))?;
        let cert = params.signed_by(&key, &self.issuer).map_err(|error| cannot(ISSUE, error))?;
        Ok(Identity {
            name: name.to_owned(),
            ca_pem: self.ca_pem.clone(),
            cert_pem: cert.pem(),
            key_pem: key.serialize_pem(),
        })
    }
}

fn ca_params(run_id: &str, expires: SystemTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = params(&format!("sky-monarch {run_id}"), Vec::new(), expires)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn params(
    common_name: &str,
    names: Vec<String>,
    expires: SystemTime,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = (SystemTime::now().min(expires) - CLOCK_SKEW).into();
    params.not_after = expires.into();
    Ok(params)
}

/// The name that a server's certificate must hold.
pub(crate) fn server_name(name: &str) -> Result<ServerName<'static>> {
    let label = !name.is_empty()
        && name.len() <= 63
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-');
    let bad =
        || cannot("name a peer", format!("{name:?} is no DNS label (letters, digits, hyphens; 63 at most)"));
    if !label {
        return Err(bad());
    }
    ServerName::try_from(name.to_owned()).map_err(|_| bad())
}

/// The name that the peer's (verified) certificate holds.
pub(super) fn peer_name(chain: Option<&[CertificateDer<'_>]>) -> Result<String> {
    let nameless = || Error::new(ErrorKind::Refused, "name a peer", "its certificate holds no name");
    let leaf = chain.and_then(<[_]>::first).ok_or_else(nameless)?;
    let cert = webpki::EndEntityCert::try_from(leaf).map_err(|_| nameless())?;
    let name = cert.valid_dns_names().next().map(str::to_owned);
    name.ok_or_else(nameless)
}

struct Parsed {
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

const READ: &str = "read a certificate";

fn parse(identity: &Identity) -> Result<Parsed> {
    let mut roots = RootCertStore::empty();
    for cert in CertificateDer::pem_slice_iter(identity.ca_pem.as_bytes()) {
        let cert = cert.map_err(|error| cannot(READ, error))?;
        roots.add(cert).map_err(|error| cannot(READ, error))?;
    }
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(identity.cert_pem.as_bytes()).collect();
    let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes());
    Ok(Parsed {
        roots: Arc::new(roots),
        chain: chain.map_err(|error| cannot(READ, error))?,
        key: key.map_err(|error| cannot(READ, error))?,
    })
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    // Named, not installed: another library of this process may have chosen a default of its own.
    Arc::new(rustls::crypto::ring::default_provider())
}

pub(crate) fn acceptor(identity: &Identity) -> Result<TlsAcceptor> {
    let Parsed { roots, chain, key } = parse(identity)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
    let verifier = verifier.map_err(|error| cannot(READ, error))?;
    let config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| cannot(READ, error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|error| cannot(READ, error))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

pub(crate) fn connector(identity: &Identity) -> Result<TlsConnector> {
    let Parsed { roots, chain, key } = parse(identity)?;
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| cannot(READ, error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|error| cannot(READ, error))?;
    Ok(TlsConnector::from(Arc::new(config)))
}
