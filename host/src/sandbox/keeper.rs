//! Where handlers keep what outlives their jobs.

use super::Waiting;

/// What is kept under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The bytes.
    pub value: Vec<u8>,
    /// Another one with each write, and none comes back.
    pub version: i64,
}

/// A value that is to be kept.
#[derive(Debug, Clone, Copy)]
pub struct Keep<'a> {
    /// Under this key.
    pub key: &'a str,
    /// The bytes.
    pub value: &'a [u8],
    /// Only where this is there.
    pub expected: Expected,
    /// The most that the handler may keep.
    pub keys_max: u32,
    /// The same in bytes.
    pub bytes_max: u64,
}

/// What has to be under a key before it is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Whatever is there.
    Anything,
    /// Nothing.
    Nothing,
    /// This version.
    Version(i64),
}

/// What has come of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// It is there to stay.
    Done,
    /// Nothing was written: what is there is not what was expected.
    Changed,
    /// Nothing was written: that would be one key too many.
    TooManyKeys,
    /// Nothing was written: all other keys have so many bytes, and there is no room for these.
    TooManyBytes(u64),
}

/// What one handler keeps for the tenant of one job. Whoever runs the attempt implements it (`worker/state.rs`: in Postgres,
/// behind the fence).
///
/// One that finds out that the attempt may go on no more turns its abort signal, and need not return: whoever waits for it
/// waits for that signal too. The errors are of what cannot be kept at all, in words for people.
pub trait StateKeeper: Send + Sync {
    /// What is kept under this key.
    fn get<'a>(&'a self, key: &'a str) -> Waiting<'a, Result<Option<Kept>, String>>;

    /// The keys that start so, in order, after this one, at most so many.
    fn keys<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: u32,
    ) -> Waiting<'a, Result<Vec<String>, String>>;

    /// Keeps a value. Returns once it is there to stay.
    fn set<'a>(&'a self, keep: Keep<'a>) -> Waiting<'a, Result<Wrote, String>>;

    /// Forgets what is kept under this key; false where there was nothing.
    fn delete<'a>(&'a self, key: &'a str) -> Waiting<'a, Result<bool, String>>;
}
