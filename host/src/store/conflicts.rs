//! Retries calls that Postgres has rolled back because of concurrent transactions.

/// The maximum number of tries of a call.
const TRIES_MAX: usize = 3;

/// Makes a call; again if it has failed because of a conflict
/// ([`StoreError::is_conflict`](super::StoreError::is_conflict)).
pub async fn retry_conflicts<T, E, F: Future<Output = Result<T, E>>>(
    is_conflict: impl Fn(&E) -> bool,
    call: impl Fn() -> F,
) -> Result<T, E> {
    for _ in 1..TRIES_MAX {
        match call().await {
            Err(error) if is_conflict(&error) => {}
            done => return done,
        }
    }
    call().await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Makes a call that fails with these errors, and then succeeds. Returns its result and the number of tries.
    async fn make(errors: &[&'static str]) -> (Result<(), &'static str>, usize) {
        let tries = Cell::new(0);
        let call = || async {
            let error = errors.get(tries.get()).copied();
            tries.set(tries.get() + 1);
            error.map_or(Ok(()), Err)
        };
        let done = retry_conflicts(|error| *error == "conflict", call).await;
        (done, tries.get())
    }

    #[tokio::test]
    async fn a_call_is_tried_three_times_as_long_as_it_fails_because_of_conflicts() {
        assert_eq!(make(&[]).await, (Ok(()), 1));
        assert_eq!(make(&["conflict"; 2]).await, (Ok(()), 3));
        assert_eq!(make(&["conflict"; 3]).await, (Err("conflict"), 3));
        assert_eq!(make(&["conflict", "other"]).await, (Err("other"), 2));
        assert_eq!(make(&["other"]).await, (Err("other"), 1));
    }
}
