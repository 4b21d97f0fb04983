//! The width and colours of standard output.

use std::io::{IsTerminal as _, stdout};

use anstream::{AutoStream, ColorChoice};

/// The columns of a terminal of unknown size.
const COLUMNS: u16 = 80;

/// The properties of standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Screen {
    /// The width of a terminal; `None` for pipes and files, which take lines of any length and exact times.
    pub(super) columns: Option<u16>,
    /// Follows `NO_COLOR`, `CLICOLOR` and `CLICOLOR_FORCE`; off on pipes (<https://bixense.com/clicolors/>).
    pub(super) colours: bool,
}

impl Screen {
    /// Standard output.
    pub(super) fn from_stdout() -> Self {
        let columns = stdout().is_terminal().then(|| {
            let size = rustix::termios::tcgetwinsize(stdout());
            size.ok()
                .map(|size| size.ws_col)
                .filter(|columns| *columns > 0)
        });
        Self {
            columns: columns.map(|columns| columns.unwrap_or(COLUMNS)),
            colours: AutoStream::choice(&stdout()) != ColorChoice::Never,
        }
    }

    /// True for a terminal.
    pub(super) fn is_terminal(self) -> bool {
        self.columns.is_some()
    }
}

/// A colour of text, in the terminal's own palette.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Colour {
    Green,
    Red,
    Cyan,
    Grey,
}

impl Colour {
    pub(super) const ALL: [Self; 4] = [Self::Green, Self::Red, Self::Cyan, Self::Grey];

    /// The sequence that ends a colour (ECMA-48, SGR).
    pub(super) const END: &str = "\x1b[0m";

    /// The sequence that starts the colour.
    pub(super) fn start(self) -> &'static str {
        match self {
            Self::Green => "\x1b[32m",
            Self::Red => "\x1b[31m",
            Self::Cyan => "\x1b[36m",
            Self::Grey => "\x1b[90m",
        }
    }

    /// The colour of a state of a job or a worker; `None` for states that need no attention.
    pub(super) fn for_state(word: &str) -> Option<Self> {
        match word {
            "succeeded" | "active" => Some(Self::Green),
            "failed" | "timed_out" | "lost" | "dead" => Some(Self::Red),
            "running" | "draining" => Some(Self::Cyan),
            "cancelled" | "unregistered" => Some(Self::Grey),
            _ => None,
        }
    }

    /// The text in this colour.
    pub(super) fn paint(self, text: &str) -> String {
        format!("{}{text}{}", self.start(), Self::END)
    }
}
