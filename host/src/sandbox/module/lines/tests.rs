use super::*;

fn lines(rows: Vec<Row>) -> Lines {
    let call = |function: u32, within: Option<u32>| Call {
        function: Some(function),
        file: None,
        line: Some(function + 1),
        column: None,
        within,
    };
    Lines {
        ranges: ranges(rows),
        calls: vec![call(0, None), call(1, Some(0))],
        names: vec!["outer".into(), "inner".into()],
    }
}

fn names(lines: &Lines, offset: usize) -> Vec<&str> {
    lines.at(offset).filter_map(|line| line.function).collect()
}

#[test]
fn find_calls_at_an_offset_innermost_first_and_none_in_a_gap() {
    let lines = lines(vec![
        (20, 30, Some(0)),
        (10, 20, Some(1)),
        (40, 41, Some(0)),
    ]);
    for (offset, expected) in [
        (0, &[][..]),
        (9, &[]),
        (10, &["inner", "outer"]),
        (19, &["inner", "outer"]),
        (20, &["outer"]),
        (30, &[]),
        (40, &["outer"]),
        (41, &[]),
        (usize::MAX, &[]),
    ] {
        assert_eq!(names(&lines, offset), expected, "{offset}");
    }
}

#[test]
fn overlapping_and_empty_rows_become_sorted_ranges() {
    let rows = vec![
        (5, 5, Some(0)),
        (5, 100, Some(1)),
        (7, 9, Some(0)),
        (u32::MAX, u32::MAX, Some(0)),
        (8, 3, Some(1)),
    ];
    let ranges = ranges(rows);
    assert!(ranges.is_sorted_by(|(a, _), (b, _)| a < b), "{ranges:?}");
    assert_eq!(ranges.first(), Some(&(0, None)));
}

#[test]
fn merge_neighbours_with_the_same_call() {
    let rows = (0..1000).map(|at| (at, at + 1, Some(0))).collect();
    assert_eq!(ranges(rows), [(0, Some(0)), (1000, None)]);
}

#[test]
fn ignore_indices_out_of_range() {
    let broken = Lines {
        ranges: vec![(0, Some(7)), (1, Some(0))],
        calls: vec![Call {
            function: Some(9),
            file: Some(9),
            line: None,
            column: None,
            within: Some(0),
        }],
        names: Vec::new(),
    };
    assert_eq!(broken.at(0).count(), 0);
    // A call that is inlined into itself ends as well.
    assert_eq!(broken.at(1).count(), INLINED_MAX);
    assert!(broken.at(1).all(|line| line.function.is_none()));
}

/// Each parameter is a pair of back references to the one before it, so the expansion doubles each time.
#[test]
fn cut_a_short_name_that_expands_to_a_long_one() {
    let mut mangled = String::from("_RINvC1a1b");
    // Back references are counted from the position after `_R`.
    let mut last = mangled.len() - 2;
    mangled += "TuuE";
    for _ in 0..20 {
        let (next, back) = (mangled.len() - 2, base_62(last));
        mangled += &format!("TB{back}B{back}E");
        last = next;
    }
    mangled += "E";
    let whole = format!("{:#}", rustc_demangle::demangle(&mangled));
    assert!(mangled.len() < 256 && whole.len() >= 1_000_000);
    assert_eq!(demangled(&mangled), whole[..NAME_BYTES_MAX]);
    assert_eq!(demangled("_ZN1a1b17h0123456789abcdefE"), "a::b");
    assert_eq!(demangled("not mangled"), "not mangled");
}

/// A number as mangled Rust names write it.
fn base_62(number: usize) -> String {
    const DIGITS: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let Some(mut rest) = number.checked_sub(1) else {
        return "_".into();
    };
    let mut digits = String::new();
    loop {
        digits.insert(0, char::from(DIGITS[rest % 62]));
        rest /= 62;
        if rest == 0 {
            return digits + "_";
        }
    }
}

#[test]
fn components_without_debug_sections_have_no_lines() {
    for bytes in [
        &b""[..],
        b"\0asm",
        b"\0asm\x0d\0\x01\0",
        b"\0asm\x01\0\0\0",
        // A custom section `.debug_info` with garbage, in a core module.
        b"\0asm\x01\0\0\0\0\x0f\x0b.debug_info\xff\xff\xff",
    ] {
        let lines = Lines::read(bytes);
        assert_eq!(lines.at(0).count(), 0, "{bytes:?}");
    }
}
