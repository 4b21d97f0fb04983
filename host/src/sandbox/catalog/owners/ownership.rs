//! Decides whether a file may serve a name, given the name's owner and the files that are present.

use std::collections::BTreeSet;

use super::Owners;
use crate::sandbox::Digest;

/// A file whose manifest declares a handler name.
pub(in crate::sandbox::catalog) struct Claimant<'a> {
    pub(in crate::sandbox::catalog) file: &'a str,
    pub(in crate::sandbox::catalog) digest: Digest,
    /// The file was there when the host started.
    pub(in crate::sandbox::catalog) was_at_start: bool,
    /// A table of `rouse.toml` binds the name to its module.
    pub(in crate::sandbox::catalog) is_bound: bool,
}

/// The owner of a name, as seen by a claimant.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::sandbox::catalog) enum Ownership {
    /// The claimant, or no file.
    Own,
    /// A missing file that had the same content.
    StandIn,
    /// This file, which is present.
    Present(String),
    /// This file, which is present in a version without the name.
    Dropped(String),
    /// This file, which is missing.
    Missing(String),
    /// No file, because all of these claim the name.
    Contested(BTreeSet<String>),
}

impl Owners {
    /// The owner of this name. `is_there`: whether a file is in the folder and may have the name.
    pub(in crate::sandbox::catalog) fn ownership(
        &self,
        name: &str,
        by: &Claimant<'_>,
        is_there: impl Fn(&str) -> bool,
    ) -> Ownership {
        let is_another = |file: &str| file != by.file && is_there(file);
        if let Some(contest) = self.names.contested.get(name) {
            let mut files = contest.files.iter();
            let is_decided = by.is_bound || self.is_dev;
            if !is_decided || files.any(|file| is_another(file)) {
                let mut files = contest.files.clone();
                files.insert(by.file.to_owned());
                return Ownership::Contested(files);
            }
        }
        let Some(owner) = self.names.owned.get(name) else {
            return Ownership::Own;
        };
        if owner.file == by.file {
            return Ownership::Own;
        }
        let is_there = is_there(&owner.file);
        if is_there && !owner.is_dropped {
            return match owner.is_unproven && by.was_at_start {
                true => Ownership::Contested([&owner.file, by.file].map(str::to_owned).into()),
                false => Ownership::Present(owner.file.clone()),
            };
        }
        if by.is_bound || self.is_dev {
            return Ownership::Own;
        }
        let other_stand_in = owner.stand_in.as_deref().filter(|file| is_another(file));
        if owner.sha256 == by.digest.to_string() && other_stand_in.is_none() {
            return Ownership::StandIn;
        }
        match is_there {
            true => Ownership::Dropped(owner.file.clone()),
            false => Ownership::Missing(owner.file.clone()),
        }
    }
}
