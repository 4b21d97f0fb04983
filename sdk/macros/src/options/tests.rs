use std::fs;
use std::path::Path;

use quote::quote;

use super::*;

fn why(tokens: TokenStream) -> String {
    let error = Options::read(tokens).expect_err("the options are invalid");
    let messages: Vec<_> = error.into_iter().map(|error| error.to_string()).collect();
    messages.join("\n")
}

#[test]
fn every_option_is_read() {
    let options = Options::read(quote! {
        name = "a.b-c_d", version = "2", description = "does it", max_attempts = 7,
        retry_initial = "1s", retry_max = "1m", retry_multiplier = 3, retry_jitter = 0.5,
        lease = "2m", timeout = "1h", grace = "500ms", concurrency = 4, instances = "reuse",
        schedule = "0 3 * * *", schedule_time_zone = "Europe/Berlin",
        capabilities = ["dirs", "http:*.example.com", "enqueue:photo.*"],
    })
    .expect("all of them are valid");
    assert_eq!(options.name, "a.b-c_d");
    assert_eq!(options.version.as_deref(), Some("2"));
    assert_eq!(options.description.as_deref(), Some("does it"));
    assert_eq!(options.max_attempts, Some(7));
    assert_eq!(options.retry_initial_ms, Some(1_000));
    assert_eq!(options.retry_max_ms, Some(60_000));
    assert_eq!(options.retry_multiplier, Some(3.0));
    assert_eq!(options.retry_jitter, Some(0.5));
    assert_eq!(options.lease_ms, Some(120_000));
    assert_eq!(options.timeout_ms, Some(3_600_000));
    assert_eq!(options.grace_ms, Some(500));
    assert_eq!(options.concurrency, Some(4));
    assert!(options.reuse);
    assert_eq!(options.schedule.as_deref(), Some("0 3 * * *"));
    assert_eq!(options.schedule_time_zone.as_deref(), Some("Europe/Berlin"));
    let capabilities = ["dirs", "http:*.example.com", "enqueue:photo.*"];
    assert_eq!(options.capabilities, capabilities);
}

#[test]
fn statements_are_read_with_their_options() {
    let options = Options::read(quote! {
        name = "a",
        sql(mark_paid = "UPDATE orders", rows = 1, on_error = "retry"),
        sql(read = "SELECT 1"),
    })
    .expect("both are valid");
    let statement = |name: &str, sql: &str, rows, retries| Statement {
        name: name.into(),
        sql: sql.into(),
        rows,
        retries,
    };
    let read = statement("read", "SELECT 1", None, false);
    let paid = statement("mark_paid", "UPDATE orders", Some(1), true);
    assert_eq!(options.statements, [paid, read]);
}

#[test]
fn invalid_statements_are_refused() {
    for (tokens, part) in [
        (quote!(sql = "SELECT 1"), "expected `sql(name ="),
        (quote!(sql()), "expected a statement"),
        (quote!(sql(rows = 1)), "expected a statement"),
        (
            quote!(sql(a = "SELECT 1", b = "SELECT 2")),
            "has one statement",
        ),
        (
            quote!(sql(a = "SELECT 1"), sql(a = "SELECT 2")),
            "declared twice",
        ),
        (quote!(sql(A = "SELECT 1")), "a-z, 0-9 and _"),
        (quote!(sql(a = "")), "this is empty"),
        (quote!(sql(a = "SELECT 1", rows = "one")), "a whole number"),
        (quote!(sql(a = "SELECT 1", on_error = "panic")), "\"fail\""),
        (
            quote!(sql(a = "SELECT 1", rows = 1, rows = 2)),
            "`rows` is set twice",
        ),
        (
            quote!(sql(on_error = "fail", a = "SELECT 1", on_error = "retry")),
            "`on_error` is set twice",
        ),
        (
            quote!(sql(a = "SELECT 1", sql(b = "SELECT 2"))),
            "another one",
        ),
    ] {
        let why = why(quote!(name = "a", #tokens));
        assert!(why.contains(part), "{part}: {why}");
    }
}

#[test]
fn a_missing_name_is_named_with_an_example() {
    assert!(why(quote!()).contains("#[handler(name = \"email.send\")]"));
}

#[test]
fn an_unknown_option_lists_the_known_ones() {
    let why = why(quote!(name = "a", retries = 3));
    assert!(why.starts_with("unknown option `retries`; the options are name,"));
}

#[test]
fn concurrency_has_the_bounds_of_the_host() {
    for tokens in [
        quote!(concurrency = 0),
        quote!(concurrency = 1_000_001),
        quote!(concurrency = "4"),
    ] {
        let why = why(quote!(name = "a", #tokens));
        assert_eq!(why, "expected a whole number from 1 to 1000000");
    }
}

#[test]
fn gates_are_read_with_their_options() {
    let options = Options::read(quote! {
        name = "a",
        max_concurrent(max = 5, key = "tenant"),
        throttle(max = 100, period = "1m", burst = 10, key = "$.api"),
        throttle(period = "30d", max = 1000),
        singleton(),
        singleton(key = ["$.doc.id", "source"], during = "running"),
        singleton(during = "period", period = "1h", on_conflict = "refuse", key = "queue"),
        debounce(period = "5s", max_wait = "1m", key = "handler", edge = "leading"),
        debounce(period = "5s", key = []),
    })
    .expect("all of them are valid");
    assert!(!options.takes_batches());
    let batches = Options::read(quote! { name = "a", batch(max = 7, key = ["tenant", "$.list"]) })
        .expect("it is valid");
    assert!(batches.takes_batches());
    assert_eq!(
        batches.gates[0].limit,
        Limit::Batch {
            max: 7,
            period_ms: None
        }
    );
    let gate = |key: &[&str], limit| Gate {
        limit,
        key: key.iter().map(|by| (*by).to_owned()).collect(),
    };
    let singleton = |during, period_ms, on_conflict| Limit::Singleton {
        during,
        period_ms,
        on_conflict,
    };
    let debounce = |max_wait_ms, edge| Limit::Debounce {
        period_ms: 5_000,
        max_wait_ms,
        edge,
    };
    let throttle = |max, period_ms, burst| Limit::Throttle {
        max,
        period_ms,
        burst,
    };
    assert_eq!(
        options.gates,
        [
            gate(&["tenant"], Limit::MaxConcurrent { max: 5 }),
            gate(&["$.api"], throttle(100, 60_000, Some(10))),
            gate(&[], throttle(1000, 2_592_000_000, None)),
            gate(&[], singleton(During::Queued, None, OnConflict::Keep)),
            gate(
                &["$.doc.id", "source"],
                singleton(During::Running, None, OnConflict::Keep)
            ),
            gate(
                &["queue"],
                singleton(During::Period, Some(3_600_000), OnConflict::Refuse)
            ),
            gate(&["handler"], debounce(Some(60_000), Edge::Leading)),
            gate(&[], debounce(None, Edge::Trailing)),
        ]
    );
}

#[test]
fn invalid_gates_are_refused_with_what_to_write() {
    for (tokens, expected) in [
        (
            quote!(max_concurrent = 5),
            "expected `max_concurrent(…)`, once for each gate, for instance `max_concurrent(max = 5, key = \"tenant\")`",
        ),
        (
            quote!(throttle(max = 5)),
            "`throttle(…)` needs `period`, for instance `throttle(max = 100, period = \"1m\")`",
        ),
        (
            quote!(max_concurrent(key = "tenant")),
            "`max_concurrent(…)` needs `max`, for instance `max_concurrent(max = 5, key = \"tenant\")`",
        ),
        (
            quote!(batch()),
            "`batch(…)` needs `max`, for instance `batch(max = 100, period = \"500ms\")`",
        ),
        (quote!(batch(max = 1001)), "a batch has at most 1000 jobs"),
        (
            quote!(batch(max = 5, key = ["source", "queue"])),
            "all jobs of a batch belong to one tenant: its key has at most one value besides \"tenant\"",
        ),
        (
            quote!(debounce()),
            "`debounce(…)` needs `period`, for instance `debounce(period = \"5s\", key = \"$.document\")`",
        ),
        (
            quote!(max_concurrent(max = 5, period = "1s")),
            "`max_concurrent(…)` has no option `period`; its options are max, key",
        ),
        (
            quote!(throttle(max = 5, period = "1s", edge = "leading")),
            "`throttle(…)` has no option `edge`; its options are max, period, burst, key",
        ),
        (
            quote!(singleton(max = 1)),
            "`singleton(…)` has no option `max`; its options are key, during, period, on_conflict",
        ),
        (
            quote!(debounce(period = "1s", on_conflict = "keep")),
            "`debounce(…)` has no option `on_conflict`; its options are period, max_wait, edge, key",
        ),
        (
            quote!(max_concurrent(max = 5, max = 6)),
            "`max` is set twice",
        ),
        (
            quote!(max_concurrent(max = 5, singleton())),
            "`max_concurrent(…)` cannot contain `singleton(…)`; write it after this one",
        ),
        (
            quote!(max_concurrent(max = 0)),
            "expected a whole number from 1 to 1000000",
        ),
        (
            quote!(throttle(max = 1_000_001, period = "1s", burst = 1)),
            "expected a whole number from 1 to 1000000",
        ),
        (
            quote!(throttle(max = 1, period = "1s", burst = 0)),
            "expected a whole number from 1 to 1000000",
        ),
        (
            quote!(throttle(max = 1001, period = "1s")),
            "without `burst`, a throttle lets at most 1000 jobs start in a period; add `burst = …`, the number that may \
             start at once",
        ),
        (
            quote!(throttle(max = 1, period = 60)),
            "expected a duration in quotes, for instance \"30s\"",
        ),
        (
            quote!(throttle(max = 1, period = "31d")),
            "`31d` is out of range: expected 1ms to 30d",
        ),
        (
            quote!(debounce(period = "5s", max_wait = "4s")),
            "max_wait is shorter than period",
        ),
        (
            quote!(singleton(during = "period")),
            "a singleton with `during = \"period\"` needs a period, for instance `period = \"1h\"`",
        ),
        (
            quote!(singleton(period = "1h")),
            "a singleton has a period only with `during = \"period\"`",
        ),
        (
            quote!(singleton(period = "1h", during = "ever")),
            "expected \"queued\" (until the job has started), \"running\" (until it has ended) or \"period\" (for a \
             period after its enqueue)",
        ),
        (
            quote!(singleton(on_conflict = "replace", during = "running")),
            "a job is replaced only while it is queued: remove `during`",
        ),
        (
            quote!(singleton(on_conflict = "drop")),
            "expected \"keep\" (the earlier job is kept), \"replace\" (it gets the payload of the new one) or \
             \"refuse\" (the enqueue is an error)",
        ),
        (
            quote!(debounce(period = "1s", edge = "both")),
            "expected \"trailing\" (the last job of a burst runs, after it) or \"leading\" (the first one, at once)",
        ),
        (
            quote!(singleton(key = tenant)),
            "expected a key such as \"tenant\" or \"$.customer.id\", or a list of two",
        ),
        (
            quote!(singleton(key = "$.a[0]")),
            "`$.a[0]` cannot be a key: write \"tenant\", \"source\", \"handler\", \"queue\", or a path of the \
             payload such as \"$.customer.id\"",
        ),
        (
            quote!(singleton(key = ["tenant", "tenant"])),
            "the key has `tenant` twice",
        ),
        (
            quote!(singleton(key = ["tenant", "source", "queue"])),
            "a key has at most two values",
        ),
    ] {
        assert_eq!(why(quote!(name = "a", #tokens)), expected, "{tokens}");
    }
    let nine = std::iter::repeat_n(quote!(singleton()), 9);
    assert_eq!(
        why(quote!(name = "a", #(#nine),*)),
        "a handler has at most 8 gates; one gate limits each key separately"
    );
}

#[test]
fn a_schedule_has_five_or_six_fields_and_its_time_zone_needs_one() {
    let fields = why(quote!(name = "a", schedule = "@daily"));
    assert!(fields.starts_with("expected five fields"), "{fields}");
    let zone = why(quote!(name = "a", schedule_time_zone = "UTC"));
    assert!(zone.starts_with("a time zone needs a schedule"), "{zone}");
}

#[test]
fn a_schedule_has_the_characters_of_a_cron_expression() {
    for cron in [
        "*/20 59 23 31 12 *",
        "0\t9 * * MON-FRI",
        "0 0 L * ?",
        "0 0 * * 5#2",
    ] {
        let options = Options::read(quote!(name = "a", schedule = #cron)).expect(cron);
        assert_eq!(options.schedule.as_deref(), Some(cron));
    }
    let long = format!("0 0 {}1 * *", "1,".repeat(100));
    for (cron, part) in [
        ("0 3 * *", "expected five fields"),
        (
            "0 3 * * + ",
            "characters: letters, digits, spaces and * / , ? # -",
        ),
        (&*long, "at most 200 characters"),
    ] {
        let why = why(quote!(name = "a", schedule = #cron));
        assert!(why.contains(part), "{cron}: {why}");
    }
    for zone in ["", "Europe Berlin", "Europe/Zürich"] {
        let why = why(quote!(
            name = "a",
            schedule = "0 3 * * *",
            schedule_time_zone = #zone
        ));
        assert!(why.contains("is not the name of a time zone"), "{why}");
    }
}

#[test]
fn values_beyond_the_limits_of_the_host_are_refused_with_the_range() {
    for (tokens, expected) in [
        (
            quote!(max_attempts = 1001),
            "expected a whole number from 1 to 1000",
        ),
        (
            quote!(lease = "2d"),
            "`2d` is out of range: expected 2s to 1d",
        ),
        (
            quote!(lease = "1999ms"),
            "`1999ms` is out of range: expected 2s to 1d",
        ),
        (
            quote!(grace = "15m"),
            "`15m` is out of range: expected 1ms to 10m",
        ),
        (
            quote!(timeout = "31d"),
            "`31d` is out of range: expected 1ms to 30d",
        ),
        (
            quote!(retry_initial = "31d"),
            "`31d` is out of range: expected 1ms to 30d",
        ),
        (
            quote!(retry_max = "31d"),
            "`31d` is out of range: expected 1ms to 30d",
        ),
        (
            quote!(retry_multiplier = 1000.5),
            "expected a number from 1 to 1000",
        ),
        (
            quote!(retry_max = "5s"),
            "retry_max is shorter than retry_initial, which is 10s by default",
        ),
    ] {
        assert_eq!(why(quote!(name = "a", #tokens)), expected, "{tokens}");
    }
    let largest = quote! {
        name = "a", max_attempts = 1000, lease = "24h", grace = "600s", timeout = "30d",
        retry_initial = "30d", retry_max = "30d", retry_multiplier = 1000,
    };
    assert!(Options::read(largest).is_ok());
}

#[test]
fn statements_have_the_limits_of_the_host() {
    let long = "x".repeat((16 << 10) + 1);
    for text in [&*long, "SELECT '\0'"] {
        let why = why(quote!(name = "a", sql(a = #text)));
        let expected = "the text of a statement is at most 16384 bytes long, without NUL";
        assert_eq!(why, expected);
    }
    let named = |length: usize| {
        let name = Ident::new(&"a".repeat(length), Span::call_site());
        Options::read(quote!(name = "a", sql(#name = "SELECT 1")))
    };
    assert!(named(63).is_ok() && named(64).is_err());
    let statements = |count: usize| {
        let names = (0..count).map(|nth| Ident::new(&format!("a{nth}"), Span::call_site()));
        quote!(name = "a", #(sql(#names = "SELECT 1")),*)
    };
    assert!(Options::read(statements(64)).is_ok());
    let expected = "a handler has at most 64 statements";
    assert_eq!(why(statements(65)), expected);
}

#[test]
fn capabilities_are_those_that_the_host_can_read() {
    for good in [
        "http:*",
        "http:*.example.com",
        "http:2001:db8::1",
        "http:[2001:db8::1]",
        "http:192.0.2.1",
        "secrets:MAIL_KEY",
        "dirs:/out:read-write",
        "enqueue:*",
        "enqueue:mail.send",
        "fine_clocks",
        "of-the-future:with detail",
    ] {
        let options = Options::read(quote!(name = "a", capabilities = [#good]));
        assert!(options.is_ok(), "{good}: {options:?}");
    }
    let long = format!("dirs:/{}", "a".repeat(256));
    for (invalid, part) in [
        (
            "http:https://a.example",
            "a host without a scheme or port such as `api.example.com` or",
        ),
        ("http:a.example:8080", "without a scheme or port"),
        ("secrets:a b", "a name of letters, digits, - and _"),
        ("env:A=B", "a name of letters, digits, - and _"),
        (
            "enqueue:photo*",
            "`enqueue:photo*`: expected a handler name or a pattern such as `photo.*` after the colon",
        ),
        ("dirs:/a\nb", "followed by a colon"),
        (&*long, "a value of up to 256 characters"),
    ] {
        let why = why(quote!(name = "a", capabilities = [#invalid]));
        assert!(why.contains(part), "{invalid}: {why}");
    }
    let many = std::iter::repeat_n("state", 65);
    let why = why(quote!(name = "a", capabilities = [#(#many),*]));
    assert_eq!(why, "a handler has at most 64 capabilities");
}

#[test]
fn an_option_is_set_once() {
    assert_eq!(why(quote!(name = "a", name = "b")), "`name` is set twice");
}

#[test]
fn all_errors_are_reported_together() {
    let why = why(quote!(
        name = "A",
        timeout = "30",
        retry_jitter = 2,
        max_attempts = 0
    ));
    assert_eq!(why.lines().count(), 4, "{why}");
}

#[test]
fn a_value_of_the_wrong_kind_is_refused_with_what_is_expected() {
    assert!(why(quote!(name = 3)).contains("text in quotes"));
    assert!(why(quote!(name = "a", timeout = 30)).contains("for instance \"30s\""));
    assert!(why(quote!(name = "a", max_attempts = "3")).contains("a whole number"));
    assert!(why(quote!(name = "a", max_attempts = -1)).contains("a whole number"));
    assert!(why(quote!(name = "a", retry_multiplier = 0.5)).contains("from 1 to"));
    assert!(why(quote!(name = "a", capabilities = "dirs")).contains("[\"dirs:/photos\"]"));
    assert!(why(quote!(name = "a", capabilities = ["dirs:"])).contains("followed by a colon"));
    assert!(why(quote!(name = "a", capabilities = ["a b"])).contains("one word"));
    assert!(why(quote!(name = "a", instances = "many")).contains("\"reuse\" (many)"));
    assert!(why(quote!(name = "a", version = " ")).contains("empty"));
    assert!(why(quote!(name)).contains("expected `name = …`"));
    assert!(why(quote!("name")).contains("for instance `name"));
}

#[test]
fn the_longest_backoff_is_not_shorter_than_the_first() {
    let why = why(quote!(name = "a", retry_initial = "2s", retry_max = "1s"));
    assert_eq!(why, "retry_max is shorter than retry_initial");
}

#[test]
fn handler_names_are_dotted_words() {
    for name in ["a", "text.stats", "a.b.c", "0", "x-1_y"] {
        assert!(Options::read(quote!(name = #name)).is_ok(), "{name}");
    }
    let long = "a".repeat(129);
    for name in [
        "", ".", "a.", ".a", "a..b", "A", "a b", "-a", "_a", "é", &long,
    ] {
        assert!(
            why(quote!(name = #name)).contains("not a handler name"),
            "{name}"
        );
    }
}

/// The options of each `#[handler(…)]` in the Rust blocks of a page, and all other attributes that end in `handler`.
fn handlers_of(page: &str) -> (Vec<String>, Vec<String>) {
    let blocks = page.split("\n```rust").skip(1);
    let blocks = blocks.filter_map(|rest| rest.split_once("\n```"));
    let (mut options, mut others) = (Vec::new(), Vec::new());
    for attribute in blocks.flat_map(|(block, _)| block.split("#[").skip(1)) {
        let Some((path, rest)) = attribute.split_once('(') else {
            continue;
        };
        let Some((found, _)) = rest.split_once(")]") else {
            continue;
        };
        match path {
            "handler" => options.push(found.to_owned()),
            path if path.ends_with("handler") => others.push(path.to_owned()),
            _ => {}
        }
    }
    (options, others)
}

#[test]
fn the_options_on_the_pages_are_valid() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md"), root.join("sdk/README.md")];
    for folder in [
        "docs",
        "docs/guides",
        "docs/guides/capabilities",
        "docs/explanation",
    ] {
        let entries = fs::read_dir(root.join(folder)).expect("the folder of pages exists");
        pages.extend(entries.map(|entry| entry.expect("the folder can be listed").path()));
    }
    let mut read = 0;
    for page in pages
        .iter()
        .filter(|page| page.extension() == Some("md".as_ref()))
    {
        let text = fs::read_to_string(page).expect("the page can be read");
        let (options, others) = handlers_of(&text);
        let page = page.display();
        assert_eq!(
            others,
            Vec::<String>::new(),
            "{page}: the attribute is `handler`"
        );
        for options in options {
            let tokens = options.parse::<TokenStream>().expect("options are tokens");
            if let Err(error) = Options::read(tokens) {
                panic!("{page}: #[handler({options})]: {error}");
            }
            read += 1;
        }
    }
    assert!(read >= 10, "only {read} were found");
}
