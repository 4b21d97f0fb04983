//! it

mod folder;
mod sandbox_guest;
mod sandbox_run;
