//! The ends of other jobs: those that the job has waited for, and those that it has called.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{Error, Result};

/// How a chain has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Its last job has succeeded.
    Succeeded,
    /// Its last job has failed.
    Failed,
    /// The last attempt of its last job ran longer than the run timeout.
    TimedOut,
    /// Its last job was cancelled.
    Cancelled,
    /// Its jobs were deleted.
    Deleted,
}

impl End {
    /// The name of this end in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Deleted => "deleted",
        }
    }
}

/// The ends of the chains that the job has waited for (`after`), from [`Ctx::results`](crate::Ctx::results).
///
/// ```
/// use rouse_sdk::{Ctx, End, Result, TestCtx, serde_json::json};
///
/// fn ship(ctx: &Ctx) -> Result<String> {
///     let parents = ctx.results()?;
///     let receipt: String = parents.get("charge")?;
///     Ok(format!("shipped, {receipt}"))
/// }
///
/// let ctx = TestCtx::new();
/// ctx.set_parent("charge", End::Succeeded, json!("paid 17"));
/// assert_eq!(ship(&ctx).unwrap(), "shipped, paid 17");
/// ```
///
/// If there are many, as for the summary of a fan-out, iterate:
///
/// ```
/// use rouse_sdk::{Ctx, Result};
///
/// fn total(ctx: &Ctx) -> Result<(u64, u64)> {
///     let (mut bytes, mut failed) = (0, 0);
///     for parent in &ctx.results()? {
///         match parent.failure() {
///             None => bytes += parent.output::<u64>()?,
///             Some(failure) => {
///                 ctx.warn(format_args!("{}: {}", parent.name(), failure.message));
///                 failed += 1;
///             }
///         }
///     }
///     Ok((bytes, failed))
/// }
/// # use rouse_sdk::{End, TestCtx, serde_json::json};
/// # let ctx = TestCtx::new();
/// # ctx.set_parent("a", End::Succeeded, json!(17));
/// # ctx.set_parent("b", End::Cancelled, json!(null));
/// # assert_eq!(total(&ctx).unwrap(), (17, 1));
/// # assert_eq!(ctx.logs()[0].message, "b: the job was cancelled");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Results {
    /// By name, in byte order.
    parents: Vec<Parent>,
}

impl Results {
    pub(crate) fn new(parents: Vec<Parent>) -> Self {
        Self { parents }
    }

    /// The result of the chain with this name. (The name is the id, if `after` was an array.)
    ///
    /// # Errors
    /// If the chain has not succeeded (kind `parent_failed`; its error is in the details), if the job has not waited
    /// for a chain with this name (kind `no_parent`), and if the result does not match `T` (kind `result_mismatch`).
    /// The first two are permanent.
    pub fn get<T: DeserializeOwned>(&self, name: impl AsRef<str>) -> Result<T> {
        let name = name.as_ref();
        match self.parent(name) {
            Some(parent) => parent.output(),
            None => {
                let why = format_args!("the job has not waited for a job named {name:?}");
                Err(Error::permanent(why).kind("no_parent"))
            }
        }
    }

    /// The end of the chain with this name.
    pub fn parent(&self, name: impl AsRef<str>) -> Option<&Parent> {
        let name = name.as_ref();
        let at = self
            .parents
            .binary_search_by(|parent| parent.name.as_str().cmp(name));
        Some(&self.parents[at.ok()?])
    }

    /// All of them, by name in byte order.
    pub fn iter(&self) -> std::slice::Iter<'_, Parent> {
        self.parents.iter()
    }

    /// The number of ends.
    pub fn len(&self) -> usize {
        self.parents.len()
    }

    /// True if the job has not waited for others.
    pub fn is_empty(&self) -> bool {
        self.parents.is_empty()
    }
}

impl<'a> IntoIterator for &'a Results {
    type Item = &'a Parent;
    type IntoIter = std::slice::Iter<'a, Parent>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The end of a chain that the job has waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    pub(crate) name: String,
    /// 0 if it is deleted.
    pub(crate) job: i64,
    pub(crate) end: End,
    /// JSON: the result, or the error.
    pub(crate) output: Option<Vec<u8>>,
}

impl Parent {
    /// The name in `after`; if `after` was an array, the id.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The id of the last job of the chain; `None` if it was deleted.
    pub fn job(&self) -> Option<i64> {
        (self.job != 0).then_some(self.job)
    }

    /// How the chain has ended.
    pub fn end(&self) -> End {
        self.end
    }

    /// The result.
    ///
    /// # Errors
    /// As for [`Results::get`].
    pub fn output<T: DeserializeOwned>(&self) -> Result<T> {
        match self.failure() {
            Some(failure) => Err(failure.into()),
            None => read(
                format_args!("the result of {:?}", self.name),
                self.output.as_deref().unwrap_or(b"null"),
            ),
        }
    }

    /// The failure; `None` if the chain has succeeded.
    pub fn failure(&self) -> Option<Failure> {
        let why = match self.end {
            End::Succeeded => return None,
            End::Failed => "the job has failed",
            End::TimedOut => "the last attempt ran longer than the run timeout",
            End::Cancelled => "the job was cancelled",
            End::Deleted => "the job was deleted",
        };
        let relation = Relation::Parent {
            name: self.name.clone(),
            job: self.job(),
            end: self.end,
        };
        let error = self.output.as_deref();
        Some(Failure::read(relation, error, self.end.as_str(), why))
    }
}

/// The failure of another job. `?` turns it into a permanent [`Error`] of kind `call_failed` or `parent_failed`, which
/// has the other job's error in its details.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Failure {
    /// The kind that the other handler gave its error ([`Error::kind`]), for instance `card_declined`. If the error is
    /// not the handler's: Rouse's kind, for instance `panic`, or the end of the job, for instance `cancelled`.
    pub kind: String,
    /// The message of the error.
    pub message: String,
    /// The whole error, as in `rouse.jobs`; null if there is none.
    pub error: Value,
    relation: Relation,
}

/// How the job that has failed is related to this one.
#[derive(Debug, Clone, PartialEq)]
enum Relation {
    Call {
        handler: String,
    },
    Parent {
        name: String,
        job: Option<i64>,
        end: End,
    },
}

impl Failure {
    pub(crate) fn from_call(handler: String, error: &[u8]) -> Self {
        Self::read(
            Relation::Call { handler },
            Some(error),
            "failed",
            "the job has failed",
        )
    }

    /// Reads an error. `kind` and `message` stand in for those that it does not have.
    fn read(relation: Relation, error: Option<&[u8]>, kind: &str, message: &str) -> Self {
        let error: Value = error
            .and_then(|error| serde_json::from_slice(error).ok())
            .unwrap_or_default();
        let text = |key: &str| error[key].as_str().filter(|text| !text.is_empty());
        let kind = text("guest_kind").or_else(|| text("kind")).unwrap_or(kind);
        Self {
            kind: kind.to_owned(),
            message: text("message").unwrap_or(message).to_owned(),
            relation,
            error,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let Failure {
            kind: _,
            message,
            error,
            relation,
        } = failure;
        match relation {
            Relation::Call { handler } => {
                Error::permanent(format_args!("the call to {handler} has failed: {message}"))
                    .kind("call_failed")
                    .details(json!({"handler": handler, "error": error}))
            }
            Relation::Parent { name, job, end } => Error::permanent(format_args!(
                "{name:?}, for which the job has waited, did not succeed: {message}"
            ))
            .kind("parent_failed")
            .details(json!({"parent": name, "job": job, "end": end.as_str(), "error": error})),
        }
    }
}

/// Reads the result of another job.
pub(crate) fn read<T: DeserializeOwned>(what: impl std::fmt::Display, json: &[u8]) -> Result<T> {
    serde_json::from_slice(json).map_err(|error| {
        Error::retryable(format_args!(
            "{what} does not match what this version of the handler expects: {error}"
        ))
        .kind("result_mismatch")
    })
}
