//! Write [Rouse](https://github.com/rouse-jobs/rouse) job handlers in Rust.
//!
//! A handler is a function from a payload to a result. Annotate it, export it, and compile the crate (a `cdylib`) for
//! `wasm32-wasip2`: the host needs nothing but the wasm file.
//!
//! ```
//! use rouse_sdk::{Ctx, Error, export, handler};
//! use schemars::JsonSchema;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Deserialize, JsonSchema)]
//! struct Person {
//!     name: String,
//! }
//!
//! #[derive(Debug, PartialEq, Serialize, JsonSchema)]
//! struct Greeting {
//!     text: String,
//! }
//!
//! /// Says hello.
//! #[handler(name = "demo.greet", max_attempts = 3, timeout = "10s")]
//! fn greet(ctx: &Ctx, person: Person) -> Result<Greeting, Error> {
//!     if person.name.is_empty() {
//!         return Err(Error::permanent("the name is empty"));
//!     }
//!     ctx.info(format_args!("greeting {}", person.name));
//!     Ok(Greeting { text: format!("Hello, {}!", person.name) })
//! }
//!
//! export!(greet);
//! # fn main() {
//! #     use rouse_sdk::TestCtx;
//! #     let out = greet(&TestCtx::new(), Person { name: "Ada".into() });
//! #     assert_eq!(out.ok().map(|greeting| greeting.text), Some("Hello, Ada!".to_owned()));
//! # }
//! ```
//!
//! The function remains an ordinary function, so it can be tested natively:
//!
//! ```
//! # use rouse_sdk::{Ctx, Error, TestCtx};
//! # struct Person { name: String }
//! # struct Greeting { text: String }
//! # fn greet(ctx: &Ctx, person: Person) -> Result<Greeting, Error> {
//! #     ctx.info(format_args!("greeting {}", person.name));
//! #     Ok(Greeting { text: format!("Hello, {}!", person.name) })
//! # }
//! # fn main() -> Result<(), Error> {
//! let ctx = TestCtx::new();
//! let greeting = greet(&ctx, Person { name: "Ada".into() })?;
//! assert_eq!(greeting.text, "Hello, Ada!");
//! assert_eq!(ctx.logs()[0].message, "greeting Ada");
//! # Ok(())
//! # }
//! ```
//!
//! # Contents
//! - [`handler`](macro@handler): the attribute, with every option that a handler can declare.
//! - [`export!`]: makes a module from one or more handlers.
//! - [`Ctx`]: the job, logging, progress, the abort signal, and steps whose results later attempts reuse.
//! - [`State`]: values that the handler keeps between its jobs.
//! - [`Job`]: jobs that a handler enqueues, continues with, or calls; [`Results`] of those that it has waited for.
//! - [`Ctx::sleep`], [`Ctx::wait_signal`], [`Ctx::call`]: durable waits, which suspend the job.
//! - [`Ctx::sql`], [`Ctx::query`], [`Ctx::step_with`]: SQL statements that commit with the outcome or a step.
//! - [`http`]: requests to servers that the operator has granted.
//! - [`Error`]: retryable, permanent, or retryable after a delay or at a time; `?` works on any error.
//! - [`sleep`], [`race`], [`block_on`]: waiting, including in an `async fn` handler.
//! - `TestCtx`: the native replacement for `Ctx`.
//!
//! # Capabilities
//! A module can only compute, until the operator grants it something in `rouse.toml`. Use a granted directory through
//! `std::fs`, a granted server through [`http`], a secret through [`Ctx::secret`], state through [`Ctx::state`],
//! settings through [`Ctx::settings`], and environment variables through `std::env`. Each attempt runs in a fresh
//! instance, and statics end with it, unless both the handler and the operator allow [reuse](Instances::Reuse).

// The generated bindings refer to this crate by its external name.
#[cfg(target_family = "wasm")]
extern crate self as rouse_sdk;

mod abort;
mod batch;
mod ctx;
mod error;
mod handler;
mod host;
pub mod http;
mod job;
mod manifest;
mod results;
mod state;
mod task;

#[cfg(not(target_family = "wasm"))]
mod native;
#[cfg(not(target_family = "wasm"))]
mod testing;
#[cfg(target_family = "wasm")]
mod wasm;

// One implementation per target, and never behind a `dyn`: that way, a module imports only the host functions that it
// calls; each import costs every attempt about 0.4 µs.
#[cfg(not(target_family = "wasm"))]
pub(crate) use testing::Recorder as World;
#[cfg(target_family = "wasm")]
pub(crate) use wasm::Imports as World;

pub use abort::{AbortReason, AbortSignal};
pub use batch::BatchJob;
pub use ctx::{Ctx, JobInfo, Tx};
pub use error::{Error, Result};
pub use handler::{
    Definition, During, Edge, Gate, GateLimit, Handler, Instances, OnConflict, OnError, Statement,
};
pub use host::Level;
pub use job::{Child, Job, OnFailure, Priority};
pub use results::{End, Failure, Parent, Results};
pub use rouse_sdk_macros::handler;
pub use state::State;
pub use task::{Either, block_on, race, sleep};
#[cfg(not(target_family = "wasm"))]
pub use testing::{
    Aborter, Attempt, EnqueuedJob, LogLine, ProgressReport, StatementCall, TestCtx, Wait,
};

pub use schemars;
pub use serde;
pub use serde_json;

/// For the code that the macros generate; not part of the interface.
#[doc(hidden)]
pub mod __private {
    pub use crate::batch::run_batch;
    pub use crate::handler::{Entry, decode, distinct, encode, input_schema, output_schema};
    pub use crate::manifest::manifest;
    #[cfg(target_family = "wasm")]
    pub use crate::wasm::{Failure, Guest, JobInfo, bindings, describe, run};
    #[cfg(target_family = "wasm")]
    pub use wit_bindgen::rt;
}

/// Makes a module from handlers: `export!(first, second)`, once, at the end of the crate.
///
/// Each argument is the path of a function with [`#[handler]`](macro@handler). On native targets, the macro only checks
/// that the names differ. Two handlers with the same name do not compile:
///
/// ```compile_fail,E0080
/// # use rouse_sdk::{export, handler};
/// #[handler(name = "twice")]
/// fn one(_: ()) {}
///
/// #[handler(name = "twice")]
/// fn other(_: ()) {}
///
/// export!(one, other);
/// ```
#[macro_export]
macro_rules! export {
    ($($handler:path),+ $(,)?) => {
        const _: () = assert!(
            $crate::__private::distinct(&[
                $(<$handler as $crate::Handler>::DEFINITION.name),+
            ]),
            "two handlers in `export!` have the same name",
        );

        #[cfg(target_family = "wasm")]
        const _: () = {
            struct Module;

            const ENTRIES: &[$crate::__private::Entry] =
                &[$($crate::__private::Entry::of::<$handler>()),+];

            impl $crate::__private::Guest for Module {
                fn describe() -> ::std::string::String {
                    $crate::__private::describe(ENTRIES)
                }

                fn run(
                    job: $crate::__private::JobInfo,
                ) -> ::std::result::Result<::std::vec::Vec<u8>, $crate::__private::Failure> {
                    $crate::__private::run(ENTRIES, job)
                }
            }

            $crate::__private::bindings::__export!(
                Module with_types_in $crate::__private::bindings
            );
        };
    };
}

/// Compiles and runs the README's examples.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
