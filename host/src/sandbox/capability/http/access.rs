//! The requests that one handler may send, and the secrets that it may use.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use http::{Method, Uri};

use super::connect::Reach;
use super::denial;
use super::net::{HttpClient, Net};
use super::target::Target;
use crate::job::pattern_covers;
use crate::sandbox::grants::{Host, HostPattern, HttpGrant, Secret, SecretGrant, lines};
use crate::sandbox::{Attenuation, Origin, Settings};

/// The requests that one handler may send, and the secrets that it may use.
pub(in crate::sandbox) struct HttpAccess {
    pub(super) handler: Arc<str>,
    grants: Vec<HttpGrant>,
    /// The job's attenuation. The grants stay unchanged, because the reach of a grant depends on its hosts.
    job: Option<Attenuation>,
    sent_names: BTreeSet<String>,
    signing_names: BTreeSet<String>,
    /// The lines of `rouse.toml` that would bind the handler's name to its module; `None` if it is bound.
    pub(super) binding: Option<String>,
    /// Secrets that are withheld because the tables of `rouse.toml` that grant them do not name a module, with the
    /// lines that would bind these tables.
    pub(super) unbound_secrets: BTreeMap<String, String>,
    pub(super) secrets: BTreeMap<String, GrantedSecret>,
    pub(super) net: Arc<Net>,
    /// The text of the operator's file, for suggested lines.
    pub(super) config: Arc<str>,
}

impl fmt::Debug for HttpAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpAccess")
            .field("grants", &self.grants)
            .finish_non_exhaustive()
    }
}

/// A secret, and the servers to which it may be sent.
pub(super) struct GrantedSecret {
    pub(super) secret: Secret,
    of_handler: Vec<SecretGrant>,
    /// The job's attenuation removes it.
    pub(super) is_removed_by_job: bool,
}

impl GrantedSecret {
    /// The grants that remain in this job.
    pub(super) fn grants(&self) -> impl Iterator<Item = &SecretGrant> {
        let remains = !self.is_removed_by_job;
        self.of_handler.iter().filter(move |_| remains)
    }

    /// True if a job of the handler may have sent the secret to this server, even if this job may not.
    pub(super) fn may_be_known_to(&self, host: &Host) -> bool {
        self.of_handler.iter().any(|grant| grant.reaches(host))
    }
}

/// A granted request.
pub(super) struct Allowed {
    pub(super) target: Target,
    pub(super) reach: Reach,
}

impl HttpAccess {
    /// The requests and secrets that the operator grants to this handler of this module.
    pub(in crate::sandbox) fn new(
        handler: &str,
        origin: Origin<'_>,
        settings: &Settings,
        net: Arc<Net>,
    ) -> Arc<Self> {
        let matching = settings.secret_grants.iter();
        let matching = matching.filter(|grant| pattern_covers(&grant.handler, handler));
        let (own, withheld): (Vec<&SecretGrant>, Vec<&SecretGrant>) =
            matching.partition(|grant| settings.grants_secrets_to(&grant.handler, origin));
        let mut secrets = BTreeMap::<String, GrantedSecret>::new();
        for grant in &own {
            // A missing secret was reported when the settings were read.
            if let Some(secret) = settings.secrets.0.get(&grant.name) {
                let granted = secrets.entry(grant.name.clone()).or_insert(GrantedSecret {
                    secret: secret.clone(),
                    of_handler: Vec::new(),
                    is_removed_by_job: false,
                });
                granted.of_handler.push((*grant).clone());
            }
        }
        let names = |is_included: fn(&SecretGrant) -> bool| -> BTreeSet<String> {
            let included = own.iter().filter(|grant| is_included(grant));
            included.map(|grant| grant.name.clone()).collect()
        };
        let unbound = withheld
            .iter()
            .filter(|grant| settings.bound(&grant.handler).is_none());
        let unbound = unbound.map(|grant| {
            let lines = lines::module(&grant.handler, origin.file);
            (grant.name.clone(), lines)
        });
        let grants = settings.http_grants.iter();
        Arc::new(Self {
            handler: handler.into(),
            grants: grants
                .filter(|grant| pattern_covers(&grant.handler, handler))
                .cloned()
                .collect(),
            job: None,
            sent_names: names(|grant| !grant.hosts.is_empty()),
            signing_names: names(|grant| grant.sign),
            binding: settings
                .bound(handler)
                .is_none()
                .then(|| lines::module(handler, origin.file)),
            unbound_secrets: unbound.collect(),
            secrets,
            net,
            config: settings.config.clone(),
        })
    }

    /// True if the handler may send any request.
    pub(in crate::sandbox) fn sends(&self) -> bool {
        !self.grants.is_empty()
    }

    /// True if the handler may send requests to all of these servers.
    pub(in crate::sandbox) fn reaches(&self, hosts: &HostPattern) -> bool {
        self.hosts().any(|pattern| pattern.includes(hosts))
    }

    /// The servers that the handler may send requests to.
    pub(in crate::sandbox) fn hosts(&self) -> impl Iterator<Item = &HostPattern> {
        self.grants.iter().flat_map(|grant| &grant.hosts)
    }

    /// The secrets that the handler may send, even if they were not read (`rouse handlers` does not read them).
    pub(in crate::sandbox) fn sent_names(&self) -> &BTreeSet<String> {
        &self.sent_names
    }

    /// The secrets that the handler may sign with, even if they were not read.
    pub(in crate::sandbox) fn signing_names(&self) -> &BTreeSet<String> {
        &self.signing_names
    }

    /// True if this secret can be sent.
    pub(super) fn has_secret(&self, name: &str) -> bool {
        let granted = self.secrets.get(name);
        granted.is_some_and(|secret| !secret.is_removed_by_job)
    }

    /// Applies a job's attenuation. Connections are shared with the handler's other jobs.
    pub(in crate::sandbox) fn attenuated(&self, job: &Attenuation) -> Arc<Self> {
        let secrets = self.secrets.iter().map(|(name, granted)| {
            let granted = GrantedSecret {
                secret: granted.secret.clone(),
                of_handler: granted.of_handler.clone(),
                is_removed_by_job: granted.is_removed_by_job || !job.leaves_secret(name),
            };
            (name.clone(), granted)
        });
        Arc::new(Self {
            handler: self.handler.clone(),
            grants: self.grants.clone(),
            job: Some(job.clone()),
            sent_names: self.sent_names.clone(),
            signing_names: self.signing_names.clone(),
            binding: self.binding.clone(),
            unbound_secrets: self.unbound_secrets.clone(),
            secrets: secrets.collect(),
            net: self.net.clone(),
            config: self.config.clone(),
        })
    }

    /// Checks whether a request is granted.
    ///
    /// # Errors
    /// The denial, if it is not granted, with a remedy for the operator.
    pub(super) fn allow(&self, method: &Method, uri: &Uri) -> Result<Allowed, String> {
        let target = Target::parse(uri)
            .map_err(|why| denial::unreadable(&self.handler, method, uri, &why))?;
        if method == Method::CONNECT {
            return Err(denial::tunnel(&self.handler, &target));
        }
        let matching = self.grants.iter().filter(|grant| {
            grant.covers(target.scheme, &target.host, target.port)
                && grant.covers_method(method.as_str())
        });
        let reach = matching.map(|grant| reach(grant, &target)).max();
        let removes = |job: &Attenuation| !job.leaves_host(&target.host);
        match reach {
            Some(_) if self.job.as_ref().is_some_and(removes) => {
                Err(denial::removed_by_job(&self.handler, method, &target))
            }
            Some(reach) => Ok(Allowed { target, reach }),
            None => Err(denial::not_granted(
                &self.handler,
                method,
                &target,
                &self.config,
            )),
        }
    }

    pub(super) fn client(&self, reach: Reach) -> HttpClient {
        self.net.client(&self.handler, reach)
    }
}

/// The reach of a grant for this target.
fn reach(grant: &HttpGrant, target: &Target) -> Reach {
    let lists_address = |pattern: &HostPattern| match pattern {
        HostPattern::Exact(host) => matches!(host, Host::Ip(_)) && *host == target.host,
        HostPattern::Any | HostPattern::Under(_) => false,
    };
    if grant.hosts.iter().any(lists_address) {
        Reach::Listed
    } else if grant.private {
        Reach::Private
    } else {
        Reach::Public
    }
}
