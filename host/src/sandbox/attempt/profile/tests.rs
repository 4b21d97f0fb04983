use super::*;
use crate::sandbox::attempt::stack::StackFrame;

fn frame(function: &str, line: u32) -> StackFrame {
    StackFrame {
        function: function.to_owned(),
        file: Some("lib.rs".to_owned()),
        line: Some(line),
        column: None,
    }
}

#[test]
fn store_repeated_values_once() {
    let profile = Profile::start();
    let ms = Duration::from_millis;
    // Innermost first: `work` in two lines, called by `run` from one.
    for (at, line) in [(1, 7), (2, 8), (4, 7)] {
        let stack = vec![frame("work", line), frame("run", 3)];
        profile.lock().add(ms(at), stack);
    }
    profile.lock().add(ms(5), Vec::new());

    let json = profile.firefox_json("text.stats");
    let thread = &json["threads"][0];
    assert_eq!(
        thread["stringArray"],
        serde_json::json!(["run", "lib.rs", "work"])
    );
    assert_eq!(thread["funcTable"]["name"], serde_json::json!([0, 2]));
    assert_eq!(thread["funcTable"]["fileName"], serde_json::json!([1, 1]));
    assert_eq!(thread["frameTable"]["line"], serde_json::json!([3, 7, 8]));
    assert_eq!(thread["frameTable"]["func"], serde_json::json!([0, 1, 1]));
    assert_eq!(
        thread["stackTable"]["prefix"],
        serde_json::json!([null, 0, 0])
    );
    assert_eq!(
        thread["samples"]["stack"],
        serde_json::json!([1, 2, 1, null])
    );
    assert_eq!(
        thread["samples"]["timeDeltas"],
        serde_json::json!([1.0, 1.0, 2.0, 1.0])
    );
    assert_eq!(profile.len(), 4);
}

#[test]
fn all_columns_of_a_table_have_the_same_length() {
    let profile = Profile::start();
    profile
        .lock()
        .add(Duration::ZERO, vec![frame("a", 1), frame("b", 2)]);
    let json = profile.firefox_json("x");
    let mut tables = 0;
    for (name, table) in json["threads"][0].as_object().unwrap() {
        let Some(length) = table["length"].as_u64() else {
            continue;
        };
        tables += 1;
        for (column, values) in table.as_object().unwrap() {
            if let Some(values) = values.as_array() {
                assert_eq!(values.len() as u64, length, "{name}.{column}");
            }
        }
    }
    assert_eq!(
        tables, 7,
        "samples, stacks, frames, functions, and three empty ones"
    );
}
