//! The official test suite, as far as this crate evaluates the standard: schemas with other keywords are rejected when
//! they are loaded, and no check gives a wrong result.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::schema;

const SUITE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests/json-schema-test-suite/draft2020-12"
);

#[derive(Deserialize)]
struct Group<'a> {
    description: String,
    #[serde(borrow)]
    schema: &'a RawValue,
    tests: Vec<Test<'a>>,
}

#[derive(Deserialize)]
struct Test<'a> {
    description: String,
    #[serde(borrow)]
    data: &'a RawValue,
    valid: bool,
}

#[derive(Default, Debug, PartialEq, Eq)]
struct Counts {
    agrees: usize,
    refused: usize,
    wrong_results: usize,
}

fn counts(dir: &Path, report: &mut String) -> Counts {
    let files = fs::read_dir(dir).expect("the suite is there");
    let mut files: Vec<_> = files
        .map(|file| file.expect("it is listed").path())
        .collect();
    files.retain(|file| file.extension().is_some_and(|ending| ending == "json"));
    files.sort();
    let mut counts = Counts::default();
    for file in files {
        let name = file.file_name().unwrap_or_default().display().to_string();
        let text = fs::read_to_string(&file).expect("it is read");
        let groups: Vec<Group<'_>> = serde_json::from_str(&text).expect("it is an array of groups");
        for group in groups {
            let schema = match schema(group.schema.get()) {
                Ok(schema) => schema,
                Err(why) => {
                    counts.refused += group.tests.len();
                    writeln!(report, "refused {name}: {}: {why}", group.description).unwrap();
                    continue;
                }
            };
            for test in group.tests {
                let checked = schema.check(test.data.get().as_bytes());
                if checked.is_ok() == test.valid {
                    counts.agrees += 1;
                } else {
                    counts.wrong_results += 1;
                    let (group, test) = (&group.description, &test.description);
                    writeln!(report, "WRONG {name}: {group}: {test}: {checked:?}").unwrap();
                }
            }
        }
    }
    counts
}

#[test]
fn the_official_suite_gets_no_wrong_result() {
    let mut report = String::new();
    let required = counts(Path::new(SUITE), &mut report);
    let optional = counts(&Path::new(SUITE).join("optional"), &mut report);
    println!("{report}required: {required:?}\noptional: {optional:?}");
    // Rejected schemas refer to other documents, have another meta-schema, or use "$dynamicRef" with a name that more
    // than one "$dynamicAnchor" has.
    for (counted, agrees, refused) in [(required, 1_183, 74), (optional, 151, 7)] {
        let expected = Counts {
            agrees,
            refused,
            wrong_results: 0,
        };
        assert_eq!(counted, expected, "{report}");
    }
}
