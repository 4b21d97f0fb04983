//! The page on which users enter their token.

use maud::{Markup, html};

use super::cells;
use super::layout::Chrome;

/// The page. `why`: what was wrong with the last try; `next`: the path to go to afterwards.
pub fn sign_in(chrome: &Chrome, why: &str, next: &str) -> Markup {
    html! {
        div class="title" { h1 { "Sign in" } }
        section class="card" {
            @if !why.is_empty() { p class="notice bad" role="alert" { (cells::line(why)) } }
            form method="post" action={ (chrome.base) "/sign-in" } {
                (chrome.token())
                input type="hidden" name="next" value=(next);
                label { "Token" input type="password" name="token" autocomplete="current-password" required autofocus; }
                p class="soft" { "A viewer's token lets you read; an operator's token also lets you make changes. Both are in the host's settings." }
                button type="submit" class="main" { "Sign in" }
            }
        }
    }
}
