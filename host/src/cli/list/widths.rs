//! The widths of a table's columns on a terminal.

/// A comfortable width for a column of text.
const COMFORTABLE: usize = 24;

/// Text up to this width is not wrapped: numbers, times, short names.
const SHORT: usize = 12;

/// No column is narrowed below this width.
const CUT_MIN: usize = 8;

/// The widths that one column needs, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Need {
    /// Its longest line.
    line: usize,
    /// Its longest word.
    word: usize,
}

impl Need {
    pub(super) fn for_cells<'a>(cells: impl Iterator<Item = &'a str>) -> Self {
        let longest = |parts: &mut dyn Iterator<Item = &'a str>| {
            parts.map(|part| part.chars().count()).max().unwrap_or(0)
        };
        let cells: Vec<&str> = cells.collect();
        Self {
            line: longest(&mut cells.iter().flat_map(|text| text.lines())),
            word: longest(&mut cells.iter().flat_map(|text| text.split_whitespace())),
        }
    }

    /// The width at which it reads well, without a broken word.
    pub(super) fn comfortable(self) -> usize {
        self.word.max(self.line.min(COMFORTABLE))
    }

    /// The width below which a word breaks or a short text wraps.
    fn least(self) -> usize {
        match self.line {
            ..=SHORT => self.line,
            _ => self.word.max(SHORT),
        }
    }
}

/// The widths of columns with these needs, together at most `available` if possible. Each column gets its longest word,
/// and the rest goes to the column that lacks the most. If words must be broken, the widest column is narrowed first.
pub(super) fn widths(needs: &[Need], available: usize) -> Vec<usize> {
    let mut widths: Vec<usize> = needs.iter().map(|need| need.least()).collect();
    let mut used: usize = widths.iter().sum();
    while used > available
        && let Some(widest) = widths.iter_mut().max()
        && *widest > CUT_MIN
    {
        *widest -= 1;
        used -= 1;
    }
    while used < available
        && let Some((width, lacking)) = widths
            .iter_mut()
            .zip(needs)
            .map(|(width, need)| {
                let lacking = need.line.saturating_sub(*width);
                (width, lacking)
            })
            .max_by_key(|(_, lacking)| *lacking)
        && lacking > 0
    {
        *width += 1;
        used += 1;
    }
    widths
}

/// The text with each longer word truncated, marked by `…`.
pub(super) fn cut(text: &str, width: usize) -> String {
    let word = |word: &str| match word.chars().count() > width {
        true => {
            let kept = word.chars().take(width.saturating_sub(1));
            kept.chain(['…']).collect()
        }
        false => word.to_owned(),
    };
    let line = |line: &str| line.split(' ').map(word).collect::<Vec<_>>().join(" ");
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(text: &str) -> Need {
        Need::for_cells([text].into_iter())
    }

    #[test]
    fn words_stay_whole_and_the_longest_text_gets_the_rest() {
        let needs = [
            need("a.handler.with-a-long-name"),
            need("3 min ago"),
            need("some words that may stand in several lines"),
        ];
        assert_eq!(widths(&needs, 60), [26, 9, 25]);
        assert_eq!(widths(&needs, 1000), [26, 9, 42]);
    }

    #[test]
    fn the_widest_column_is_cut_first() {
        let needs = [need("a.handler.with-a-long-name"), need("12")];
        assert_eq!(widths(&needs, 20), [18, 2]);
        assert_eq!(
            cut("a.handler.with-a-long-name b", 18),
            "a.handler.with-a-… b"
        );
        assert_eq!(cut("a\nbc", 2), "a\nbc");
    }
}
