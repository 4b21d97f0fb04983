//! What was denied, in words: who asked for what, and the lines of rouse.toml that would allow it.

use std::net::IpAddr;

use http::{Method, Uri};

use super::address::AddressKind;
use super::target::Target;
use crate::harmless::printable;
use crate::sandbox::grants::lines;

/// A guest may make up methods and authorities of any length.
const WORD_BYTES_MAX: usize = 200;

/// Of an address that nobody can grant, because it can be read in two ways or is none.
pub(super) fn unreadable(handler: &str, method: &Method, uri: &Uri, why: &str) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    // What stands before an @ may be a password.
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!(
        "the handler {handler} asked for {} {}, which is granted to nobody: {why}",
        word(method.as_str()),
        word(host)
    )
}

/// Of a tunnel, within which nothing could be looked at.
pub(super) fn tunnel(handler: &str, target: &Target) -> String {
    format!(
        "the handler {handler} asked for a tunnel (CONNECT) to {target}, which is granted to nobody"
    )
}

/// Of a request that no grant covers.
pub(super) fn not_granted(handler: &str, method: &Method, target: &Target, config: &str) -> String {
    let method = word(method.as_str());
    format!(
        "the handler {handler} asked for {method} {target}, which is not granted to it; these lines in rouse.toml would allow it:\n{}",
        lines::to_paste(handler, &lines(handler, &method, target), config)
    )
}

/// Of a host that leads to where only some grants reach.
pub(super) fn prohibited(
    handler: &str,
    method: &Method,
    target: &Target,
    address: IpAddr,
    kind: AddressKind,
    config: &str,
) -> String {
    let method = word(method.as_str());
    let asked =
        format!("the handler {handler} asked for {method} {target}, which leads to {address}");
    match kind {
        AddressKind::Public | AddressKind::Own | AddressKind::Private => {
            let what = match kind {
                AddressKind::Own => "an address of this machine",
                _ => "not a public address",
            };
            format!(
                "{asked}, which is {what}; these lines in rouse.toml would allow it:\n{}",
                lines::to_paste(
                    handler,
                    &format!("{}\nprivate = true", lines(handler, &method, target)),
                    config
                )
            )
        }
        AddressKind::Metadata => format!(
            "{asked}, where clouds give out credentials; only a grant whose `hosts` list that very address allows it"
        ),
        AddressKind::Nowhere => format!("{asked}, which is no address of a server"),
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

/// Of a request that the handler might send, but not for this job.
pub(super) fn taken_away(handler: &str, method: &Method, target: &Target) -> String {
    let method = word(method.as_str());
    format!(
        "the handler {handler} asked for {method} {target}, which the grants of this job leave out; enqueue it with \"{}\" under \"http\" of its grants, or without",
        target.host
    )
}

/// Of a secret that the handler has, but not for this job.
pub(super) fn secret_taken_away(handler: &str, name: &str) -> String {
    let name = word(name);
    format!(
        "the handler {handler} asked for the secret {name}, which the grants of this job leave out; enqueue it with \"{name}\" under \"secrets\" of its grants, or without"
    )
}

/// Lines behind those that bind the handler's name, and before those that say where the secret is read from.
fn with_others(binding: Option<&str>, own: &str, name: &str) -> String {
    let source = lines::read_from(name);
    let all = binding.into_iter().chain([own, &source]);
    all.collect::<Vec<_>>().join("\n\n")
}

/// What there is to mind of a secret that may not be there at all yet.
const THEN_READ: &str = "; a secret is read from a variable of the host's environment (env = …), or from a file (file = \"PATH\")";

/// Of a secret that the handler is not granted at all. `binding`: the lines that bind the handler's name, where it has to be.
pub(super) fn no_secret(handler: &str, name: &str, binding: Option<&str>, config: &str) -> String {
    let name = word(name);
    let own = lines::secret(handler, Some(&name), None, "authorization");
    format!(
        "the handler {handler} asked for the secret {name}, which is not granted to it; with the server and the header for which it is, these lines in rouse.toml would allow it:\n{}{THEN_READ}",
        lines::to_paste(handler, &with_others(binding, &own, &name), config)
    )
}

/// Of a secret that the handler is granted by a table that binds no module.
pub(super) fn unbound_secret(handler: &str, name: &str, lines: &str) -> String {
    let name = word(name);
    format!(
        "the handler {handler} asked for the secret {name}, which is granted to whatever module has that name, and therefore to none; these lines in rouse.toml would grant it to the module that runs:\n{lines}{}",
        lines::then_in_table(handler)
    )
}

/// Of a signature with a secret that the handler may not sign with.
pub(super) fn no_signing(handler: &str, name: &str, binding: Option<&str>, config: &str) -> String {
    let name = word(name);
    let own = lines::signing(handler, Some(&name));
    format!(
        "the handler {handler} asked for a signature with the secret {name}, which is not granted to it for that; these lines in rouse.toml would allow it:\n{}{THEN_READ}",
        lines::to_paste(handler, &with_others(binding, &own, &name), config)
    )
}

/// Of a secret in a header of a request to a host, one of which is not among those of its grants.
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
        "the handler {handler} put the secret {name} into the header {header} of a request to {target}, where it may not go; these lines in rouse.toml would allow it:\n{}",
        lines::to_paste(
            handler,
            &lines::secret(handler, Some(name), Some(&host), &header),
            config
        )
    )
}

/// Of a secret in a path or a query, which servers and proxies write into their logs.
pub(super) fn secret_in_path(handler: &str, name: &str, target: &Target) -> String {
    format!(
        "the handler {handler} put the secret {name} into the path of a request to {target}; a secret goes into headers and bodies only"
    )
}

fn word(text: &str) -> String {
    printable(text, WORD_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(uri: &str) -> Target {
        Target::of(&uri.parse().expect("a URI")).expect("a target")
    }

    #[test]
    fn the_lines_that_are_printed_are_those_that_allow_it() {
        let said = not_granted(
            "mail.send",
            &Method::POST,
            &target("http://a.example:8080/x"),
            "",
        );
        let (_, rest) = said.split_once(":\n").expect("lines");
        let (lines, then) = rest.split_once("\n\n").expect("what to do with them");
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
    fn a_secret_that_is_not_granted_may_have_to_be_read_from_somewhere_first() {
        for say in [no_secret, no_signing] {
            let source = "\n\n[secrets.KEY]\nenv = \"KEY\"\n\n";
            let said = say("mail.send", "KEY", None, "");
            assert!(said.contains(source), "{said}");
            let there = "[secrets.KEY]\nfile = \"key\"\n";
            let said = say("mail.send", "KEY", None, there);
            assert!(!said.contains("[secrets.KEY]"), "{said}");
            let list = "[handlers.\"mail.send\"]\nsecrets = []\n";
            let said = say("mail.send", "KEY", None, list);
            assert!(said.contains("\n{ name = \"KEY\", "), "{said}");
            assert!(said.contains("where the lines with # say"), "{said}");
        }
    }

    #[test]
    fn a_password_in_an_address_is_not_repeated() {
        let uri = "https://user:hunter2@a.example/".parse().expect("a URI");
        let said = unreadable("x", &Method::GET, &uri, "why");
        assert!(
            said.contains("a.example") && !said.contains("hunter2"),
            "{said}"
        );
    }
}
