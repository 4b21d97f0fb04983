//! Whole numbers on the command line. The error names what is accepted.

use std::fmt::Display;
use std::str::FromStr;

/// Accepts whole numbers from `min` to `max`.
pub(super) fn between<T>(min: T, max: T) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.parse().ok();
        number
            .filter(|number| (&min..=&max).contains(&number))
            .ok_or_else(|| format!("expected a whole number from {min} to {max}"))
    }
}

/// Accepts the id of a job.
pub(super) fn job_id(text: &str) -> Result<i64, String> {
    let id = text.parse().ok();
    id.ok_or_else(|| "expected the id of a job, a whole number such as 12".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_what_is_accepted() {
        let limit = between(1, 10);
        assert_eq!(limit("10"), Ok(10));
        for text in ["x", "0", "11", "1.5", "", "99999999999999999999"] {
            let message = "expected a whole number from 1 to 10";
            assert_eq!(limit(text), Err(message.to_owned()), "{text}");
        }
        assert_eq!(job_id("12"), Ok(12));
        assert!(job_id("twelve").is_err_and(|message| message.contains("the id of a job")));
    }
}
