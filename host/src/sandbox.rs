//! The only module that uses wasmtime.
//!
//! It turns a folder of WebAssembly files into handlers ([`Catalog`]), runs one attempt of a job in an instance of its
//! own ([`Sandbox::run`]), and reports how the run ended ([`RunEnd`](crate::job::RunEnd)). Nothing is granted that the
//! operator did not grant, every limit holds, and a guest that does not stop is stopped. The sandbox never decides the
//! outcome of a job, and knows neither SQL nor the `store`.

mod settable;
mod settings;

mod engine;
mod pool;
mod ticker;

mod attempt;
mod bindings;
mod capability;
mod catalog;
mod grants;
mod module;

pub use attempt::abort::AbortHandle;
pub use attempt::boottime::BootTime;
pub use attempt::clocks::DatabaseClock;
pub use attempt::journal::{
    Expected, Journal, JournalFuture, NewValue, SqlRefusal, SqlStore, StateStore, StoredValue,
    WaitStore, WriteOutcome,
};
pub use attempt::limits::Limits;
pub use attempt::meter::Meter;
pub use attempt::profile::Profile;
pub use attempt::run::{JobInput, RunReport};
pub use capability::{Addresses, HttpSettings, Resolver, SystemResolver};
pub use catalog::{Catalog, GRANTS, Handler, HandlerSet, Refusal};
pub use engine::Sandbox;
pub use grants::{
    Attenuation, Grant, GrantedSql, Grants, Host, HostPattern, HttpGrant, HttpScheme, Missing,
    Mode, Quota, Secret, SecretGrant, Secrets, SqlGrant, StateQuota, annotated,
};
pub use module::admission::Withheld;
pub use module::binding::{ModuleBinding, Origin};
pub use module::compile::compile_stdin;
pub use module::digest::Digest;
pub use module::loads::Loads;
pub use module::manifest::{Capability, HandlerManifest, Instances, Manifest};
pub use module::pin::{Lock, Pin, PublicKey, SigningKey, lock_line};
pub use module::ready::{CodeFrom, Module};
pub use settings::{CompilerLimits, ModuleParts, Settings};
