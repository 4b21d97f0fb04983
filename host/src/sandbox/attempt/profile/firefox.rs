//! The file format of Firefox's profiler: its "processed" format, in the version that its tools for other languages
//! write. Tables are lists of columns of the same length, and rows are referred to by number.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::samples::Samples;
use crate::sanitize::printable;

/// The version of the format. Later versions of the profiler also read it.
const VERSION: u32 = 55;

/// Names of functions with all their type parameters can be pages long.
const NAME_BYTES_MAX: usize = 1024;

pub(super) fn json(samples: &Samples, name: &str, every: Duration) -> Value {
    let started_at = samples.started_at.duration_since(SystemTime::UNIX_EPOCH);
    json!({
        "meta": {
            "version": 24,
            "preprocessedProfileVersion": VERSION,
            "product": name,
            "startTime": started_at.unwrap_or_default().as_secs_f64() * 1e3,
            "interval": every.as_secs_f64() * 1e3,
            "processType": 0,
            "debug": false,
            "symbolicated": true,
            "sourceCodeIsNotOnSearchfox": true,
            "usesOnlyOneStackType": true,
            "pausedRanges": [],
            "categories": [{"name": "Other", "color": "grey", "subcategories": ["Other"]}],
            "sampleUnits": {"time": "ms", "eventDelay": "ms", "threadCPUDelta": "µs"},
            "extensions": {"length": 0, "baseURL": [], "id": [], "name": []},
            "markerSchema": [],
        },
        "libs": [],
        "pages": [],
        "profilerOverhead": [],
        "counters": [],
        "threads": [thread(samples, name)],
    })
}

fn thread(samples: &Samples, name: &str) -> Value {
    json!({
        "name": name,
        "processName": name,
        "processType": "default",
        "isMainThread": true,
        "pid": "0",
        "tid": 0,
        "registerTime": 0.0,
        "unregisterTime": null,
        "processStartupTime": 0.0,
        "processShutdownTime": null,
        "showMarkersInTimeline": false,
        "pausedRanges": [],
        "samples": sample_table(samples),
        "stackTable": stacks(samples),
        "frameTable": frames(samples),
        "funcTable": functions(samples),
        "stringArray": samples.names.column(|name| printable(name, NAME_BYTES_MAX)),
        "markers": {
            "length": 0, "category": [], "data": [], "endTime": [], "name": [], "phase": [], "startTime": [],
        },
        "resourceTable": {"length": 0, "lib": [], "name": [], "host": [], "type": []},
        "nativeSymbols": {"length": 0, "address": [], "functionSize": [], "libIndex": [], "name": []},
    })
}

fn sample_table(samples: &Samples) -> Value {
    let samples = &samples.samples;
    let ms = samples.iter().map(|sample| sample.at.as_secs_f64() * 1e3);
    let mut last = 0.0;
    let deltas: Vec<f64> = ms.map(|ms| ms - std::mem::replace(&mut last, ms)).collect();
    json!({
        "length": samples.len(),
        "weightType": "samples",
        "weight": vec![1; samples.len()],
        "stack": samples.iter().map(|sample| sample.stack).collect::<Vec<_>>(),
        "timeDeltas": deltas,
    })
}

fn stacks(samples: &Samples) -> Value {
    let stacks = &samples.stacks;
    json!({
        "length": stacks.all.len(),
        "prefix": stacks.column(|stack| stack.below),
        "frame": stacks.column(|stack| stack.frame),
    })
}

fn frames(samples: &Samples) -> Value {
    let frames = &samples.frames;
    json!({
        "length": frames.all.len(),
        "func": frames.column(|frame| frame.function),
        "line": frames.column(|frame| frame.line),
        "column": frames.column(|frame| frame.column),
        "address": frames.column(|_| -1),
        "inlineDepth": frames.column(|_| 0),
        "category": frames.column(|_| 0),
        "subcategory": frames.column(|_| 0),
        "innerWindowID": frames.column(|_| 0),
        "nativeSymbol": frames.column(|_| Value::Null),
    })
}

fn functions(samples: &Samples) -> Value {
    let functions = &samples.functions;
    json!({
        "length": functions.all.len(),
        "name": functions.column(|function| function.name),
        "fileName": functions.column(|function| function.file),
        "lineNumber": functions.column(|_| Value::Null),
        "columnNumber": functions.column(|_| Value::Null),
        "isJS": functions.column(|_| false),
        "relevantForJS": functions.column(|_| false),
        "resource": functions.column(|_| -1),
    })
}
