//! Gates: limits of how many jobs run, how often jobs start, and which jobs are enqueued at all.

mod declared;
