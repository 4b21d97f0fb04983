//! Expands an annotated function to its implementation of `Handler`.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Attribute, Expr, FnArg, GenericArgument, ItemFn, Lit, PathArguments, ReturnType, Type};

use crate::options::{During, Edge, Gate, Limit, OnConflict, Options, Statement};

/// Expands `#[handler(…)]`. The function itself is emitted even after an error, so that no "cannot find function"
/// errors follow.
pub(crate) fn handler(options: TokenStream, item: TokenStream) -> TokenStream {
    let function = match syn::parse2::<ItemFn>(item.clone()) {
        Ok(function) => function,
        Err(error) => {
            let why = "#[handler] can only be applied to a function";
            let error = syn::Error::new(error.span(), why).into_compile_error();
            return quote!(#item #error);
        }
    };
    let implementation = match (Options::read(options), Shape::from_function(&function)) {
        (Ok(options), Ok(shape)) => match shape.checked_for_batches(options.takes_batches()) {
            Ok(shape) => implementation(&function, &options, &shape),
            Err(error) => error.into_compile_error(),
        },
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => error.into_compile_error(),
        (Err(mut error), Err(other)) => {
            error.combine(other);
            error.into_compile_error()
        }
    };
    quote!(#function #implementation)
}

/// The types of a handler function.
struct Shape<'a> {
    takes_ctx: bool,
    input: &'a Type,
    output: Type,
    returns_result: bool,
    /// True if it takes batches. Then `input` and `output` are those of one job.
    takes_batches: bool,
}

impl<'a> Shape<'a> {
    /// Returns the shape with the input and output of one job if the handler takes batches.
    fn checked_for_batches(self, takes_batches: bool) -> syn::Result<Self> {
        let input = generic(self.input, "Vec").and_then(|job| generic(job, "BatchJob"));
        match (takes_batches, input) {
            (false, None) => Ok(self),
            (false, Some(_)) => {
                let why = "a handler of batches needs the option `batch(…)`, for instance `batch(max = 100)`";
                Err(syn::Error::new(self.input.span(), why))
            }
            (true, None) => {
                let why = "a handler with `batch(…)` takes `Vec<BatchJob<T>>`";
                Err(syn::Error::new(self.input.span(), why))
            }
            (true, Some(input)) => {
                let of_job = generic(&self.output, "Vec").and_then(ok_type).cloned();
                let Some(output) = of_job else {
                    let why = "a handler with `batch(…)` returns `Vec<Result<T>>`, one for each job, or a `Result` of that";
                    return Err(syn::Error::new(self.output.span(), why));
                };
                Ok(Self {
                    input,
                    output,
                    takes_batches,
                    ..self
                })
            }
        }
    }

    fn from_function(function: &'a ItemFn) -> syn::Result<Self> {
        let signature = &function.sig;
        let fail = |span, why| Err(syn::Error::new(span, why));
        if let Some(parameter) = signature.generics.params.first() {
            return fail(
                parameter.span(),
                "a handler must not have generic parameters",
            );
        }
        if let Some(unsafety) = &signature.unsafety {
            return fail(unsafety.span(), "a handler must not be unsafe");
        }
        let parameters: Vec<&Type> = signature
            .inputs
            .iter()
            .map(|parameter| match parameter {
                FnArg::Typed(parameter) => Ok(&*parameter.ty),
                FnArg::Receiver(receiver) => {
                    let why = "a handler must be a free function, without self";
                    Err(syn::Error::new(receiver.span(), why))
                }
            })
            .collect::<syn::Result<_>>()?;
        let (takes_ctx, input) = match parameters[..] {
            [input] if !is_ctx(input) => (false, input),
            [ctx, input] => {
                let is_shared =
                    matches!(ctx, Type::Reference(reference) if reference.mutability.is_none());
                if !is_shared {
                    return fail(
                        ctx.span(),
                        "the first parameter of a handler must be `&Ctx`",
                    );
                }
                (true, input)
            }
            _ => {
                return fail(
                    signature.ident.span(),
                    "a handler takes `&Ctx` and its input, or only its input; without a payload, the input is `_: ()`",
                );
            }
        };
        if let Type::ImplTrait(generic) = input {
            return fail(generic.span(), "a handler must not have generic parameters");
        }
        if let Type::Reference(reference) = input {
            return fail(
                reference.span(),
                "a handler must take its input by value, after `&Ctx`",
            );
        }
        let (output, returns_result) = match &signature.output {
            ReturnType::Default => (syn::parse_quote!(()), false),
            ReturnType::Type(_, output) => match ok_type(output) {
                Some(ok) => (ok.clone(), true),
                None => ((**output).clone(), false),
            },
        };
        Ok(Self {
            takes_ctx,
            input,
            output,
            returns_result,
            takes_batches: false,
        })
    }
}

/// True for `&Ctx`, under any path.
fn is_ctx(parameter: &Type) -> bool {
    let Type::Reference(reference) = parameter else {
        return false;
    };
    match &*reference.elem {
        Type::Path(path) => (path.path.segments.last()).is_some_and(|last| last.ident == "Ctx"),
        _ => false,
    }
}

/// `T` of a type `name<T>`, under any path.
fn generic<'a>(of: &'a Type, name: &str) -> Option<&'a Type> {
    let Type::Path(path) = of else {
        return None;
    };
    let last = path.path.segments.last()?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else {
        return None;
    };
    match arguments.args.first()? {
        GenericArgument::Type(inner) if last.ident == name => Some(inner),
        _ => None,
    }
}

/// `T` of `Result<T, …>`, under any path.
fn ok_type(output: &Type) -> Option<&Type> {
    generic(output, "Result")
}

fn implementation(function: &ItemFn, options: &Options, shape: &Shape<'_>) -> TokenStream {
    let visibility = &function.vis;
    let name = &function.sig.ident;
    let definition = definition(options, &function.attrs);
    let Shape { input, output, .. } = shape;

    // These use the spans of the author's types, so that "the trait bound `Input: Deserialize` is not satisfied" points
    // at them.
    let decode = quote_spanned!(input.span()=> ::rouse_sdk::__private::decode::<#input>(payload)?);
    let encode = quote_spanned!(output.span()=> ::rouse_sdk::__private::encode::<#output>(&output));
    let input_schema =
        quote_spanned!(input.span()=> ::rouse_sdk::__private::input_schema::<#input>());
    let output_schema =
        quote_spanned!(output.span()=> ::rouse_sdk::__private::output_schema::<#output>());

    // The same for "private type `Input` in public interface".
    let input_type = quote_spanned!(input.span()=> type Input = #input;);
    let output_type = quote_spanned!(output.span()=> type Output = #output;);

    let call = if shape.takes_ctx {
        quote!(#name(ctx, input))
    } else {
        quote!(#name(input))
    };
    let call = if function.sig.asyncness.is_some() {
        quote!(::rouse_sdk::block_on(#call))
    } else {
        call
    };
    let call = if shape.returns_result {
        quote!(#call?)
    } else {
        call
    };

    let run = match shape.takes_batches {
        false => quote! {
            let input = #decode;
            let output = #call;
            #encode
        },
        true => quote! {
            ::rouse_sdk::__private::run_batch::<#input, #output, _>(
                ctx,
                payload,
                |input| ::std::result::Result::Ok(#call),
            )
        },
    };

    // The type has the function's name: types and functions have separate namespaces, and `export!(name)` refers to
    // both.
    quote! {
        #[doc(hidden)]
        #[allow(non_camel_case_types, reason = "named after its function")]
        #visibility enum #name {}

        impl ::rouse_sdk::Handler for #name {
            #input_type
            #output_type

            const DEFINITION: ::rouse_sdk::Definition = #definition;

            fn input_schema() -> ::rouse_sdk::schemars::Schema {
                #input_schema
            }

            fn output_schema() -> ::rouse_sdk::schemars::Schema {
                #output_schema
            }

            #[allow(clippy::needless_question_mark, reason = "the errors may be of another type")]
            fn run(
                ctx: &::rouse_sdk::Ctx,
                payload: &[u8],
            ) -> ::std::result::Result<::std::vec::Vec<u8>, ::rouse_sdk::Error> {
                let _ = ctx;
                #run
            }
        }
    }
}

fn definition(options: &Options, attributes: &[Attribute]) -> TokenStream {
    let Options {
        name,
        version,
        description,
        max_attempts,
        retry_initial_ms,
        retry_max_ms,
        retry_multiplier,
        retry_jitter,
        lease_ms,
        timeout_ms,
        grace_ms,
        concurrency,
        reuse,
        schedule,
        schedule_time_zone,
        gates,
        statements,
        capabilities,
    } = options;
    let version = match version {
        Some(version) => quote!(#version),
        None => quote!(::std::env!("CARGO_PKG_VERSION")),
    };
    let description = description
        .clone()
        .unwrap_or_else(|| doc_comment(attributes));
    let max_attempts = option(max_attempts);
    let retry_initial_ms = option(retry_initial_ms);
    let retry_max_ms = option(retry_max_ms);
    let retry_multiplier = option(retry_multiplier);
    let retry_jitter = option(retry_jitter);
    let lease_ms = option(lease_ms);
    let timeout_ms = option(timeout_ms);
    let grace_ms = option(grace_ms);
    let concurrency = option(concurrency);
    let instances = match reuse {
        true => quote!(::rouse_sdk::Instances::Reuse),
        false => quote!(::rouse_sdk::Instances::Fresh),
    };
    let schedule = option(schedule);
    let schedule_time_zone = option(schedule_time_zone);
    let gates = gates.iter().map(gate);
    let statements = statements.iter().map(|statement| {
        let Statement {
            name,
            sql,
            rows,
            retries,
        } = statement;
        let rows = option(rows);
        let on_error = match retries {
            true => quote!(::rouse_sdk::OnError::Retry),
            false => quote!(::rouse_sdk::OnError::Fail),
        };
        quote!(::rouse_sdk::Statement { name: #name, sql: #sql, rows: #rows, on_error: #on_error })
    });
    quote! {
        ::rouse_sdk::Definition {
            name: #name,
            version: #version,
            description: #description,
            max_attempts: #max_attempts,
            retry_initial_ms: #retry_initial_ms,
            retry_max_ms: #retry_max_ms,
            retry_multiplier: #retry_multiplier,
            retry_jitter: #retry_jitter,
            lease_ms: #lease_ms,
            timeout_ms: #timeout_ms,
            grace_ms: #grace_ms,
            concurrency: #concurrency,
            instances: #instances,
            schedule: #schedule,
            schedule_time_zone: #schedule_time_zone,
            gates: &[#(#gates),*],
            statements: &[#(#statements),*],
            capabilities: &[#(#capabilities),*],
        }
    }
}

fn gate(gate: &Gate) -> TokenStream {
    let Gate { limit, key } = gate;
    let limit = match limit {
        Limit::MaxConcurrent { max } => quote!(MaxConcurrent { max: #max }),
        Limit::Throttle {
            max,
            period_ms,
            burst,
        } => {
            let burst = option(burst);
            quote!(Throttle { max: #max, period_ms: #period_ms, burst: #burst })
        }
        Limit::Batch { max, period_ms } => {
            let period_ms = option(period_ms);
            quote!(Batch { max: #max, period_ms: #period_ms })
        }
        Limit::Singleton {
            during,
            period_ms,
            on_conflict,
        } => {
            let during = match during {
                During::Queued => quote!(Queued),
                During::Running => quote!(Running),
                During::Period => quote!(Period),
            };
            let on_conflict = match on_conflict {
                OnConflict::Keep => quote!(Keep),
                OnConflict::Replace => quote!(Replace),
                OnConflict::Refuse => quote!(Refuse),
            };
            let period_ms = option(period_ms);
            quote!(Singleton {
                during: ::rouse_sdk::During::#during,
                period_ms: #period_ms,
                on_conflict: ::rouse_sdk::OnConflict::#on_conflict,
            })
        }
        Limit::Debounce {
            period_ms,
            max_wait_ms,
            edge,
        } => {
            let edge = match edge {
                Edge::Trailing => quote!(Trailing),
                Edge::Leading => quote!(Leading),
            };
            let max_wait_ms = option(max_wait_ms);
            quote!(Debounce {
                period_ms: #period_ms,
                max_wait_ms: #max_wait_ms,
                edge: ::rouse_sdk::Edge::#edge,
            })
        }
    };
    quote!(::rouse_sdk::Gate { limit: ::rouse_sdk::GateLimit::#limit, key: &[#(#key),*] })
}

fn option<T: quote::ToTokens>(value: &Option<T>) -> TokenStream {
    match value {
        Some(value) => quote!(::std::option::Option::Some(#value)),
        None => quote!(::std::option::Option::None),
    }
}

/// The text of `///` lines.
fn doc_comment(attributes: &[Attribute]) -> String {
    let lines: Vec<String> = attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("doc"))
        .filter_map(
            |attribute| match &attribute.meta.require_name_value().ok()?.value {
                Expr::Lit(literal) => match &literal.lit {
                    Lit::Str(text) => Some(text.value().trim().to_owned()),
                    _ => None,
                },
                _ => None,
            },
        )
        .collect();
    lines.join("\n").trim().to_owned()
}

#[cfg(test)]
mod tests;
