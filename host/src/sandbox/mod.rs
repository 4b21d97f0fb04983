//! The only room that speaks wasmtime.
//!
//! It turns a folder of WebAssembly files into handlers ([`Catalog`]), runs one attempt of one
//! job in an instance of its own ([`Sandbox::run`]), and says how the run ended
//! ([`RunEnd`](crate::job::RunEnd)). It promises that nothing is granted which the operator did
//! not grant, that every limit holds, and that a guest which will not stop is stopped. It never
//! decides what becomes of a job, and knows neither SQL nor the `store`.

mod settings;

mod engine;
mod pool;
mod run;

mod idle;
mod instance;

mod abort;
mod bindings;
mod boottime;
mod capability;
mod clocks;
mod contract;
mod end;
mod journal;
mod keeper;
mod limits;
mod lines;
mod memory;
mod meter;
mod profile;
mod settable;
mod stack;
mod state;
mod ticker;

mod binding;
mod cache;
mod catalog;
mod compile;
mod describe;
mod grants;
mod load;
mod manifest;
mod pin;
mod quota;

pub use abort::AbortHandle;
pub use binding::{ModuleBinding, Origin, Withheld};
pub use boottime::BootTime;
pub use capability::{Addresses, HttpSettings, Resolver, SystemResolver};
pub use catalog::{Catalog, GRANTS, Handler, HandlerSet, Loads, Refusal};
pub use compile::{CompilerLimits, compile_stdin};
pub use engine::Sandbox;
pub use grants::{
    Attenuation, Grant, Grants, Host, HostPattern, HttpGrant, HttpScheme, Missing, Mode, Quota,
    Secret, SecretGrant, Secrets, StateQuota, annotated,
};
pub use journal::{Journal, Waiting};
pub use keeper::{Expected, Keep, Kept, StateKeeper, Wrote};
pub use limits::Limits;
pub use load::{CodeFrom, Digest, Module};
pub use manifest::{Capability, HandlerManifest, Instances, Manifest};
pub use meter::Meter;
pub use pin::{Lock, Pin, PublicKey, SigningKey, lock_line};
pub use profile::Profile;
pub use run::{JobInput, Run};
pub use settings::{ModuleParts, Settings};
