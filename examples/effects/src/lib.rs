//! Two handlers that write to tables of the application: an order that is paid exactly once, and a price list that is
//! imported in parts.

mod import;
mod pay;

use rouse_sdk::export;

export!(import::import, pay::pay);
