//! Patterns have the meaning of ECMA-262 with the flag `u`; Node 20 gives the same results.

use serde_json::json;

use super::schema;

/// A pattern, strings that it matches, strings that it does not match.
type Case = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

const CASES: &[Case] = &[
    ("", &["", "a"], &[]),
    // A dot is any character except the four line terminators.
    (
        "^.$",
        &["a", "\t", "\u{85}", "😀", "\0"],
        &["", "\n", "\r", "\u{2028}", "\u{2029}", "ab"],
    ),
    (r"^[^]$", &["\n", "😀"], &["", "ab"]),
    (r"[]", &[], &["", "[]"]),
    // The anchors are the start and end of the text.
    ("^a$", &["a"], &["a\n", "\na", "a\r"]),
    // White space: includes the byte order mark, excludes NEL.
    (
        r"^\s+$",
        &[
            " \t\n\u{b}\u{c}\r\u{a0}\u{1680}\u{2000}\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}",
        ],
        &["\u{85}", "\u{180e}", "\u{200b}", "a"],
    ),
    (
        r"^\S$",
        &["\u{85}", "\u{200b}", "😀"],
        &["\u{feff}", "\u{2028}", " "],
    ),
    (r"^[\s]$", &["\u{feff}"], &["\u{85}"]),
    (r"^[^\s]$", &["\u{85}"], &["\u{feff}"]),
    // Digits and word characters are ASCII.
    (r"^\d\D$", &["1a", "1\u{664}"], &["\u{664}a", "11"]),
    (r"^\w\W$", &["_é", "a-"], &["éa", "ab"]),
    (r"^[\W]$", &["é", "-"], &["a", "_"]),
    (r"\bb\b", &["b", "é b", "ébé"], &["ab", "b_"]),
    (r"\Bb", &["ab", "_b"], &["b", "éb", " b"]),
    (r"^\B", &["", "é"], &["a"]),
    (r"é\B", &["é", "éé"], &["éa"]),
    // Escapes.
    (
        r"^\cC\cj\0\t\v\f\x41\u0042\u{43}\u{1F600}$",
        &["\u{3}\n\0\t\u{b}\u{c}ABC😀"],
        &["", "cCcj"],
    ),
    (
        r"^[\cC\0\b\-]+$",
        &["\u{3}\0\u{8}-"],
        &["C", "0", "b", "\\"],
    ),
    (
        r"^\^\$\\\.\*\+\?\(\)\[\]\{\}\|\/$",
        &[r"^$\.*+?()[]{}|/"],
        &["\\^"],
    ),
    // A surrogate pair is one character; strings do not contain lone surrogates.
    (
        r"^\uD83D\uDE00{2}$",
        &["😀😀"],
        &["😀", "\u{1f600}\u{fffd}"],
    ),
    (
        r"^[\uD83D\uDE00-\uD83D\uDE4F]$",
        &["😀", "🙏"],
        &["a", "🚀"],
    ),
    (r"\uD83D|[\uD800-\uDFFF]", &[], &["😀", "\u{fffd}"]),
    (
        r"^[^\uD800-\uDFFF]$",
        &["a", "😀", "\u{d7ff}", "\u{e000}"],
        &[],
    ),
    (
        r"^[\u0000-\uFFFF]$",
        &["a", "\u{d7ff}", "\u{ffff}"],
        &["😀"],
    ),
    (
        r"[^\u{0}-\u{10FFFF}]",
        &[],
        &["a", "\u{d7ff}", "\u{e000}", "😀"],
    ),
    (r"^\u{D800}?$", &[""], &["\u{d7ff}", "\u{e000}"]),
    // Special meanings of brackets and braces in other dialects do not apply.
    (r"^[a&&b[~~c]+$", &["a&b[~c"], &["]", "-"]),
    (r"^[+--]$", &["+", ",", "-"], &["."]),
    (r"^[--/]$", &["-", ".", "/"], &[","]),
    (r"^[a-]$", &["a", "-"], &["b"]),
    (r"^[-a]$", &["a", "-"], &["b"]),
    (r"^[\w-]$", &["a", "-"], &["."]),
    (r"^[^-a]$", &["b"], &["a", "-"]),
    (r"^[(?:.*|)]$", &["(", "?", "*", "."], &["a"]),
    // Properties.
    (r"^\p{Lu}\P{Lu}$", &["Éé"], &["éé"]),
    (r"^\p{Script=Greek}+$", &["Ωμ"], &["O"]),
    (r"^[\p{L}\d]+$", &["aé1"], &["-"]),
    (r"^\p{Zl}$", &["\u{2028}"], &[" "]),
    (r"\P{Any}", &[], &["a"]),
    (r"^\p{Letter}\p{digit}$", &["é\u{664}"], &["1a"]),
    // Groups and numbers.
    (
        r"^(?:a|b)*(c|)(?<name>d){2}$",
        &["dd", "abbacdd"],
        &["d", "ccdd"],
    ),
    (
        r"^(a{2}|b{1,}?|c{0,1})+?$",
        &["aa", "bbb", "", "cc"],
        &["a"],
    ),
    (r"^a{0}$", &[""], &["a"]),
];

#[test]
fn patterns_mean_what_ecma_262_says() {
    for (pattern, found, not_found) in CASES {
        let written = json!({ "pattern": pattern }).to_string();
        let schema = schema(&written).unwrap_or_else(|why| panic!("{pattern}: {why}"));
        for (texts, expected) in [(found, true), (not_found, false)] {
            for text in *texts {
                let found = schema.check(json!(text).to_string().as_bytes()).is_ok();
                assert_eq!(found, expected, "{pattern} in {text:?}");
            }
        }
    }
}

#[test]
fn an_unsupported_pattern_is_rejected_with_the_reason() {
    let deep = format!("{}a{}", "(".repeat(51), ")".repeat(51));
    for (pattern, why) in [
        // Neither is possible in linear time.
        (
            "(?=a)",
            "matched in linear time, without lookaround like (?=",
        ),
        (
            "(?<!a)b",
            "matched in linear time, without lookaround like (?<!",
        ),
        (
            r"(a)\1",
            r"matched in linear time, without backreferences like \1",
        ),
        (
            r"(?<a>b)\k<a>",
            r"matched in linear time, without backreferences like \k",
        ),
        // Invalid according to the standard.
        (
            r"[.-\w]",
            r"a range in brackets with a class like \w at one end",
        ),
        (
            r"[\w-.]",
            r"a range in brackets with a class like \w at one end",
        ),
        ("[b-a]", "a range in brackets that ends before it starts"),
        ("[a", "a [ that is not closed"),
        ("(a", "a ( that is not closed"),
        ("a)", "an unmatched )"),
        ("a]", "an unmatched ]"),
        ("a}", "an unmatched }"),
        ("*a", "a * with nothing to repeat"),
        ("^*", "a * with nothing to repeat"),
        ("a**", "a * with nothing to repeat"),
        (r"\b+", "a + with nothing to repeat"),
        ("{1}", "a { with nothing to repeat"),
        ("a{", "a { without {n}, {n,} or {n,m}"),
        ("a{,2}", "a { without {n}, {n,} or {n,m}"),
        ("a{1,2", "a { without {n}, {n,} or {n,m}"),
        ("a{2,1}", "a {n,m} whose m is less than n"),
        ("(?i)a", "a group other than (…), (?:…) and (?<name>…)"),
        ("(?P<a>b)", "a group other than (…), (?:…) and (?<name>…)"),
        ("(?<1>a)", "a (?< without a name"),
        ("(?<>a)", "a (?< without a name"),
        (r"\", r"a \ at its end"),
        (r"\_", r"the escape \_"),
        (r"\z", r"the escape \z"),
        (r"\-", r"the escape \-"),
        (r"[\B]", r"the escape \B"),
        (r"[\1]", r"the escape \1"),
        (r"\00", r"the escape \0"),
        (r"\c1", r"a \c without a letter"),
        (r"\x4", r"a \x without two hexadecimal digits"),
        (r"\u12", r"a \u without four hexadecimal digits"),
        (r"\u{110000}", r"a \u without four hexadecimal digits"),
        (r"\u{}", r"a \u without four hexadecimal digits"),
        (r"\pL", r"a \p without a known property of Unicode: L"),
        (
            r"\p{Klingon}",
            r"a \p without a known property of Unicode: {Klingon}",
        ),
        (r"\p{^L}", r"a \p without a known property of Unicode: {^L}"),
        // Limits.
        (&deep, "groups are nested deeper than 50 levels"),
        ("((a{500}){500}){500}", "too large"),
        ("a{99999999999999999999}", "too large"),
    ] {
        for written in [
            json!({ "pattern": pattern }),
            json!({ "patternProperties": { pattern: true } }),
        ] {
            let message = schema(&written.to_string()).expect_err(pattern);
            assert!(message.contains(why), "{pattern}: {message}");
        }
    }
    let long = json!({ "pattern": "a".repeat(5_000) }).to_string();
    let message = schema(&long).unwrap_err();
    assert!(
        message.contains("5000 bytes long; at most 4096 are allowed"),
        "{message}"
    );
}
