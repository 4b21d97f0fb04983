//! What a handler keeps between its jobs.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::ctx::{Host as _, World};
use crate::{Error, Result};

/// What a handler keeps between its jobs, from [`Ctx::state`](crate::Ctx::state): small values under keys, in the database. Each
/// handler has a namespace of its own for each tenant, and one for jobs without a tenant; nobody else sees what is in it.
///
/// ```
/// use rouse_sdk::{Ctx, Error, TestCtx};
///
/// /// Counts the letters of all texts so far.
/// fn count(ctx: &Ctx, text: &str) -> Result<usize, Error> {
///     ctx.state().update("letters", |so_far: Option<usize>| {
///         Ok(so_far.unwrap_or(0) + text.len())
///     })
/// }
///
/// let ctx = TestCtx::new();
/// assert_eq!(count(&ctx, "one").unwrap(), 3);
/// let next = ctx.next_job();
/// assert_eq!(count(&next, "three").unwrap(), 8);
/// assert_eq!(next.state().get::<usize>("letters").unwrap(), Some(8));
/// ```
///
/// A key has 1 to 200 printable characters. The operator grants the state and says how much of it there may be.
///
/// Each write is committed at once. It stays where the attempt fails afterwards, so the next attempt finds it: write a cursor
/// *after* the work that it stands for, and use [`update`](Self::update) for what two attempts may change at once. An attempt may be
/// made again after it has written, so a counter may count one job twice.
///
/// # Errors
/// Of all methods: permanent ones, where the operator has not granted the state (kind `denied`), and where a key or a value is
/// refused, or the quota is used up (kind `state-refused`); and one of kind `aborted` where the attempt has to stop.
#[derive(Clone, Copy)]
pub struct State<'a> {
    world: &'a World,
}

impl fmt::Debug for State<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

impl<'a> State<'a> {
    pub(crate) fn new(world: &'a World) -> Self {
        Self { world }
    }

    /// What is kept under a key, read from its JSON; none: nothing.
    ///
    /// # Errors
    /// Also where it does not fit `T` (kind `state-changed`).
    pub fn get<T: DeserializeOwned>(&self, key: impl AsRef<str>) -> Result<Option<T>> {
        let key = key.as_ref();
        let kept = self.world.state_get(key)?;
        kept.map(|(bytes, _)| read(key, &bytes)).transpose()
    }

    /// Keeps a value as JSON, whatever was there.
    pub fn set<T: Serialize + ?Sized>(&self, key: impl AsRef<str>, value: &T) -> Result<()> {
        self.world
            .state_set(key.as_ref(), serde_json::to_vec(value)?)
    }

    /// [`get`](Self::get) of bytes as they are.
    pub fn get_bytes(&self, key: impl AsRef<str>) -> Result<Option<Vec<u8>>> {
        let kept = self.world.state_get(key.as_ref())?;
        Ok(kept.map(|(bytes, _)| bytes))
    }

    /// [`set`](Self::set) of bytes as they are.
    pub fn set_bytes(&self, key: impl AsRef<str>, bytes: impl Into<Vec<u8>>) -> Result<()> {
        self.world.state_set(key.as_ref(), bytes.into())
    }

    /// Forgets a key; false where nothing was kept there.
    pub fn delete(&self, key: impl AsRef<str>) -> Result<bool> {
        self.world.state_delete(key.as_ref())
    }

    /// All keys that start so, in the order of their bytes; `""`: all.
    pub fn keys(&self, prefix: impl AsRef<str>) -> Result<Vec<String>> {
        let mut keys = Vec::<String>::new();
        loop {
            let after = keys.last().map(String::as_str);
            let page = self.world.state_keys(prefix.as_ref(), after)?;
            if page.is_empty() {
                return Ok(keys);
            }
            keys.extend(page);
        }
    }

    /// Changes a value so that nothing is lost where another attempt changes it at the same time: `change` gets what is there, and
    /// what it returns is kept only where that is still there; if not, it is called again. Returns what is kept now.
    ///
    /// # Errors
    /// Also those of `change`, after which nothing is changed.
    pub fn update<T: Serialize + DeserializeOwned>(
        &self,
        key: impl AsRef<str>,
        mut change: impl FnMut(Option<T>) -> Result<T>,
    ) -> Result<T> {
        let key = key.as_ref();
        loop {
            let (there, version) = match self.world.state_get(key)? {
                Some((bytes, version)) => (Some(read(key, &bytes)?), Some(version)),
                None => (None, None),
            };
            let value = change(there)?;
            let bytes = serde_json::to_vec(&value)?;
            if self.world.state_compare_and_set(key, version, bytes)? {
                return Ok(value);
            }
        }
    }
}

fn read<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::retryable(format_args!(
            "what is kept under the key {key} is not what this version of the handler expects: {error}"
        ))
        .kind("state-changed")
    })
}
