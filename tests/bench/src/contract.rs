//! The contract of an ordinary handler: an object with six properties, two of them required. It is a literal, so
//! that changes to `rouse contract` do not change the benchmark.

/// Publishes the contract for `noop`, the handler of the enqueued jobs.
pub(super) const PUBLISH: &str = r##"
    CREATE SCHEMA IF NOT EXISTS jobs AUTHORIZATION rouse_owner;
    SELECT rouse.publish_contracts(jsonb_build_array(jsonb_build_object(
        'handler', 'noop', 'version', '1.0.0', 'sha256', repeat('a', 64), 'schema', '{}', 'rules', '{}'::jsonb, 'payload_type', 'jsonb',
        'refuses', $path$$.type() != "object"
            || ($.type() == "object" && (exists($."n")) is unknown)
            || ($.type() == "object" && (exists($."pad")) is unknown)
            || exists($."n" ? (!((@.type() == "number" && @.floor() == @)) || (@.type() == "number" && @ < 0)))
            || exists($."pad" ? (@.type() != "string" || (@.type() == "string" && @ == "")))
            || exists($."subject" ? (@.type() != "string"))
            || exists($."urgent" ? (@.type() != "boolean"))
            || exists($."mode" ? (@.type() != "string" || !((@.type() == "string" && (@ == "a" || @ == "b" || @ == "c")))))
            || exists($."tags" ? (@.type() != "array" || exists(@[*] ? (@.type() != "string"))))$path$)))"##;

/// Drops the contract.
pub(super) const DROP: &str = "SELECT rouse.delete_contracts(NULL)";

/// The number of payloads that are checked in one statement.
pub(super) const CHECKED: u32 = 100_000;

/// Reads [`CHECKED`] payloads, without and with the check.
pub(super) const READS: [&str; 2] = [
    "SELECT count(p.payload -> 'n') FROM rouse.contract AS c, (
         SELECT jsonb_build_object('n', n, 'pad', repeat('x', 80)) AS payload FROM generate_series(1, 100000) AS n OFFSET 0) AS p
     WHERE c.handler = 'noop'",
    "SELECT count(jsonb_path_match(p.payload, c.refuses, '{}', true)) FROM rouse.contract AS c, (
         SELECT jsonb_build_object('n', n, 'pad', repeat('x', 80)) AS payload FROM generate_series(1, 100000) AS n OFFSET 0) AS p
     WHERE c.handler = 'noop'",
];
