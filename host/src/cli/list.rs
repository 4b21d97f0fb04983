//! Lists and tables for people: as wide as the terminal at most, with what matters in colour and names whole. On a pipe each row is
//! one line.

mod widths;

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};

use self::widths::{Need, cut, widths};
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
    expendable: Vec<&'static str>,
}

/// Spaces on both sides of a cell.
const PADDING: usize = 2;

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
            expendable: Vec::new(),
        }
    }

    /// Numbers of these columns stand at the right.
    pub(super) fn align_right(&mut self, columns: &[&'static str]) {
        self.right = columns.to_vec();
    }

    /// On a terminal that is too narrow for all columns these are left out, the first one first.
    pub(super) fn expendable(&mut self, columns: &[&'static str]) {
        self.expendable = columns.to_vec();
    }

    pub(super) fn row<T: Into<Shown>>(&mut self, row: impl IntoIterator<Item = T>) {
        self.rows.push(row.into_iter().map(Into::into).collect());
    }

    /// Prints it; where there are no rows, only `nothing`, and that on standard error.
    pub(super) fn print(&self, nothing: &str) {
        match self.rows.is_empty() {
            true => eprintln!("rouse: {nothing}"),
            false => println!("{}", self.text()),
        }
    }

    /// Its lines, without one at the end.
    pub(super) fn text(&self) -> String {
        let mut shown: Vec<usize> = (0..self.columns())
            .filter(|at| self.says_something(*at))
            .collect();
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let widths = match self.screen.columns {
            Some(columns) => {
                // A column after the last is filled up with spaces, which are trimmed.
                let columns = usize::from(columns) + 1;
                self.leave_out(&mut shown, columns);
                let needs: Vec<Need> = shown.iter().map(|at| self.need(*at)).collect();
                table.set_content_arrangement(ContentArrangement::Dynamic);
                table.set_width(u16::try_from(columns).unwrap_or(u16::MAX));
                widths(&needs, room(columns, shown.len()))
            }
            None => {
                table.set_content_arrangement(ContentArrangement::Disabled);
                Vec::new()
            }
        };
        if !self.header.is_empty() {
            table.set_header(shown.iter().filter_map(|at| self.header.get(*at)));
        }
        for row in &self.rows {
            let cells = shown.iter().enumerate();
            table.add_row(
                cells.map(|(place, at)| self.cell(row.get(*at), widths.get(place).copied())),
            );
        }
        for (column, width) in table.column_iter_mut().zip(&widths) {
            let width = u16::try_from(width + PADDING).unwrap_or(u16::MAX);
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(width)));
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

    /// Leaves columns out until what is left can be read.
    fn leave_out(&self, shown: &mut Vec<usize>, columns: usize) {
        for name in &self.expendable {
            let needed: usize = shown.iter().map(|at| self.need(*at).comfortable()).sum();
            if needed <= room(columns, shown.len()) {
                return;
            }
            shown.retain(|at| self.header.get(*at) != Some(name));
        }
    }

    fn need(&self, at: usize) -> Need {
        let cells = self.rows.iter().filter_map(|row| row.get(at));
        let cells = cells.map(|shown| shown.text.as_str());
        Need::of(cells.chain(self.header.get(at).copied()))
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

    fn cell(&self, shown: Option<&Shown>, width: Option<usize>) -> String {
        let Some(shown) = shown else {
            return String::new();
        };
        // Keys and values are read by themselves, and are never cut.
        let text = match width.filter(|_| !self.header.is_empty()) {
            Some(width) => cut(&shown.text, width),
            None => shown.text.clone(),
        };
        let colour = shown.colour.filter(|_| self.screen.colours);
        let place = colour.and_then(|colour| Colour::ALL.iter().position(|one| *one == colour));
        match place {
            Some(place) => format!("{}{text}{END}", BEGIN[place]),
            None => text,
        }
    }
}

/// What cells may take up of so many columns of a terminal.
fn room(columns: usize, cells: usize) -> usize {
    columns.saturating_sub(cells * PADDING)
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
                    coloured += Colour::ALL[place].start();
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
    fn a_narrow_terminal_loses_columns_before_names_and_a_pipe_loses_nothing() {
        let name = "a.handler.with-a-long-name";
        let list = |columns: Option<u16>| {
            let screen = Screen { columns, ..PIPE };
            let mut list = List::on(screen, ["id", "handler", "tenant", "worker"]);
            list.expendable(&["tenant", "worker"]);
            list.row(["7", name, "somebody", "w-0123456789abcdef"].map(str::to_owned));
            list.text()
        };
        assert_eq!(list(None).lines().nth(1), list(Some(80)).lines().nth(1));
        let narrow = list(Some(56));
        assert!(!narrow.contains("tenant"), "{narrow}");
        assert!(
            narrow.contains(&format!("{name}  w-0123456789abcdef")),
            "{narrow}"
        );
        let narrower = list(Some(32));
        assert_eq!(narrower, format!(" id  handler\n 7   {name}"));
        assert_eq!(list(Some(20)).lines().nth(1), Some(" 7   a.handler.with…"));
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
        let colours = Colour::ALL.map(Colour::start);
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
