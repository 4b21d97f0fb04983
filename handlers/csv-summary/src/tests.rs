use std::io::Write;

use rouse_sdk::{AbortReason, TestCtx};
use serde_json::json;

use super::*;

fn summary_from(csv: &str) -> Summary {
    let input = Input {
        csv: Some(csv.to_owned()),
        ..Input::default()
    };
    summary(&TestCtx::new(), input).unwrap()
}

fn refused(input: Input) -> Error {
    let error = summary(&TestCtx::new(), input).unwrap_err();
    assert!(error.permanent, "{error}");
    error
}

#[test]
fn numbers_have_a_range_a_mean_and_a_deviation() {
    let summary = summary_from("n,x\n2,0.5\n4,1.5\n4,2\n4,\n5,-1e1\n5,1\n7,1\n9,4\n");
    assert_eq!(summary.rows, 8);
    let n = &summary.columns[0];
    assert_eq!((n.name.as_str(), n.kind), ("n", Kind::Integer));
    assert_eq!((n.count, n.empty, n.distinct), (8, 0, 5));
    assert_eq!(n.min, Some(Scalar::Integer(2)));
    assert_eq!(n.max, Some(Scalar::Integer(9)));
    assert_eq!(n.mean, Some(5.0));
    assert!((n.stddev.unwrap() - (32.0_f64 / 7.0).sqrt()).abs() < 1e-12);

    let x = &summary.columns[1];
    assert_eq!((x.kind, x.count, x.empty), (Kind::Number, 7, 1));
    assert_eq!(x.min, Some(Scalar::Number(-10.0)));
    assert!(x.mean.unwrap().abs() < 1e-12);
}

#[test]
fn quoted_fields_may_hold_commas_quotes_and_line_breaks() {
    let summary = summary_from("\"a, b\",c\n\"x, \"\"y\"\"\nz\",1\n");
    assert_eq!(summary.rows, 1);
    assert_eq!(summary.columns[0].name, "a, b");
    let text = Some(Scalar::Text("x, \"y\"\nz".to_owned()));
    assert_eq!(summary.columns[0].min, text);
}

#[test]
fn one_value_that_is_not_a_number_makes_a_column_text() {
    let column = &summary_from("v\n1\n2\nn/a\n").columns[0];
    assert_eq!((column.kind, column.mean), (Kind::Text, None));
    assert_eq!(column.min, Some(Scalar::Text("1".to_owned())));
    assert_eq!(column.max, Some(Scalar::Text("n/a".to_owned())));
    assert_eq!(summary_from("v\n1\nnan\n").columns[0].kind, Kind::Text);
}

#[test]
fn a_column_without_values_is_empty_and_one_value_has_no_deviation() {
    let summary = summary_from("a,b\n,1\n,\n");
    assert_eq!(summary.columns[0].kind, Kind::Empty);
    assert_eq!(summary.columns[0].empty, 2);
    assert_eq!(summary.columns[1].stddev, None);
    assert_eq!(summary_from("a,b\n").rows, 0);
}

#[test]
fn a_file_is_read_if_a_path_is_given() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all("a;b\n1;2\n".as_bytes()).unwrap();
    let path = file.path().to_str().unwrap();
    let result = TestCtx::new()
        .run::<super::summary>(json!({"path": path, "delimiter": ";"}))
        .unwrap();
    assert_eq!(result["columns"][1]["max"], 2);
}

#[test]
fn a_missing_file_is_named_and_not_retried() {
    let error = refused(Input {
        path: Some("no/such.csv".to_owned()),
        ..Input::default()
    });
    assert_eq!(error.kind, "unreadable_file");
    assert!(error.message.contains("cannot read no/such.csv"), "{error}");
    assert!(error.message.contains("rouse.toml"), "{error}");
}

#[test]
fn invalid_csv_is_not_retried_and_the_line_is_named() {
    for (csv, why) in [("a,b\n1,2\n3\n", "line: 3"), ("", "no header")] {
        let error = refused(Input {
            csv: Some(csv.to_owned()),
            ..Input::default()
        });
        assert_eq!(error.kind, "invalid_csv");
        assert!(error.message.contains(why), "{error}");
    }
}

#[test]
fn require_either_csv_or_path_and_an_ascii_delimiter() {
    assert!(
        refused(Input::default())
            .message
            .contains("either `csv` or `path`")
    );
    let both = Input {
        csv: Some(String::new()),
        path: Some(String::new()),
        delimiter: None,
    };
    assert!(refused(both).message.contains("either"));
    let delimiter = Input {
        csv: Some("a".to_owned()),
        path: None,
        delimiter: Some('€'),
    };
    assert!(refused(delimiter).message.contains("delimiter"));
}

#[test]
fn an_abort_stops_the_summary_of_a_long_table() {
    let ctx = TestCtx::new();
    ctx.fire_abort(AbortReason::Cancelled);
    let input = Input {
        csv: Some(format!("n\n{}", "1\n".repeat(10_001))),
        ..Input::default()
    };
    let error = summary(&ctx, input).unwrap_err();
    assert_eq!(error.message, "stopped after 10000 rows: cancelled");
}
