//! Password and TLS, with which a client connects to the servers of a store.
//!
//! Certificates are read once, at the start. Each server's certificate must be for the host of the
//! first seed: a cluster names its servers by addresses, which certificates rarely contain.
//!
//! A connection with TLS allocates 16 KiB at a time for the records that it receives.

use crate::address::{Address, Seed};
use crate::error::ConnectError;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The places of the authorities' certificates on distributions.
const AUTHORITIES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// Password and certificates.
pub(crate) struct Secrets {
    pub(crate) password: Option<String>,
    pub(crate) tls: Option<Tls>,
}

impl Secrets {
    /// The secrets for an address. Fails if a file cannot be used.
    pub(crate) fn of(address: &Address) -> Result<Self, ConnectError> {
        let tls = Tls::of(address).map_err(|reason| ConnectError::store(address, reason))?;
        Ok(Self { password: address.password()?, tls })
    }
}

/// The settings for connections with TLS.
pub(crate) struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// The settings for an address; `None` without TLS. The error has the reason and the remedy.
    pub(crate) fn of(address: &Address) -> Result<Option<Self>, String> {
        if !address.is_tls {
            return Ok(None);
        }
        let Some(Seed::Tcp(host, _)) = address.seeds.first() else { return Ok(None) };
        let name = ServerName::try_from(host.clone());
        let name = name.map_err(|_| format!("'{host}' is no name that a certificate may have"))?;
        let file = address.authorities.as_deref();
        let file = file.or_else(|| AUTHORITIES.iter().map(Path::new).find(|path| path.exists()));
        let file = file.ok_or("no certificates of authorities here; name a file (ca=FILE)")?;
        let mut roots = RootCertStore::empty();
        // Skips entries that are not certificates. A file without certificates gives none.
        roots.add_parsable_certificates(certificates(file)?);
        if roots.is_empty() {
            return Err(format!("{} has no certificate; name another (ca=FILE)", file.display()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().map_err(|e| e.to_string())?;
        let builder = builder.with_root_certificates(roots);
        let config = match &address.certificate {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let key = PrivateKeyDer::from_pem_file(file);
                let key = key.map_err(|error| unreadable(file, &error))?;
                let config = builder.with_client_auth_cert(certificates(file)?, key);
                config.map_err(|error| format!("{}: {error}", file.display()))?
            }
        };
        Ok(Some(Self { config: Arc::new(config), name }))
    }

    /// The state of a new connection.
    pub(crate) fn begin(&self) -> io::Result<ClientConnection> {
        let new = ClientConnection::new(self.config.clone(), self.name.clone());
        new.map_err(io::Error::other)
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let all = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    all.map_err(|error| unreadable(file, &error))
}

fn unreadable(file: &Path, error: &rustls::pki_types::pem::Error) -> String {
    format!("{}: {error}; name a file in PEM that you may read", file.display())
}
