//! A complete handler, the one in the README.

use rouse_sdk::{Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Deserialize, JsonSchema)]
struct Person {
    name: String,
}

#[derive(Serialize, JsonSchema)]
struct Greeting {
    text: String,
}

/// Greets somebody.
#[handler(name = "demo.greet", max_attempts = 3, timeout = "10s")]
fn greet(ctx: &Ctx, person: Person) -> Result<Greeting, Error> {
    if person.name.is_empty() {
        return Err(Error::permanent("the name is empty"));
    }
    ctx.info(format_args!("greeting {}", person.name));
    Ok(Greeting {
        text: format!("Hello, {}!", person.name),
    })
}

export!(greet);

#[cfg(test)]
mod tests {
    use rouse_sdk::TestCtx;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_person_is_greeted() {
        let ctx = TestCtx::new();
        let result = ctx.run::<super::greet>(json!({"name": "Ada"})).unwrap();
        assert_eq!(result, json!({"text": "Hello, Ada!"}));
        assert_eq!(ctx.logs()[0].message, "greeting Ada");
    }

    #[test]
    fn an_empty_name_fails_permanently() {
        let person = Person {
            name: String::new(),
        };
        let error = greet(&TestCtx::new(), person).err().unwrap();
        assert!(error.permanent);
    }
}
