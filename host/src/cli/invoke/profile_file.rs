//! The file of `rouse invoke --profile`.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;

use anyhow::Context as _;

use crate::cli::text::plain;
use crate::sandbox::Profile;

/// A file that is open for a profile.
pub(super) struct ProfileFile {
    path: PathBuf,
    file: File,
}

impl ProfileFile {
    /// Creates the file, before anything is compiled or run, so that no run is wasted if it cannot be created.
    pub(super) fn create(path: PathBuf) -> anyhow::Result<Self> {
        let file = File::create(&path)
            .with_context(|| format!("create the file for the profile, {}", path.display()))?;
        Ok(Self { path, file })
    }

    /// Writes the profile, and reports it.
    pub(super) fn write(self, profile: &Profile, handler: &str) -> anyhow::Result<()> {
        let mut file = BufWriter::new(self.file);
        serde_json::to_writer(&mut file, &profile.firefox_json(handler))
            .map_err(std::io::Error::from)
            .and_then(|()| file.flush())
            .with_context(|| format!("write the profile to {}", self.path.display()))?;
        let (path, handler) = (self.path.display(), plain(handler));
        match profile.len() {
            0 => eprintln!(
                "rouse: {handler} computed for less than a millisecond: {path} is a profile without samples"
            ),
            samples => eprintln!(
                "rouse: {samples} samples of {handler} are in {path}; open it at https://profiler.firefox.com"
            ),
        }
        Ok(())
    }
}
