//! Which addresses are public, and which belong to this machine or its network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The kind of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AddressKind {
    /// An address on the internet.
    Public,
    /// An interface of this machine, even if its address is public.
    Own,
    /// This machine, its network, or a special-purpose range (RFC 6890 and its registries).
    Private,
    /// A cloud's metadata service, which gives secrets to any client on this machine, or a link-local address, which
    /// such services use.
    Metadata,
    /// Not a server: a multicast address, or the unspecified address (which Linux treats as this machine).
    Nowhere,
}

/// Addresses at which clouds give a machine its credentials, in addition to link-local ones. Link-local addresses cover
/// most clouds (169.254.169.254), containers of AWS (169.254.170.2, .23), Tencent (169.254.0.23), Scaleway
/// (169.254.42.42) and OpenStack (fe80::a9fe:a9fe). The list cannot be complete.
const METADATA_V4: [Ipv4Addr; 3] = [
    Ipv4Addr::new(100, 100, 100, 200), // Alibaba
    Ipv4Addr::new(168, 63, 129, 16),   // Azure
    Ipv4Addr::new(192, 0, 0, 192),     // Oracle
];
const METADATA_V6: [Ipv6Addr; 4] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), // AWS
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),  // containers of AWS
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),  // Google
    Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42),   // Scaleway
];

/// The kind of this address, judged by the address alone.
pub(super) fn address_kind(address: IpAddr) -> AddressKind {
    match address {
        IpAddr::V4(address) => address_kind_v4(address),
        IpAddr::V6(address) => address_kind_v6(address),
    }
}

fn address_kind_v4(address: Ipv4Addr) -> AddressKind {
    if METADATA_V4.contains(&address) {
        return AddressKind::Metadata;
    }
    match address.octets() {
        [0, ..] | [224..=239, ..] | [255, 255, 255, 255] => AddressKind::Nowhere,
        [169, 254, ..] => AddressKind::Metadata, // link-local
        [10 | 127, ..]
        | [100, 64..=127, ..]    // shared by customers of one provider (RFC 6598)
        | [172, 16..=31, ..]
        | [192, 0, 0, _]         // IETF protocols
        | [192, 0, 2, _]         // documentation
        | [192, 88, 99, _]       // relays of 6to4
        | [192, 168, ..]
        | [198, 18..=19, ..]     // benchmarks
        | [198, 51, 100, _]      // documentation
        | [203, 0, 113, _]       // documentation
        | [240..=255, ..] => AddressKind::Private,
        _ => AddressKind::Public,
    }
}

fn address_kind_v6(address: Ipv6Addr) -> AddressKind {
    if METADATA_V6.contains(&address) {
        return AddressKind::Metadata;
    }
    if address.is_unspecified() || address.is_multicast() {
        return AddressKind::Nowhere;
    }
    if let Some(inner) = embedded(address) {
        // Never public: a client that wants the embedded address can use it directly.
        return match address_kind_v4(inner) {
            AddressKind::Public | AddressKind::Own | AddressKind::Private => AddressKind::Private,
            AddressKind::Metadata => AddressKind::Metadata,
            AddressKind::Nowhere => AddressKind::Nowhere,
        };
    }
    match address.segments() {
        [0xfe80..=0xfebf, ..] => AddressKind::Metadata, // link-local
        [0x2001, 0..=0x1ff, ..]       // IETF protocols: Teredo, ORCHID, benchmarks …
        | [0x2001, 0xdb8, ..]         // documentation
        | [0x3fff, 0..=0xfff, ..] => AddressKind::Private, // documentation
        // All ranges that have been allocated so far.
        [0x2000..=0x3fff, ..] => AddressKind::Public,
        _ => AddressKind::Private,
    }
}

/// The embedded IPv4 address: mapped, compatible, translated, NAT64 (both prefixes), 6to4.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let join = |high: u16, low: u16| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    match address.segments() {
        // `::1` is loopback, not an embedded 0.0.0.1.
        [0, 0, 0, 0, 0, 0, 0, 1] => None,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x64, 0xff9b, 1, _, _, _, high, low]
        | [0x2002, high, low, ..] => Some(join(high, low)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn all_are(expected: AddressKind, addresses: &[&str]) {
        for text in addresses {
            let address = text.parse().expect("an address");
            assert_eq!(address_kind(address), expected, "{text}");
        }
    }

    #[test]
    fn servers_on_the_internet_are_public() {
        all_are(
            AddressKind::Public,
            &[
                "1.1.1.1",
                "8.8.8.8",
                "100.63.255.255",
                "100.128.0.0",
                "172.15.255.255",
                "172.32.0.0",
                "192.0.1.0",
                "198.17.255.255",
                "198.20.0.0",
                "223.255.255.255",
                "2606:4700:4700::1111",
                "2001:4860:4860::8888",
                "2a00:1450::1",
            ],
        );
    }

    #[test]
    fn addresses_of_this_machine_and_its_network_are_private() {
        all_are(
            AddressKind::Private,
            &[
                "127.0.0.1",
                "127.255.255.254",
                "10.0.0.1",
                "172.16.0.1",
                "172.31.255.255",
                "192.168.1.1",
                "100.64.0.1",
                "192.0.0.191",
                "192.0.2.1",
                "198.51.100.1",
                "203.0.113.1",
                "198.18.0.1",
                "192.88.99.1",
                "240.0.0.1",
                "::1",
                "fc00::1",
                "fd12:3456::1",
                "fd00:ec2::253",
                "fec0::1",
                "2001:db8::1",
                "3fff::1",
                "100::1",
                "5f00::1",
            ],
        );
    }

    #[test]
    fn link_local_and_some_other_addresses_are_metadata() {
        all_are(
            AddressKind::Metadata,
            &[
                "169.254.169.254",
                "169.254.170.2",
                "169.254.170.23",
                "169.254.0.23",
                "169.254.42.42",
                "169.254.0.0",
                "169.254.255.255",
                "168.63.129.16",
                "100.100.100.200",
                "192.0.0.192",
                "fd00:ec2::254",
                "fd00:ec2::23",
                "fd20:ce::254",
                "fd00:42::42",
                "fe80::a9fe:a9fe",
                "fe80::1",
                "febf:ffff::1",
            ],
        );
    }

    #[test]
    fn an_embedded_address_is_never_public() {
        all_are(
            AddressKind::Private,
            &[
                "::ffff:127.0.0.1",
                "::ffff:8.8.8.8",
                "::127.0.0.1",
                "::8.8.8.8",
                "::ffff:0:10.0.0.1",
                "64:ff9b::10.0.0.1",
                "64:ff9b::8.8.8.8",
                "64:ff9b:1::10.0.0.1",
                "2002:7f00:1::1",
                "2002:808:808::1",
                "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            ],
        );
        all_are(
            AddressKind::Metadata,
            &[
                "::ffff:169.254.169.254",
                "64:ff9b::a9fe:a9fe",
                "2002:a9fe:a9fe::1",
                "::ffff:192.0.0.192",
            ],
        );
        all_are(
            AddressKind::Nowhere,
            &[
                "0.0.0.0",
                "0.1.2.3",
                "224.0.0.1",
                "255.255.255.255",
                "::",
                "ff02::1",
                "::ffff:0.0.0.0",
            ],
        );
    }
}
