//! Two handlers that write to tables of the application: one pays an order exactly once, the other imports a price
//! list in parts.

mod import;
mod pay;

use rouse_sdk::export;

export!(import::import, pay::pay);
