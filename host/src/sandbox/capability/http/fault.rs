//! Why a request failed, and the error that the guest gets.

use std::error::Error as _;
use std::net::IpAddr;

use wasmtime_wasi_http::Error;

use super::address::AddressKind;

/// Why a request failed.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum Fault {
    #[error("the attempt has to stop")]
    Stopped,
    /// The denial is already recorded, with a remedy for the operator.
    #[error("the request is not granted to the handler")]
    Denied,
    /// All addresses of the host are prohibited.
    #[error("the handler may not connect to {address}")]
    Prohibited { address: IpAddr, kind: AddressKind },
    #[error("{0}")]
    Limit(String),
    #[error("the request body exceeds the limit of {0} bytes (limits.http_body_bytes)")]
    RequestBody(u64),
    #[error("the response body exceeds the limit of {0} bytes (limits.http_body_bytes)")]
    ResponseBody(u64),
    /// The guest dropped it unfinished, or its length differs from the declared one.
    #[error("the request body is incomplete")]
    Unfinished,
    #[error("the name of the server cannot be resolved: {0}")]
    Unknown(String),
    #[error("the connection failed: {0}")]
    Unreachable(String),
    #[error("the connection was not established in time")]
    ConnectTimeout,
    #[error("the TLS handshake failed: {0}")]
    Tls(String),
    #[error("the response did not start in time")]
    HeadTimeout,
    #[error("the rest of the response did not arrive in time")]
    BodyTimeout,
    #[error("the request body was not sent in time")]
    SendTimeout,
    #[error("the connection or the response broke off: {0}")]
    Broken(String),
}

impl Fault {
    /// The cause of a client error: the `Fault` of this host that led to it, if there is one.
    pub(super) fn from_client_error(error: &hyper_util::client::legacy::Error) -> Self {
        let mut cause = error.source();
        let mut last = error.to_string();
        while let Some(error) = cause {
            if let Some(fault) = error.downcast_ref::<Self>() {
                return fault.clone();
            }
            last = error.to_string();
            cause = error.source();
        }
        Self::Broken(last)
    }

    /// The word for the fault in traces.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Denied | Self::Prohibited { .. } => "denied",
            Self::Limit(_) | Self::RequestBody(_) | Self::ResponseBody(_) => "limit",
            Self::Unfinished => "unfinished",
            Self::Unknown(_) => "name_not_found",
            Self::Unreachable(_) => "unreachable",
            Self::ConnectTimeout | Self::HeadTimeout | Self::BodyTimeout | Self::SendTimeout => {
                "timeout"
            }
            Self::Tls(_) => "tls",
            Self::Broken(_) => "broken",
        }
    }

    /// The error for the guest: a WASI error code if there is one, otherwise the message.
    pub(super) fn into_error(self) -> Error {
        let text = self.to_string();
        match self {
            Self::Denied => Error::HttpRequestDenied,
            Self::Prohibited { .. } => Error::DestinationIpProhibited,
            Self::RequestBody(bytes) => Error::HttpRequestBodySize(Some(bytes)),
            Self::ResponseBody(bytes) => Error::HttpResponseBodySize(Some(bytes)),
            Self::Unknown(why) => Error::DnsError {
                rcode: Some(why),
                info_code: None,
            },
            Self::ConnectTimeout => Error::ConnectionTimeout,
            Self::HeadTimeout | Self::BodyTimeout | Self::SendTimeout => Error::HttpResponseTimeout,
            Self::Stopped
            | Self::Limit(_)
            | Self::Unfinished
            | Self::Unreachable(_)
            | Self::Tls(_)
            | Self::Broken(_) => Error::InternalError(Some(text)),
        }
    }
}
