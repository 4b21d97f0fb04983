use super::*;

fn expanded(options: TokenStream, item: TokenStream) -> String {
    handler(options, item).to_string()
}

fn refused(item: TokenStream) -> String {
    let text = expanded(quote!(name = "a"), item);
    assert!(text.contains("compile_error"), "{text}");
    text
}

#[test]
fn the_function_is_left_unchanged() {
    let function = quote!(
        pub fn stats(ctx: &Ctx, input: In) -> Result<Out, Error> {
            body()
        }
    );
    let text = expanded(quote!(name = "a"), function.clone());
    assert!(text.starts_with(&function.to_string()), "{text}");
    assert!(!text.contains("compile_error"), "{text}");
}

#[test]
fn the_doc_comment_is_the_description() {
    let function = quote!(
        /// Counts words.
        ///
        /// All of them.
        fn stats(input: In) {}
    );
    let text = expanded(quote!(name = "a"), function.clone());
    assert!(
        text.contains("\"Counts words.\\n\\nAll of them.\""),
        "{text}"
    );

    let text = expanded(quote!(name = "a", description = "Own"), function);
    assert!(text.contains("description : \"Own\""), "{text}");
}

#[test]
fn an_error_keeps_the_function() {
    let text = expanded(
        quote!(),
        quote!(
            fn stats(input: In) {}
        ),
    );
    assert!(text.starts_with("fn stats (input : In)"), "{text}");
    assert!(text.contains("a handler needs a name"), "{text}");
}

#[test]
fn an_invalid_signature_is_refused_with_what_is_expected() {
    assert!(
        refused(quote!(
            struct NotAFunction;
        ))
        .contains("can only be applied to a function")
    );
    assert!(
        refused(quote!(
            fn f() {}
        ))
        .contains("takes `&Ctx` and its input")
    );
    assert!(
        refused(quote!(
            fn f(a: &Ctx, b: In, c: In) {}
        ))
        .contains("takes `&Ctx`")
    );
    assert!(
        refused(quote!(
            fn f(a: In, b: In) {}
        ))
        .contains("first parameter")
    );
    assert!(
        refused(quote!(
            fn f(ctx: &mut Ctx, input: In) {}
        ))
        .contains("first parameter")
    );
    for without_input in [
        quote!(
            fn f(ctx: &Ctx) {}
        ),
        quote!(
            fn f(ctx: &rouse_sdk::Ctx) {}
        ),
        quote!(
            fn f() {}
        ),
    ] {
        assert!(refused(without_input).contains("the input is `_: ()`"));
    }
    assert!(
        refused(quote!(
            fn f(input: &In) {}
        ))
        .contains("by value")
    );
    assert!(
        refused(quote!(
            fn f(input: impl Into<String>) {}
        ))
        .contains("generic")
    );
    assert!(
        refused(quote!(
            fn f(&self, input: In) {}
        ))
        .contains("without self")
    );
    assert!(
        refused(quote!(
            fn f<T>(input: T) {}
        ))
        .contains("generic")
    );
    assert!(
        refused(quote!(
            unsafe fn f(input: In) {}
        ))
        .contains("unsafe")
    );
}

#[test]
fn a_handler_of_batches_takes_and_returns_lists() {
    let batch = quote!(name = "a", batch(max = 10));
    for function in [
        quote!(
            fn f(jobs: Vec<BatchJob<In>>) -> Vec<Result<Out>> {}
        ),
        quote!(
            async fn f(
                ctx: &Ctx,
                jobs: Vec<rouse_sdk::BatchJob<In>>,
            ) -> Result<Vec<Result<Out, E>>> {
            }
        ),
    ] {
        let text = expanded(batch.clone(), function);
        assert!(!text.contains("compile_error"), "{text}");
        assert!(
            text.contains("type Input = In ; type Output = Out ;"),
            "{text}"
        );
        assert!(text.contains("run_batch :: < In , Out , _ >"), "{text}");
    }
    let text = expanded(
        batch.clone(),
        quote!(
            fn f(job: In) -> Out {}
        ),
    );
    assert!(text.contains("takes `Vec<BatchJob<T>>`"), "{text}");
    let text = expanded(
        batch,
        quote!(
            fn f(jobs: Vec<BatchJob<In>>) -> Out {}
        ),
    );
    assert!(text.contains("returns `Vec<Result<T>>`"), "{text}");
    assert!(
        refused(quote!(
            fn f(jobs: Vec<BatchJob<In>>) -> Vec<Result<Out>> {}
        ))
        .contains("needs the option `batch(…)`")
    );
    let text = expanded(
        quote!(name = "a", batch(max = 1), batch(max = 2)),
        quote!(
            fn f(jobs: Vec<BatchJob<In>>) -> Vec<Result<Out>> {}
        ),
    );
    assert!(text.contains("`batch` is set twice"), "{text}");
}
