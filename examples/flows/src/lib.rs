//! Three workflows: an order that is undone if a part of it fails, a fan-out over photographs with one summary, and an
//! approval that waits for days.

mod approval;
mod order;
mod photos;

use rouse_sdk::export;

export!(
    approval::approve,
    order::charge,
    order::order,
    order::refund,
    order::release,
    order::reserve,
    order::ship,
    photos::import,
    photos::resize,
    photos::summary,
);
