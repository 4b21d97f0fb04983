//! The messages of denials: what the handler requested, and the lines of rouse.toml that would allow it.

use std::net::IpAddr;

use http::{Method, Uri};

use super::address::AddressKind;
use super::target::Target;
use crate::sandbox::grants::lines;
use crate::sanitize::printable;

/// The maximum size of a quoted word: guests may use methods and authorities of any length.
const WORD_BYTES_MAX: usize = 200;

/// Denies an address that cannot be granted, because it is ambiguous or invalid.
pub(super) fn unreadable(handler: &str, method: &Method, uri: &Uri, why: &str) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    // The part before an @ may be a password.
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!(
        "the handler {handler} requested {} {}, which cannot be granted: {why}",
        word(method.as_str()),
        word(host)
    )
}

/// Denies a tunnel, whose requests could not be checked.
pub(super) fn tunnel(handler: &str, target: &Target) -> String {
    format!(
        "the handler {handler} requested a tunnel (CONNECT) to {target}, which cannot be granted"
    )
}

/// Denies a request that no grant covers.
pub(super) fn not_granted(handler: &str, method: &Method, target: &Target, config: &str) -> String {
    let method = word(method.as_str());
    format!(
        "the handler {handler} requested {method} {target}, which is not granted to it; to grant it, add these lines to rouse.toml:\n{}",
        lines::to_paste(handler, &lines(handler, &method, target), config)
    )
}

/// Denies a host whose address the grant does not cover.
pub(super) fn prohibited(
    handler: &str,
    method: &Method,
    target: &Target,
    address: IpAddr,
    kind: AddressKind,
    config: &str,
) -> String {
    let method = word(method.as_str());
    let request =
        format!("the handler {handler} requested {method} {target}, which leads to {address}");
    match kind {
        AddressKind::Public | AddressKind::Own | AddressKind::Private => {
            let kind = match kind {
                AddressKind::Own => "an address of this machine",
                _ => "not a public address",
            };
            format!(
                "{request}, which is {kind}; to grant it, add these lines to rouse.toml:\n{}",
                lines::to_paste(
                    handler,
                    &format!("{}\nprivate = true", lines(handler, &method, target)),
                    config
                )
            )
        }
        AddressKind::Metadata => format!(
            "{request}, where clouds serve credentials; only a grant that lists exactly this address in its `hosts` allows it"
        ),
        AddressKind::Nowhere => format!("{request}, which is not the address of a server"),
    }
}

fn lines(handler: &str, method: &str, target: &Target) -> String {
    let host = target.host.to_string();
    lines::http(
        handler,
        Some(&host),
        target.scheme,
        Some(target.port),
        Some(method),
    )
}

/// Denies a request that the handler is granted, but that the job's attenuation removes.
pub(super) fn removed_by_job(handler: &str, method: &Method, target: &Target) -> String {
    let method = word(method.as_str());
    format!(
        "the handler {handler} requested {method} {target}, which the grants of this job leave out; enqueue it with \"{}\" under \"http\" of its grants, or without that key",
        target.host
    )
}

/// Denies a secret that the handler is granted, but that the job's attenuation removes.
pub(super) fn secret_removed_by_job(handler: &str, name: &str) -> String {
    let name = word(name);
    format!(
        "the handler {handler} requested the secret {name}, which the grants of this job leave out; enqueue it with \"{name}\" under \"secrets\" of its grants, or without that key"
    )
}

/// Puts lines after those that bind the handler's name, and before those that define where the secret is read from.
fn with_others(binding: Option<&str>, own: &str, name: &str) -> String {
    let source = lines::read_from(name);
    let all = binding.into_iter().chain([own, &source]);
    all.collect::<Vec<_>>().join("\n\n")
}

/// Explains how to define a secret that may not exist yet.
const THEN_READ: &str = ". A secret is read from a variable of the host's environment (env = …), or from a file (file = \"PATH\")";

/// Denies a secret that the handler is not granted. `binding`: the lines that bind the handler's name, if it is not
/// bound.
pub(super) fn no_secret(handler: &str, name: &str, binding: Option<&str>, config: &str) -> String {
    let name = word(name);
    let own = lines::secret(handler, Some(&name), None, "authorization");
    format!(
        "the handler {handler} requested the secret {name}, which is not granted to it; to grant it, add these lines to rouse.toml, with its server and header filled in:\n{}{THEN_READ}",
        lines::to_paste(handler, &with_others(binding, &own, &name), config)
    )
}

/// Denies a secret that a table without a binding grants.
pub(super) fn unbound_secret(handler: &str, name: &str, lines: &str) -> String {
    let name = word(name);
    format!(
        "the handler {handler} requested the secret {name}, which is granted in a table that does not name a module, so no module gets it; to grant it to the module that runs, add these lines to rouse.toml:\n{lines}{}",
        lines::how_to_bind(handler)
    )
}

/// Denies a signature with a secret that the handler may not sign with.
pub(super) fn no_signing(handler: &str, name: &str, binding: Option<&str>, config: &str) -> String {
    let name = word(name);
    let own = lines::signing(handler, Some(&name));
    format!(
        "the handler {handler} requested a signature with the secret {name}, which is not granted to it for signing; to grant it, add these lines to rouse.toml:\n{}{THEN_READ}",
        lines::to_paste(handler, &with_others(binding, &own, &name), config)
    )
}

/// Denies a secret in a header or to a host that its grants do not list.
pub(super) fn secret_in_header(
    handler: &str,
    name: &str,
    header: &str,
    target: &Target,
    config: &str,
) -> String {
    let header = word(header);
    let host = target.host.to_string();
    format!(
        "the handler {handler} put the secret {name} into the header {header} of a request to {target}, where it may not be sent; to grant it, add these lines to rouse.toml:\n{}",
        lines::to_paste(
            handler,
            &lines::secret(handler, Some(name), Some(&host), &header),
            config
        )
    )
}

/// Denies a secret in a path or query, which servers and proxies write to their logs.
pub(super) fn secret_in_path(handler: &str, name: &str, target: &Target) -> String {
    format!(
        "the handler {handler} put the secret {name} into the path or query of a request to {target}; secrets are allowed only in headers and bodies"
    )
}

fn word(text: &str) -> String {
    printable(text, WORD_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(uri: &str) -> Target {
        Target::parse(&uri.parse().expect("a URI")).expect("a target")
    }

    #[test]
    fn print_the_lines_that_would_allow_a_request() {
        let denial = not_granted(
            "mail.send",
            &Method::POST,
            &target("http://a.example:8080/x"),
            "",
        );
        let (_, rest) = denial.split_once(":\n").expect("lines");
        let (lines, then) = rest.split_once("\n\n").expect("a paragraph");
        assert_eq!(
            lines,
            "[[handlers.\"mail.send\".http]]\nhosts = [\"a.example\"]\nschemes = [\"http\"]\nports = [8080]\nmethods = [\"POST\"]"
        );
        for part in [
            "at the end of rouse.toml",
            "`rouse handlers show mail.send`",
            "restart the host",
            "`rouse job retry ID`",
        ] {
            assert!(then.contains(part), "{part}: {then}");
        }
    }

    #[test]
    fn print_the_source_of_a_secret_unless_it_exists() {
        for deny in [no_secret, no_signing] {
            let source = "\n\n[secrets.KEY]\nenv = \"KEY\"\n\n";
            let denial = deny("mail.send", "KEY", None, "");
            assert!(denial.contains(source), "{denial}");
            let existing = "[secrets.KEY]\nfile = \"key\"\n";
            let denial = deny("mail.send", "KEY", None, existing);
            assert!(!denial.contains("[secrets.KEY]"), "{denial}");
            let list = "[handlers.\"mail.send\"]\nsecrets = []\n";
            let denial = deny("mail.send", "KEY", None, list);
            assert!(denial.contains("\n{ name = \"KEY\", "), "{denial}");
            assert!(denial.contains("where the comment says"), "{denial}");
        }
    }

    #[test]
    fn do_not_repeat_a_password_in_an_address() {
        let uri = "https://user:hunter2@a.example/".parse().expect("a URI");
        let denial = unreadable("x", &Method::GET, &uri, "why");
        assert!(
            denial.contains("a.example") && !denial.contains("hunter2"),
            "{denial}"
        );
    }
}
