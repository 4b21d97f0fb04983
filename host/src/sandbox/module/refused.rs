//! Why a file does not become a module.

/// The start of a WebAssembly file: the magic number, then its kind.
const MODULE_HEADER: &[u8] = b"\0asm\x01\0\0\0";
const COMPONENT_HEADER: &[u8] = b"\0asm\x0d\0\x01\0";

/// Why a file does not become a module: a sentence that starts with "it …" or "its …", for the user who put the file
/// there.
#[derive(Debug)]
pub(in crate::sandbox) enum NotLoaded {
    /// Because of the file's contents: the same contents are always refused.
    Contents(String),
    /// Because of the state of the machine, which may change.
    Transient(String),
    /// It exhausted its compiler's limits, or waited while it described itself, and has to be tried once more, after all
    /// others.
    Retry,
}

impl From<String> for NotLoaded {
    fn from(why: String) -> Self {
        Self::Contents(why)
    }
}

/// Refuses, by its first bytes, a file that cannot be compiled.
pub(in crate::sandbox) fn check_kind(bytes: &[u8]) -> Result<(), String> {
    if bytes.is_empty() {
        return Err("it is empty; check that it was written completely".into());
    }
    // Code that wasmtime has compiled is ELF.
    if bytes.starts_with(b"\x7fELF") {
        return Err(
            "it is compiled code, which cannot be trusted; use the .wasm that it was compiled from"
                .into(),
        );
    }
    if is_component(bytes) || bytes.starts_with(MODULE_HEADER) {
        return Ok(());
    }
    if bytes.starts_with(b"\0asm") {
        return Err(
            "it is truncated, or of a WebAssembly version that this host does not know".into(),
        );
    }
    Err(
        "it is not WebAssembly; a handler module is a component, or a core module of wasm32-wasip1"
            .into(),
    )
}

/// True for a component; otherwise it is a core module of wasm32-wasip1.
pub(in crate::sandbox) fn is_component(bytes: &[u8]) -> bool {
    bytes.starts_with(COMPONENT_HEADER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_the_kind_of_a_file_that_is_not_webassembly() {
        for (bytes, word) in [
            (&b""[..], "empty"),
            (b"hello", "not WebAssembly"),
            (b"(module)", "not WebAssembly"),
            (b"\x7fELF\x02\x01\x01", "compiled code"),
            (b"\0asm", "truncated"),
            (b"\0asm\x02\0\0\0", "truncated"),
        ] {
            let why = check_kind(bytes).expect_err("must be refused");
            assert!(why.contains(word), "{bytes:?}: {why}");
        }
    }
}
