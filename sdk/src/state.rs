//! State that a handler keeps between its jobs.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::World;
use crate::host::Host as _;
use crate::{Error, Result};

/// State that a handler keeps between its jobs, from [`Ctx::state`](crate::Ctx::state): small values under keys, in the
/// database. Each handler has a namespace for each tenant, and one for jobs without a tenant; other handlers cannot
/// read it.
///
/// ```
/// use rouse_sdk::{Ctx, Error, TestCtx};
///
/// /// Counts the letters of all strings so far.
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
/// A key is 1 to 200 printable characters long. The operator grants state and sets its quota.
///
/// Each write is committed at once. The value remains if the attempt fails afterwards, so the next attempt finds it:
/// write a cursor *after* the work that it stands for, and use [`update`](Self::update) for values that concurrent
/// attempts may change. An attempt may be retried after it has written, so a counter may count one job twice.
///
/// # Errors
/// For all methods: permanent errors if the operator has not granted state (kind `denied`), if a key or a value is
/// refused, or if the quota is exceeded (kind `state_refused`); and an error of kind `aborted` if the attempt has to
/// stop.
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

    /// The value under a key, read as JSON; `None` if there is none.
    ///
    /// # Errors
    /// Also an error if the value does not match `T` (kind `state_changed`).
    pub fn get<T: DeserializeOwned>(&self, key: impl AsRef<str>) -> Result<Option<T>> {
        let key = key.as_ref();
        let entry = self.world.state_get(key)?;
        entry.map(|(bytes, _)| read(key, &bytes)).transpose()
    }

    /// Stores a value as JSON, and overwrites an existing one.
    pub fn set<T: Serialize + ?Sized>(&self, key: impl AsRef<str>, value: &T) -> Result<()> {
        self.world
            .state_set(key.as_ref(), serde_json::to_vec(value)?)
    }

    /// [`get`](Self::get) for raw bytes.
    pub fn get_bytes(&self, key: impl AsRef<str>) -> Result<Option<Vec<u8>>> {
        let entry = self.world.state_get(key.as_ref())?;
        Ok(entry.map(|(bytes, _)| bytes))
    }

    /// [`set`](Self::set) for raw bytes.
    pub fn set_bytes(&self, key: impl AsRef<str>, bytes: impl Into<Vec<u8>>) -> Result<()> {
        self.world.state_set(key.as_ref(), bytes.into())
    }

    /// Removes a key; returns false if it did not exist. Also returns false if this call has removed it, but the first
    /// response from the database was lost and the call was retried.
    pub fn delete(&self, key: impl AsRef<str>) -> Result<bool> {
        self.world.state_delete(key.as_ref())
    }

    /// All keys with this prefix, in byte order; `""` means all keys.
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

    /// Changes a value without losing concurrent changes: `change` gets the current value, and its result is stored
    /// only if that value is still current; otherwise it is called again. Returns the stored value.
    ///
    /// # Errors
    /// Also those of `change`, in which case nothing is changed.
    pub fn update<T: Serialize + DeserializeOwned>(
        &self,
        key: impl AsRef<str>,
        mut change: impl FnMut(Option<T>) -> Result<T>,
    ) -> Result<T> {
        let key = key.as_ref();
        loop {
            let (current, version) = match self.world.state_get(key)? {
                Some((bytes, version)) => (Some(read(key, &bytes)?), Some(version)),
                None => (None, None),
            };
            let value = change(current)?;
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
            "the value under the key {key} does not match what this version of the handler expects: {error}"
        ))
        .kind("state_changed")
    })
}
