//! Parses regular expressions of ECMA-262 with the flag `u`, the dialect of JSON Schema, for an engine with linear run
//! time.
//!
//! Strings do not contain lone surrogates, so a pattern that requires one matches nothing. Syntax that the standard
//! does not allow is rejected, even if other dialects define a (different) meaning for it.

use std::collections::HashMap;

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Look, Repetition};

/// The maximum nesting of groups.
const NEST_MAX: u32 = 50;

/// Code points, both ends included.
type Range = (u32, u32);

const LAST: u32 = 0x10_FFFF;

const DIGITS: &[Range] = &[(0x30, 0x39)];

const WORDS: &[Range] = &[(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)];

/// WhiteSpace and LineTerminator of ECMA-262: includes U+FEFF, excludes U+0085.
const SPACES: &[Range] = &[
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
];

const LINE_ENDS: &[Range] = &[(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)];

/// Parses a pattern.
///
/// # Errors
/// Syntax that is not in the standard, or that cannot be matched in linear time.
pub(super) fn parse(written: &str) -> Result<Hir, String> {
    let mut parser = Parser {
        written: written.chars().collect(),
        at: 0,
        nest: 0,
        properties: HashMap::new(),
    };
    let pattern = parser.alternatives()?;
    match parser.peek() {
        None => Ok(pattern),
        Some(_) => Err(not_allowed("an unmatched )")),
    }
}

struct Parser {
    written: Vec<char>,
    at: usize,
    nest: u32,
    /// The properties that have been looked up.
    properties: HashMap<String, ClassUnicode>,
}

/// A character, or a set of characters.
enum Escaped {
    One(u32),
    Set(ClassUnicode),
}

impl Escaped {
    fn set(self) -> ClassUnicode {
        match self {
            Self::One(character) => set(&[(character, character)]),
            Self::Set(set) => set,
        }
    }
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.written.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek();
        self.at += usize::from(next.is_some());
        next
    }

    /// Skips this text if it comes next; false if it does not.
    fn skip(&mut self, text: &str) -> bool {
        let rest = &self.written[self.at..];
        let length = text.chars().count();
        let is_next = rest.len() >= length && text.chars().eq(rest[..length].iter().copied());
        if is_next {
            self.at += length;
        }
        is_next
    }

    /// Parses up to a closing bracket, or the end.
    fn alternatives(&mut self) -> Result<Hir, String> {
        let mut alternatives = vec![self.sequence()?];
        while self.skip("|") {
            alternatives.push(self.sequence()?);
        }
        Ok(Hir::alternation(alternatives))
    }

    fn sequence(&mut self) -> Result<Hir, String> {
        let mut terms = Vec::new();
        while let Some(next) = self.peek() {
            if matches!(next, '|' | ')') {
                break;
            }
            self.at += 1;
            let look = match next {
                '^' => Some(Look::Start),
                '$' => Some(Look::End),
                '\\' if self.skip("b") => Some(Look::WordAscii),
                '\\' if self.skip("B") => Some(Look::WordAsciiNegate),
                _ => None,
            };
            terms.push(match look {
                // An assertion cannot be repeated; a quantifier after it is rejected when it is read as the next term.
                Some(look) => Hir::look(look),
                None => {
                    let atom = self.atom(next)?;
                    self.repeated(atom)?
                }
            });
        }
        Ok(Hir::concat(terms))
    }

    fn atom(&mut self, first: char) -> Result<Hir, String> {
        match first {
            '.' => Ok(one_of(negated(set(LINE_ENDS)))),
            '(' => self.group(),
            '[' => Ok(one_of(self.class()?)),
            '\\' => Ok(one_of(self.escape(false)?.set())),
            '*' | '+' | '?' | '{' => Err(not_allowed(&format!("a {first} with nothing to repeat"))),
            ']' | '}' => Err(not_allowed(&format!("an unmatched {first}"))),
            other => Ok(one_of(set(&[(other.into(), other.into())]))),
        }
    }

    fn group(&mut self) -> Result<Hir, String> {
        for look in ["?=", "?!", "?<=", "?<!"] {
            if self.skip(look) {
                return Err(format!(
                    "patterns are matched in linear time, without lookaround like ({look}"
                ));
            }
        }
        if self.skip("?<") {
            self.name()?;
        } else if !self.skip("?:") && self.peek() == Some('?') {
            return Err(not_allowed("a group other than (…), (?:…) and (?<name>…)"));
        }
        self.nest += 1;
        if self.nest > NEST_MAX {
            return Err(format!("groups are nested deeper than {NEST_MAX} levels"));
        }
        let within = self.alternatives()?;
        self.nest -= 1;
        match self.skip(")") {
            true => Ok(within),
            false => Err(not_allowed("a ( that is not closed")),
        }
    }

    /// The name of a group, which nothing can refer to.
    fn name(&mut self) -> Result<(), String> {
        let start = self.at;
        while let Some(character) = self.next() {
            let first = self.at == start + 1;
            match character {
                '>' if !first => return Ok(()),
                '$' | '_' => {}
                letter if letter.is_alphabetic() => {}
                other if other.is_alphanumeric() && !first => {}
                _ => break,
            }
        }
        Err(not_allowed("a (?< without a name"))
    }

    fn repeated(&mut self, sub: Hir) -> Result<Hir, String> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                self.at += 1;
                let min = self.count()?;
                let max = match self.skip(",") {
                    false => Some(min),
                    true if self.peek() == Some('}') => None,
                    true => Some(self.count()?),
                };
                if self.peek() != Some('}') {
                    return Err(not_allowed("a { without {n}, {n,} or {n,m}"));
                }
                if max.is_some_and(|max| max < min) {
                    return Err(not_allowed("a {n,m} whose m is less than n"));
                }
                (min, max)
            }
            Some(_) | None => return Ok(sub),
        };
        self.at += 1;
        // Greediness makes no difference to whether a pattern matches.
        self.skip("?");
        Ok(Hir::repetition(Repetition {
            min,
            max,
            greedy: true,
            sub: Box::new(sub),
        }))
    }

    fn count(&mut self) -> Result<u32, String> {
        let start = self.at;
        let mut count: u32 = 0;
        while let Some(digit) = self.peek().and_then(|next| next.to_digit(10)) {
            self.at += 1;
            // A count that saturates is too large for the engine, which reports it.
            count = count.saturating_mul(10).saturating_add(digit);
        }
        match self.at > start {
            true => Ok(count),
            false => Err(not_allowed("a { without {n}, {n,} or {n,m}")),
        }
    }

    /// Parses a class, after the opening bracket.
    fn class(&mut self) -> Result<ClassUnicode, String> {
        let negative = self.skip("^");
        let mut all: Vec<ClassUnicodeRange> = Vec::new();
        // Each set is added only once: letters have hundreds of ranges.
        let mut sets: Vec<ClassUnicode> = Vec::new();
        while !self.skip("]") {
            let from = self.member()?;
            let hyphen = self.peek() == Some('-');
            if !hyphen || matches!(self.written.get(self.at + 1), None | Some(']')) {
                match from {
                    Escaped::One(character) => all.extend(set(&[(character, character)]).ranges()),
                    Escaped::Set(set) if sets.contains(&set) => {}
                    Escaped::Set(set) => sets.push(set),
                }
                continue;
            }
            self.at += 1;
            match (from, self.member()?) {
                (Escaped::One(from), Escaped::One(to)) if from <= to => {
                    all.extend(set(&[(from, to)]).ranges());
                }
                (Escaped::One(_), Escaped::One(_)) => {
                    return Err(not_allowed(
                        "a range in brackets that ends before it starts",
                    ));
                }
                (Escaped::Set(_), _) | (_, Escaped::Set(_)) => {
                    return Err(not_allowed(
                        "a range in brackets with a class like \\w at one end (write \\- for a hyphen)",
                    ));
                }
            }
        }
        all.extend(sets.iter().flat_map(ClassUnicode::ranges));
        let all = ClassUnicode::new(all);
        Ok(match negative {
            true => negated(all),
            false => all,
        })
    }

    fn member(&mut self) -> Result<Escaped, String> {
        match self.next() {
            None => Err(not_allowed("a [ that is not closed")),
            Some('\\') => self.escape(true),
            Some(other) => Ok(Escaped::One(other.into())),
        }
    }

    /// Parses an escape, after the backslash.
    fn escape(&mut self, in_class: bool) -> Result<Escaped, String> {
        let Some(escaped) = self.next() else {
            return Err(not_allowed("a \\ at its end"));
        };
        let set = match escaped {
            'd' => set(DIGITS),
            'D' => negated(set(DIGITS)),
            'w' => set(WORDS),
            'W' => negated(set(WORDS)),
            's' => set(SPACES),
            'S' => negated(set(SPACES)),
            'p' => self.property()?,
            'P' => negated(self.property()?),
            _ => return self.character(escaped, in_class).map(Escaped::One),
        };
        Ok(Escaped::Set(set))
    }

    fn character(&mut self, escaped: char, in_class: bool) -> Result<u32, String> {
        match escaped {
            't' => Ok(0x09),
            'n' => Ok(0x0A),
            'v' => Ok(0x0B),
            'f' => Ok(0x0C),
            'r' => Ok(0x0D),
            'b' if in_class => Ok(0x08),
            '-' if in_class => Ok('-'.into()),
            '0' if !self.peek().is_some_and(|next| next.is_ascii_digit()) => Ok(0),
            'c' => match self.next() {
                Some(letter) if letter.is_ascii_alphabetic() => Ok(u32::from(letter) % 32),
                Some(_) | None => Err(not_allowed("a \\c without a letter")),
            },
            'x' => self
                .hexadecimal(2)
                .ok_or_else(|| not_allowed("a \\x without two hexadecimal digits")),
            'u' => self.unicode(),
            '1'..='9' | 'k' if !in_class => Err(format!(
                "patterns are matched in linear time, without backreferences like \\{escaped}"
            )),
            '^' | '$' | '\\' | '.' | '*' | '+' | '?' | '(' | ')' | '[' | ']' | '{' | '}' | '|'
            | '/' => Ok(escaped.into()),
            other => Err(not_allowed(&format!("the escape \\{other}"))),
        }
    }

    fn hexadecimal(&mut self, digits: usize) -> Option<u32> {
        let digits = self.written.get(self.at..self.at + digits)?;
        let mut number = 0;
        for digit in digits {
            number = number * 16 + digit.to_digit(16)?;
        }
        self.at += digits.len();
        Some(number)
    }

    /// Parses the rest of `\u`: four digits, a surrogate pair, or digits in braces.
    fn unicode(&mut self) -> Result<u32, String> {
        let not_allowed =
            || not_allowed("a \\u without four hexadecimal digits, or a code point in braces");
        if self.skip("{") {
            let mut number: u32 = 0;
            let start = self.at;
            while let Some(digit) = self.peek().and_then(|next| next.to_digit(16)) {
                self.at += 1;
                number = number.saturating_mul(16).saturating_add(digit);
            }
            let any = self.at > start;
            return match any && number <= LAST && self.skip("}") {
                true => Ok(number),
                false => Err(not_allowed()),
            };
        }
        let first = self.hexadecimal(4).ok_or_else(not_allowed)?;
        let behind = self.at;
        if (0xD800..0xDC00).contains(&first) && self.skip("\\u") {
            match self.hexadecimal(4) {
                Some(second @ 0xDC00..0xE000) => {
                    return Ok(0x1_0000 + ((first - 0xD800) << 10) + (second - 0xDC00));
                }
                Some(_) | None => self.at = behind,
            }
        }
        Ok(first)
    }

    /// Parses the rest of `\p`: a Unicode property in braces.
    fn property(&mut self) -> Result<ClassUnicode, String> {
        let start = self.at;
        let is_name = |next: char| next.is_ascii_alphanumeric() || matches!(next, '_' | '=');
        let mut name = String::new();
        if self.skip("{") {
            while let Some(next) = self.peek().filter(|next| is_name(*next)) {
                self.at += 1;
                name.push(next);
            }
            if self.skip("}") {
                if let Some(known) = self.properties.get(&name) {
                    return Ok(known.clone());
                }
                if let Ok(class) = regex_syntax::parse(&format!("\\p{{{name}}}")) {
                    let class = members(&class);
                    self.properties.insert(name, class.clone());
                    return Ok(class);
                }
            }
        }
        let written: String = self.written[start..].iter().take(40).collect();
        Err(not_allowed(&format!(
            "a \\p without a known property of Unicode: {written}"
        )))
    }
}

/// The characters of a parsed class.
fn members(class: &Hir) -> ClassUnicode {
    match class.kind() {
        HirKind::Class(Class::Unicode(class)) => class.clone(),
        // A class with a single character is parsed as a literal.
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).unwrap_or_default();
            ClassUnicode::new(text.chars().map(|one| ClassUnicodeRange::new(one, one)))
        }
        _ => ClassUnicode::empty(),
    }
}

/// The set of these ranges, without surrogates, which do not occur in strings.
fn set(ranges: &[Range]) -> ClassUnicode {
    let whole = ranges.iter().filter_map(|(from, to)| {
        let from = char::from_u32(*from).unwrap_or('\u{E000}');
        let to = char::from_u32(*to).unwrap_or('\u{D7FF}');
        (from <= to).then(|| ClassUnicodeRange::new(from, to))
    });
    ClassUnicode::new(whole)
}

/// The complement. `ClassUnicode::negate` would include U+D7FF and U+E000 if one range of the set ends just before the
/// surrogates, and the next one starts just after them.
fn negated(set_of: ClassUnicode) -> ClassUnicode {
    let mut others = Vec::new();
    let mut next = 0;
    for range in set_of.ranges() {
        let (from, to) = (u32::from(range.start()), u32::from(range.end()));
        if next < from {
            others.push((next, from - 1));
        }
        next = to + 1;
    }
    if next <= LAST {
        others.push((next, LAST));
    }
    set(&others)
}

fn one_of(set: ClassUnicode) -> Hir {
    Hir::class(Class::Unicode(set))
}

fn not_allowed(syntax: &str) -> String {
    format!("ECMA-262 with the flag u does not allow {syntax}")
}
