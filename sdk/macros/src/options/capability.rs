//! Capabilities: words such as `dirs:/photos`. The host checks the same rules when it loads the module.

use std::net::Ipv6Addr;

use syn::spanned::Spanned;
use syn::{Expr, ExprArray};

use super::{is_word, text};
use crate::limits::{CAPABILITIES_MAX, CAPABILITY_BYTES_MAX, NAME_CHARS_MAX};

/// A list of capabilities.
pub(super) fn capabilities(value: &Expr) -> syn::Result<Vec<String>> {
    let Expr::Array(ExprArray { elems, .. }) = value else {
        let why = "expected a list, for instance [\"dirs:/photos\"]";
        return Err(syn::Error::new(value.span(), why));
    };
    if elems.len() > CAPABILITIES_MAX {
        let why = format!("a handler has at most {CAPABILITIES_MAX} capabilities");
        return Err(syn::Error::new(value.span(), why));
    }
    elems
        .iter()
        .map(|element| {
            let literal = text(element)?;
            let capability = literal.value();
            check(&capability).map_err(|why| syn::Error::new(literal.span(), why))?;
            Ok(capability)
        })
        .collect()
}

fn check(capability: &str) -> Result<(), String> {
    let (word, detail) = match capability.split_once(':') {
        Some((word, detail)) => (word, Some(detail)),
        None => (capability, None),
    };
    let fits = |c: char| (c.is_ascii_graphic() || c == ' ') && c != '"' && c != '\\';
    let is_line = |detail: &str| {
        (1..=CAPABILITY_BYTES_MAX).contains(&detail.len()) && detail.chars().all(fits)
    };
    if word.len() > NAME_CHARS_MAX
        || !is_word(word)
        || detail.is_some_and(|detail| !is_line(detail))
    {
        return Err(format!(
            "a capability is one word of a-z, 0-9, _ and -, optionally followed by a colon and a value of up to \
             {CAPABILITY_BYTES_MAX} characters, for instance \"dirs:/photos\""
        ));
    }
    let expected = match (word, detail) {
        ("http", Some(host)) if !is_host(host) => {
            "a host without a scheme or port such as `api.example.com` or `*.example.com`"
        }
        ("secrets" | "sign" | "env" | "settings" | "sql", Some(name)) if !is_key(name) => {
            "a name of letters, digits, - and _"
        }
        ("enqueue", Some(pattern)) if !is_pattern(pattern) => {
            "a handler name or a pattern such as `photo.*`"
        }
        _ => return Ok(()),
    };
    Err(format!(
        "`{capability}`: expected {expected} after the colon"
    ))
}

/// True for a host name as in a URL, an address, or a pattern. Rouse's host is stricter about numbers that look like
/// addresses.
fn is_host(text: &str) -> bool {
    let bare = text
        .strip_prefix('[')
        .and_then(|inner| inner.strip_suffix(']'));
    let name = text.strip_prefix("*.").unwrap_or(text);
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && is_key(label)
    };
    text == "*"
        || bare.unwrap_or(text).parse::<Ipv6Addr>().is_ok()
        || (name.len() <= 253 && name.split('.').all(is_label))
}

fn is_key(name: &str) -> bool {
    name.chars()
        .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

/// `*`, a handler name, or the start of one: `photo.*`.
fn is_pattern(text: &str) -> bool {
    let words = text.strip_suffix(".*").unwrap_or(text);
    text == "*" || words.split('.').all(is_word)
}
