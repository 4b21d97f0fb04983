//! The schedule of a handler: a cron expression and its time zone.

use syn::Expr;

use super::text;
use crate::limits::CRON_CHARS_MAX;

/// Checks the number of fields of a cron expression, and its characters. Only the host contains the parser, which would
/// add a dozen crates to each build of a handler.
pub(super) fn cron(value: &Expr) -> syn::Result<String> {
    let literal = text(value)?;
    let cron = literal.value();
    check_cron(&cron).map_err(|why| syn::Error::new(literal.span(), why))?;
    Ok(cron)
}

fn check_cron(cron: &str) -> Result<(), String> {
    let fields: Vec<&str> = cron.split_ascii_whitespace().collect();
    if !(5..=6).contains(&fields.len()) {
        return Err(
            "expected five fields (minute, hour, day of the month, month, day of the week), or six with seconds first, \
             for instance \"0 3 * * *\""
                .to_owned(),
        );
    }
    let is_known = |c: char| c.is_ascii_alphanumeric() || "*/,?#- \t".contains(c);
    if cron.len() > CRON_CHARS_MAX || !cron.chars().all(is_known) {
        return Err(format!(
            "a cron expression has at most {CRON_CHARS_MAX} characters: letters, digits, spaces and * / , ? # -"
        ));
    }
    Ok(())
}

/// Checks the characters of the name of a time zone. Only the host contains the list of existing time zones, because
/// it is large and changes.
pub(super) fn time_zone(value: &Expr) -> syn::Result<String> {
    let literal = text(value)?;
    let name = literal.value();
    let is_known = |c: char| c.is_ascii_alphanumeric() || "/_+-".contains(c);
    if name.is_empty() || !name.chars().all(is_known) {
        let why = format!(
            "`{name}` is not the name of a time zone: write one such as \"Europe/Berlin\" or \"UTC\""
        );
        return Err(syn::Error::new(literal.span(), why));
    }
    Ok(name)
}
