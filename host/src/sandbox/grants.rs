//! The grants of handlers: directories, servers, secrets, state, SQL statements, environment variables, settings,
//! clocks.

mod attenuation;
mod dirs;
mod granted;
mod http;
pub(super) mod lines;
mod missing;
mod pasted;
pub(super) mod quota;
mod root;
mod secrets;
mod sql;
mod state;

pub use self::attenuation::Attenuation;
pub use self::dirs::{Grant, Grants, Mode, Quota};
pub(super) use self::granted::Granted;
#[cfg(test)]
pub(super) use self::granted::GrantedDir;
pub use self::http::{Host, HostPattern, HttpGrant, HttpScheme};
pub use self::missing::Missing;
pub(super) use self::missing::{Grantings, granted_capabilities, missing};
pub use self::pasted::annotated;
pub(super) use self::root::{Root, Roots};
pub use self::secrets::{Secret, SecretGrant, Secrets};
pub use self::sql::{GrantedSql, SqlGrant};
pub use self::state::StateQuota;
