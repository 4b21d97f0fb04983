//! Human-readable lists and tables. On a terminal they fit its width, keep names whole and colour what matters; on a
//! pipe each row is one line.

mod widths;

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};

use self::widths::{Need, cut, widths};
use super::screen::{Colour, Screen};

/// Marks for the starts of colours, in the order of [`Colour::ALL`], and for their end, while the table is laid out.
/// They have no width, and no other text contains them: [`sanitize`](crate::sanitize) escapes them.
const START: [char; 4] = ['\u{2066}', '\u{2067}', '\u{2068}', '\u{61c}'];
const END: char = '\u{2069}';

/// A cell of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Shown {
    text: String,
    colour: Option<Colour>,
    is_placeholder: bool,
}

impl Shown {
    /// A cell in this colour, if colours are on.
    pub(super) fn in_colour(text: impl Into<String>, colour: Option<Colour>) -> Self {
        Self {
            colour,
            ..Self::from(text.into())
        }
    }

    /// A placeholder. A column that contains only placeholders is left out on a terminal.
    pub(super) fn nothing(text: impl Into<String>) -> Self {
        Self {
            is_placeholder: true,
            ..Self::from(text.into())
        }
    }
}

impl From<String> for Shown {
    fn from(text: String) -> Self {
        Self {
            is_placeholder: text.is_empty(),
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

/// The number of spaces around a cell, both sides together.
const PADDING: usize = 2;

impl List {
    /// A list with these columns.
    pub(super) fn new(header: impl Into<Vec<&'static str>>) -> Self {
        Self::on(Screen::from_stdout(), header)
    }

    /// A list without a header, for keys and values.
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

    /// Right-aligns the numbers of these columns.
    pub(super) fn align_right(&mut self, columns: &[&'static str]) {
        self.right = columns.to_vec();
    }

    /// Names the columns that a narrow terminal leaves out, in this order.
    pub(super) fn expendable(&mut self, columns: &[&'static str]) {
        self.expendable = columns.to_vec();
    }

    pub(super) fn row<T: Into<Shown>>(&mut self, row: impl IntoIterator<Item = T>) {
        self.rows.push(row.into_iter().map(Into::into).collect());
    }

    /// Prints the list; without rows, prints `nothing` to standard error instead.
    pub(super) fn print(&self, nothing: &str) {
        match self.rows.is_empty() {
            true => eprintln!("rouse: {nothing}"),
            false => println!("{}", self.text()),
        }
    }

    /// Its lines, without a final line break.
    pub(super) fn text(&self) -> String {
        let mut shown: Vec<usize> = (0..self.columns())
            .filter(|at| self.has_content(*at))
            .collect();
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let widths = match self.screen.columns {
            Some(columns) => {
                // The last column is padded with spaces, which are trimmed.
                let columns = usize::from(columns) + 1;
                self.leave_out(&mut shown, columns);
                let needs: Vec<Need> = shown.iter().map(|at| self.need(*at)).collect();
                table.set_content_arrangement(ContentArrangement::Dynamic);
                table.set_width(u16::try_from(columns).unwrap_or(u16::MAX));
                widths(&needs, available(columns, shown.len()))
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
                cells.map(|(index, at)| self.cell(row.get(*at), widths.get(index).copied())),
            );
        }
        for (column, width) in table.column_iter_mut().zip(&widths) {
            let width = u16::try_from(width + PADDING).unwrap_or(u16::MAX);
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(width)));
        }
        for (index, at) in shown.iter().enumerate() {
            if self
                .header
                .get(*at)
                .is_some_and(|name| self.right.contains(name))
                && let Some(column) = table.column_mut(index)
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

    /// Leaves columns out until the others fit.
    fn leave_out(&self, shown: &mut Vec<usize>, columns: usize) {
        for name in &self.expendable {
            let needed: usize = shown.iter().map(|at| self.need(*at).comfortable()).sum();
            if needed <= available(columns, shown.len()) {
                return;
            }
            shown.retain(|at| self.header.get(*at) != Some(name));
        }
    }

    fn need(&self, at: usize) -> Need {
        let cells = self.rows.iter().filter_map(|row| row.get(at));
        let cells = cells.map(|shown| shown.text.as_str());
        Need::for_cells(cells.chain(self.header.get(at).copied()))
    }

    /// False for a column that a terminal leaves out. Readers of a pipe rely on every column.
    fn has_content(&self, at: usize) -> bool {
        !self.screen.is_terminal()
            || self.rows.is_empty()
            || self
                .rows
                .iter()
                .any(|row| row.get(at).is_some_and(|shown| !shown.is_placeholder))
    }

    fn cell(&self, shown: Option<&Shown>, width: Option<usize>) -> String {
        let Some(shown) = shown else {
            return String::new();
        };
        // Keys and values are never truncated.
        let text = match width.filter(|_| !self.header.is_empty()) {
            Some(width) => cut(&shown.text, width),
            None => shown.text.clone(),
        };
        let colour = shown.colour.filter(|_| self.screen.colours);
        let index = colour.and_then(|colour| Colour::ALL.iter().position(|known| *known == colour));
        match index {
            Some(number) => format!("{}{text}{END}", START[number]),
            None => text,
        }
    }
}

/// The width of a terminal that is available for cells.
fn available(columns: usize, cells: usize) -> usize {
    columns.saturating_sub(cells * PADDING)
}

/// Replaces marks with colours. Text that was wrapped is coloured only on its first line.
fn in_colours(text: &str) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        let mut coloured = String::with_capacity(line.len());
        let mut open = false;
        for character in line.chars() {
            match START.iter().position(|mark| *mark == character) {
                Some(index) => {
                    coloured += Colour::ALL[index].start();
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
                Shown::in_colour(state, Colour::for_state(state)),
                Shown::nothing("-"),
                why.to_owned().into(),
            ]);
        }
        list
    }

    #[test]
    fn a_pipe_gets_one_line_a_row_with_all_columns_and_without_colours() {
        let text = filled(PIPE).text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        for line in &lines[1..] {
            assert!(line.contains(" - ") && line.ends_with("it was cancelled by somebody"));
        }
        assert!(!text.contains('\x1b'), "{text:?}");
    }

    #[test]
    fn a_terminal_gets_a_list_that_fits_without_columns_of_placeholders() {
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
    fn a_narrow_terminal_drops_columns_before_it_cuts_names() {
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
    fn states_are_coloured_if_colours_are_on() {
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
        assert_eq!(without, plain, "marks have no width");
    }

    #[test]
    fn numbers_can_be_right_aligned() {
        let mut list = List::on(PIPE, ["n", "x"]);
        list.align_right(&["n"]);
        list.row(["7".to_owned(), "a".to_owned()]);
        list.row(["1000".to_owned(), "b".to_owned()]);
        assert_eq!(list.text(), "    n  x\n    7  a\n 1000  b");
    }
}
