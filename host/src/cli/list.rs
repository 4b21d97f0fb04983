//! Lists and tables for people: as wide as the terminal at most, with what matters in colour. On a pipe each row is one line.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::screen::{Colour, Screen};

/// Stand for the beginnings of colours, in the order of [`Colour::ALL`], and for their end, while the table is laid out. They take
/// up no room, and no text from elsewhere has them: [`harmless`](crate::harmless) shows them.
const BEGIN: [char; 4] = ['\u{2066}', '\u{2067}', '\u{2068}', '\u{61c}'];
const END: char = '\u{2069}';

/// What stands in one place of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Shown {
    text: String,
    colour: Option<Colour>,
    says_nothing: bool,
}

impl Shown {
    /// In this colour, where there are colours.
    pub(super) fn in_colour(text: impl Into<String>, colour: Option<Colour>) -> Self {
        Self {
            colour,
            ..Self::from(text.into())
        }
    }

    /// What stands for nothing in particular. A column of only that is left out on a terminal.
    pub(super) fn nothing(text: impl Into<String>) -> Self {
        Self {
            says_nothing: true,
            ..Self::from(text.into())
        }
    }
}

impl From<String> for Shown {
    fn from(text: String) -> Self {
        Self {
            says_nothing: text.is_empty(),
            text,
            colour: None,
        }
    }
}

/// Rows under a header, or without one.
#[derive(Debug)]
pub(super) struct List {
    screen: Screen,
    header: Vec<&'static str>,
    rows: Vec<Vec<Shown>>,
    right: Vec<&'static str>,
}

impl List {
    /// With these columns.
    pub(super) fn new(header: impl Into<Vec<&'static str>>) -> Self {
        Self::on(Screen::of_stdout(), header)
    }

    /// Keys and values, or other rows that need no header.
    pub(super) fn plain() -> Self {
        Self::new([])
    }

    fn on(screen: Screen, header: impl Into<Vec<&'static str>>) -> Self {
        Self {
            screen,
            header: header.into(),
            rows: Vec::new(),
            right: Vec::new(),
        }
    }

    /// Numbers of these columns stand at the right.
    pub(super) fn align_right(&mut self, columns: &[&'static str]) {
        self.right = columns.to_vec();
    }

    pub(super) fn row<T: Into<Shown>>(&mut self, row: impl IntoIterator<Item = T>) {
        self.rows.push(row.into_iter().map(Into::into).collect());
    }

    /// Its lines, without one at the end.
    pub(super) fn text(&self) -> String {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        match self.screen.columns {
            Some(columns) => {
                table.set_content_arrangement(ContentArrangement::Dynamic);
                // A column after the last is filled up with spaces, which are trimmed.
                table.set_width(columns.saturating_add(1));
            }
            None => {
                table.set_content_arrangement(ContentArrangement::Disabled);
            }
        }
        let shown: Vec<usize> = (0..self.columns())
            .filter(|at| self.says_something(*at))
            .collect();
        if !self.header.is_empty() {
            table.set_header(shown.iter().filter_map(|at| self.header.get(*at)));
        }
        for row in &self.rows {
            table.add_row(shown.iter().map(|at| self.cell(row.get(*at))));
        }
        for (place, at) in shown.iter().enumerate() {
            if self
                .header
                .get(*at)
                .is_some_and(|name| self.right.contains(name))
                && let Some(column) = table.column_mut(place)
            {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        in_colours(&table.trim_fmt())
    }

    fn columns(&self) -> usize {
        let rows = self.rows.iter().map(Vec::len);
        rows.chain([self.header.len()]).max().unwrap_or_default()
    }

    /// Whoever reads a pipe counts on every column.
    fn says_something(&self, at: usize) -> bool {
        !self.screen.is_terminal()
            || self.rows.is_empty()
            || self
                .rows
                .iter()
                .any(|row| row.get(at).is_some_and(|it| !it.says_nothing))
    }

    fn cell(&self, shown: Option<&Shown>) -> String {
        let Some(shown) = shown else {
            return String::new();
        };
        let text = &shown.text;
        let colour = shown.colour.filter(|_| self.screen.colours);
        let place = colour.and_then(|colour| Colour::ALL.iter().position(|one| *one == colour));
        match place {
            Some(place) => format!("{}{text}{END}", BEGIN[place]),
            None => text.clone(),
        }
    }
}

/// Puts colours where they were marked. A text that was cut into two lines is in colour in the first.
fn in_colours(text: &str) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        let mut coloured = String::with_capacity(line.len());
        let mut open = false;
        for character in line.chars() {
            match BEGIN.iter().position(|mark| *mark == character) {
                Some(place) => {
                    coloured += Colour::ALL[place].begin();
                    open = true;
                }
                None if character != END => coloured.push(character),
                None if open => {
                    coloured += Colour::END;
                    open = false;
                }
                None => {}
            }
        }
        if open {
            coloured += Colour::END;
        }
        lines.push(coloured);
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIPE: Screen = Screen {
        columns: None,
        colours: false,
    };

    const NARROW: Screen = Screen {
        columns: Some(30),
        colours: false,
    };

    fn filled(screen: Screen) -> List {
        let mut list = List::on(screen, ["id", "state", "tags", "why"]);
        let why = "it was cancelled by somebody";
        for state in ["succeeded", "failed"] {
            list.row([
                Shown::from("7".to_owned()),
                Shown::in_colour(state, Colour::of_state(state)),
                Shown::nothing("-"),
                why.to_owned().into(),
            ]);
        }
        list
    }

    #[test]
    fn on_a_pipe_a_row_is_a_line_with_all_columns_and_without_colours() {
        let text = filled(PIPE).text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        for line in &lines[1..] {
            assert!(line.contains(" - ") && line.ends_with("it was cancelled by somebody"));
        }
        assert!(!text.contains('\x1b'), "{text:?}");
    }

    #[test]
    fn on_a_terminal_it_fits_and_leaves_out_columns_that_say_nothing() {
        let text = filled(NARROW).text();
        for line in text.lines() {
            assert!(line.chars().count() <= 30, "{text}");
        }
        assert!(!text.contains("tags") && !text.contains('-'), "{text}");
        for part in ["succeeded", "failed", "somebody"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn states_have_colours_where_there_are_any() {
        let screen = Screen {
            colours: true,
            ..NARROW
        };
        let text = filled(screen).text();
        assert!(text.contains("\x1b[32msucceeded\x1b[0m"), "{text:?}");
        assert!(text.contains("\x1b[31mfailed\x1b[0m"), "{text:?}");
        let plain = filled(NARROW).text();
        let colours = Colour::ALL.map(Colour::begin);
        let mut without = text.replace(Colour::END, "");
        for colour in colours {
            without = without.replace(colour, "");
        }
        assert_eq!(without, plain, "they take up no room");
    }

    #[test]
    fn numbers_can_stand_at_the_right() {
        let mut list = List::on(PIPE, ["n", "x"]);
        list.align_right(&["n"]);
        list.row(["7".to_owned(), "a".to_owned()]);
        list.row(["1000".to_owned(), "b".to_owned()]);
        assert_eq!(list.text(), "    n  x\n    7  a\n 1000  b");
    }
}
