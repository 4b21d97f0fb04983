//! Signals, calls and parents of jobs, read and recorded in Postgres behind the fence of the running job.

use std::collections::HashMap;
use std::time::SystemTime;

use super::journal::AttemptJournal;
use crate::job::{ParentEnd, ReturnedCall};
use crate::sandbox::{JournalFuture, WaitStore};

impl WaitStore for AttemptJournal {
    fn take_signal<'a>(
        &'a self,
        step: &'a str,
        name: &'a str,
        until: Option<SystemTime>,
    ) -> JournalFuture<'a, Result<Option<Vec<u8>>, String>> {
        let store = &self.shared.store;
        Box::pin(self.call(&self.shared.calls.steps, move || {
            store.take_signal(self.id, self.fence, step, name, until)
        }))
    }

    fn returned_calls<'a>(
        &'a self,
        steps: &'a [String],
        bytes_max: usize,
    ) -> JournalFuture<'a, Result<HashMap<String, ReturnedCall>, String>> {
        let store = &self.shared.store;
        Box::pin(self.call(&self.shared.calls.steps, move || {
            store.returned_calls(self.id, self.fence, steps, bytes_max)
        }))
    }

    fn parents<'a>(
        &'a self,
        after: Option<&'a str>,
    ) -> JournalFuture<'a, Result<Vec<ParentEnd>, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            let names = self.next_parents().after(after).to_vec();
            let read = || store.parent_ends(self.id, self.fence, after, &names);
            let page = self.call(&self.shared.calls.steps, read).await?;
            *self.next_parents() = NextParents {
                after: page.ends.last().map(|end| end.name.clone()),
                names: page.next,
            };
            Ok(page.ends)
        })
    }
}

/// The names of the parents that follow the last page, at most 1,000, so that the database does not list and sort all
/// names for each page.
#[derive(Debug, Default)]
pub(super) struct NextParents {
    /// The name before them; `None`: they are the first.
    after: Option<String>,
    /// In byte order.
    names: Vec<String>,
}

impl NextParents {
    /// Those that follow this name; none if it is not known which do.
    fn after(&self, after: Option<&str>) -> &[String] {
        if after < self.after.as_deref() {
            return &[];
        }
        let passed = self
            .names
            .partition_point(|name| Some(name.as_str()) <= after);
        &self.names[passed..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_follow_a_name_in_byte_order() {
        let next = NextParents {
            after: Some("B".into()),
            names: ["a", "b", "\u{e9}"].map(str::to_owned).into(),
        };
        let after = |name| next.after(name).join(" ");
        assert_eq!(after(Some("B")), "a b \u{e9}");
        assert_eq!(after(Some("a")), "b \u{e9}");
        assert_eq!(after(Some("az")), "b \u{e9}");
        assert_eq!(after(Some("\u{e9}")), "");
        // Other names may lie between.
        assert_eq!(after(Some("A")), "");
        assert_eq!(after(None), "");
        assert!(NextParents::default().after(None).is_empty());
    }
}
