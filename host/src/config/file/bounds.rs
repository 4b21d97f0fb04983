//! Bounds of numbers that no table of [`Setting`](crate::setting::Setting)s describes.

/// Rejects a value that is not between these bounds.
pub(super) fn within(
    name: &str,
    value: Option<u64>,
    min: u64,
    max: u64,
    unit: &str,
) -> Result<(), String> {
    match value {
        Some(value) if !(min..=max).contains(&value) => Err(format!(
            "{name} must be between {min} and {max}{unit}, not {value}"
        )),
        Some(_) | None => Ok(()),
    }
}
