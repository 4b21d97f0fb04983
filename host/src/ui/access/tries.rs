//! Limits how many sign-ins may be tried: a few from each address, so that nobody guesses a token, and many in total,
//! so that one client does not keep the others out.
//!
//! The total also limits the memory: an address is forgotten once it may try a whole burst again.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// The tries of one address.
const OF_ADDRESS: Rate = Rate {
    burst: 10.0,
    every: Duration::from_secs(3),
};
/// The tries of all addresses.
const OF_ALL: Rate = Rate {
    burst: 1000.0,
    every: Duration::from_millis(50),
};

/// How many tries there may be.
struct Rate {
    /// At once.
    burst: f64,
    /// The time after which there may be one more.
    every: Duration,
}

/// The tries that were left at a time.
#[derive(Debug, Clone, Copy)]
struct Left {
    tries: f64,
    at: Instant,
}

/// The sign-ins that were tried.
#[derive(Debug)]
pub(super) struct Tries {
    of_all: Left,
    by_network: HashMap<IpAddr, Left>,
}

impl Rate {
    /// The tries that are left at `now`.
    fn left(&self, left: Left, now: Instant) -> f64 {
        let since = now.saturating_duration_since(left.at);
        let more = since.as_secs_f64() / self.every.as_secs_f64();
        (left.tries + more).min(self.burst)
    }

    /// Takes one of these tries; returns the others. `Err`: how long to wait, if there is none.
    fn take(&self, tries: f64) -> Result<f64, Duration> {
        match tries < 1.0 {
            true => Err(self.every.mul_f64(1.0 - tries)),
            false => Ok(tries - 1.0),
        }
    }
}

impl Tries {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            of_all: Left {
                tries: OF_ALL.burst,
                at: now,
            },
            by_network: HashMap::new(),
        }
    }

    /// Counts a try. A try that is refused does not count.
    ///
    /// # Errors
    /// How long to wait, after too many tries.
    pub(super) fn count(&mut self, from: IpAddr, now: Instant) -> Result<(), Duration> {
        let network = network_of(from);
        let own = self.by_network.get(&network);
        let own = own.map_or(OF_ADDRESS.burst, |left| OF_ADDRESS.left(*left, now));
        let own = OF_ADDRESS.take(own)?;
        let all = OF_ALL.take(OF_ALL.left(self.of_all, now))?;
        let since = |tries| Left { tries, at: now };
        self.of_all = since(all);
        self.by_network
            .retain(|_, left| OF_ADDRESS.left(*left, now) < OF_ADDRESS.burst);
        self.by_network.insert(network, since(own));
        Ok(())
    }
}

/// The addresses that count as one. A client often has 2⁶⁴ addresses of IPv6.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn each_address_has_tries_of_its_own() {
        let start = Instant::now();
        let mut tries = Tries::new(start);
        let (one, other) = (address("192.0.2.1"), address("192.0.2.2"));
        let accepted = (0..5000).filter(|_| tries.count(one, start).is_ok());
        assert_eq!(accepted.count(), 10);
        assert_eq!(tries.count(one, start), Err(Duration::from_secs(3)));
        assert_eq!(tries.count(other, start), Ok(()));
        let later = start + Duration::from_secs(3);
        assert_eq!(tries.count(one, later), Ok(()));
        assert!(tries.count(one, later).is_err());
    }

    #[test]
    fn addresses_of_one_client_count_together() {
        let start = Instant::now();
        for (first, second) in [
            ("2001:db8::1", "2001:db8::ffff:2"),
            ("192.0.2.1", "::ffff:192.0.2.1"),
        ] {
            let mut tries = Tries::new(start);
            for _ in 0..10 {
                assert_eq!(tries.count(address(first), start), Ok(()));
            }
            assert!(tries.count(address(second), start).is_err(), "{second}");
        }
        let (first, other) = (address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_ne!(network_of(first), network_of(other));
    }

    #[test]
    fn the_total_limits_the_tries_and_the_addresses_that_are_kept() {
        let start = Instant::now();
        let mut tries = Tries::new(start);
        let mut accepted = 0;
        // Within 10 s.
        for n in 0..100_000 {
            let now = start + Duration::from_micros(100) * n;
            let from = IpAddr::from(n.to_be_bytes());
            accepted += u32::from(tries.count(from, now).is_ok());
            assert!(tries.by_network.len() <= 1100, "{}", tries.by_network.len());
        }
        assert!((1190..=1200).contains(&accepted), "{accepted}");
        let later = start + Duration::from_secs(60);
        assert_eq!(tries.count(address("192.0.2.1"), later), Ok(()));
        assert_eq!(tries.by_network.len(), 1);
    }
}
