//! How `rouse.toml` names modules, their keys and their versions.

use std::fmt;

use semver::Version;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::sandbox::{ModuleBinding, PublicKey};

/// How modules are pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum PinWord {
    /// To the digests in `handlers.lock`.
    Lock,
}

/// Public keys.
pub(super) struct TrustedKeys(pub(super) Vec<PublicKey>);

impl<'de> Deserialize<'de> for TrustedKeys {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let strings = Vec::<String>::deserialize(input)?;
        let keys = strings.iter().map(|text| {
            text.parse()
                .map_err(|why| serde::de::Error::custom(format!("{text:?}: {why}")))
        });
        keys.collect::<Result<_, _>>().map(Self)
    }
}

/// The modules to which a name is bound: one string, or a list of strings.
pub(super) struct Bindings(pub(super) Vec<ModuleBinding>);

impl<'de> Deserialize<'de> for Bindings {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_any(Texts).map(Self)
    }
}

struct Texts;

impl<'de> Visitor<'de> for Texts {
    type Value = Vec<ModuleBinding>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the name of a file (\"mail.wasm\"), \"sha256:…\", \"ed25519:…\", or a list of these",
        )
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(vec![text.parse().map_err(E::custom)?])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(text) = elements.next_element::<String>()? {
            all.push(text.parse().map_err(serde::de::Error::custom)?);
        }
        match all.is_empty() {
            false => Ok(all),
            true => Err(serde::de::Error::invalid_length(0, &self)),
        }
    }
}

/// A version, as semver writes it.
pub(super) struct OldestVersion(pub(super) Version);

impl<'de> Deserialize<'de> for OldestVersion {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let text = String::deserialize(input)?;
        let version = text.parse().map_err(|error| {
            serde::de::Error::custom(format!(
                "{text:?} is not a version such as \"1.2.3\": {error}"
            ))
        });
        version.map(Self)
    }
}
