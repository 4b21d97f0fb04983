//! The dashboard of a host, and of `rouse ui`: its settings in the environment.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use axum::http::HeaderName;
use tokio_util::sync::CancellationToken;

use crate::config::Environment;
use crate::http::{Dashboard, Token};
use crate::sandbox::Catalog;
use crate::store::Store;
use crate::store::connect::Connector;
use crate::ui::{Access, CONNECTIONS_MAX, Look, PATH, Proxy, Tokens, Ui};

/// Connections to the database: one for the page that is drawn, one for background reads, and two in reserve.
const POOL_SIZE: usize = 4;

/// The settings in the environment.
pub(in crate::cli) struct Settings {
    /// The login of the dashboard, if it has its own.
    connector: Option<Connector>,
    tokens: Tokens,
    proxy: Option<Proxy>,
    look: Look,
}

impl Settings {
    /// Reads and checks the settings; `None` if the dashboard is off.
    pub(in crate::cli) fn read() -> anyhow::Result<Option<Self>> {
        match Environment.get("ROUSE_UI").as_deref() {
            None | Some("on") => {}
            Some("off") => return Ok(None),
            Some(other) => bail!("ROUSE_UI is {other:?}; it can be on or off"),
        }
        let connector = match Environment.restriction("ROUSE_UI_DATABASE_URL")? {
            Some(url) => Some(
                Connector::from_url(&url, &|name| Environment.get(name))
                    .context("read ROUSE_UI_DATABASE_URL")?,
            ),
            None => None,
        };
        Ok(Some(Self {
            connector,
            tokens: tokens()?,
            proxy: proxy()?,
            look: look()?,
        }))
    }
}

/// The dashboard at this address; `None` if it is off, or there is no database. `is_own`: see [`Access::new`].
pub(in crate::cli) fn start(
    connector: Option<&Connector>,
    catalog: Option<Arc<Catalog>>,
    address: SocketAddr,
    is_own: bool,
    stopping: CancellationToken,
) -> anyhow::Result<Option<Dashboard>> {
    let (Some(settings), Some(connector)) = (Settings::read()?, connector) else {
        return Ok(None);
    };
    let connector = settings.connector.as_ref().unwrap_or(connector);
    let access = Access::new(settings.tokens, settings.proxy, address, is_own);
    let store = Store::new(connector, POOL_SIZE);
    let ui = Ui::start(store, catalog, access, settings.look, stopping);
    Ok(Some(Dashboard {
        router: ui.router(),
        connections_max: CONNECTIONS_MAX,
    }))
}

/// The URL of the dashboard, for the user who started it; `None` if it is off.
pub(in crate::cli) fn url(address: SocketAddr) -> Option<String> {
    let is_off = Environment.get("ROUSE_UI").as_deref() == Some("off");
    (!is_off).then(|| format!("http://{address}{PATH}/"))
}

fn tokens() -> anyhow::Result<Tokens> {
    let token = |name: &str| -> anyhow::Result<Option<Token>> {
        let text = Environment.restriction(name)?;
        let token = text.map(|text| Token::new(&text)).transpose();
        token
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("read {name}"))
    };
    let tokens = Tokens {
        viewer: token("ROUSE_UI_VIEWER_TOKEN")?,
        operator: token("ROUSE_UI_OPERATOR_TOKEN")?,
    };
    ensure!(
        tokens.viewer.is_none() || tokens.viewer != tokens.operator,
        "ROUSE_UI_VIEWER_TOKEN and ROUSE_UI_OPERATOR_TOKEN are the same, so every viewer could make changes"
    );
    Ok(tokens)
}

fn proxy() -> anyhow::Result<Option<Proxy>> {
    let operators = Environment.get("ROUSE_UI_OPERATORS");
    let Some(header) = Environment.restriction("ROUSE_UI_USER_HEADER")? else {
        ensure!(
            operators.is_none(),
            "ROUSE_UI_OPERATORS names users of a proxy; set ROUSE_UI_USER_HEADER to the header in which the proxy sends their names"
        );
        return Ok(None);
    };
    let user_header = HeaderName::from_bytes(header.as_bytes())
        .with_context(|| format!("ROUSE_UI_USER_HEADER: {header:?} is not the name of a header"))?;
    let operators = operators.unwrap_or_default();
    let operators = operators
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty());
    Ok(Some(Proxy {
        user_header,
        operators: operators.map(str::to_owned).collect(),
    }))
}

fn look() -> anyhow::Result<Look> {
    let look = Look {
        instance: Environment.get("ROUSE_UI_NAME").unwrap_or_default(),
        colour: Environment.get("ROUSE_UI_COLOUR").unwrap_or_default(),
        trace_url: Environment.get("ROUSE_UI_TRACE_URL").unwrap_or_default(),
        prefix: Environment.get("ROUSE_UI_PREFIX").unwrap_or_default(),
    };
    let is_hexadecimal =
        |text: &str| text.len() == 6 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    ensure!(
        look.colour.is_empty() || look.colour.strip_prefix('#').is_some_and(is_hexadecimal),
        "ROUSE_UI_COLOUR is {:?}; expected a colour such as #c2410c",
        look.colour
    );
    let is_web = |url: &str| url.starts_with("https://") || url.starts_with("http://");
    ensure!(
        look.trace_url.is_empty()
            || (is_web(&look.trace_url) && look.trace_url.contains("{trace}")),
        "ROUSE_UI_TRACE_URL is {:?}; expected an address such as http://127.0.0.1:16686/trace/{{trace}}",
        look.trace_url
    );
    let is_path = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte);
    let prefix = &look.prefix;
    ensure!(
        prefix.is_empty()
            || (prefix.starts_with('/')
                && !prefix.starts_with("//")
                && !prefix.ends_with('/')
                && prefix.bytes().all(is_path)),
        "ROUSE_UI_PREFIX is {prefix:?}; expected a path such as /ops, without a slash at its end"
    );
    Ok(look)
}
