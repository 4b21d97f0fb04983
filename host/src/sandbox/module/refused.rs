//! Why a file does not become a module.

/// How a WebAssembly file starts: the magic number, then what kind it is.
const MODULE_HEADER: &[u8] = b"\0asm\x01\0\0\0";
const COMPONENT_HEADER: &[u8] = b"\0asm\x0d\0\x01\0";

/// Why there is no module; a sentence that starts with "it …" for whoever put the file there.
#[derive(Debug)]
pub(in crate::sandbox) enum NotLoaded {
    /// Because of what the file contains: the same contents are refused whenever they come.
    Contents(String),
    /// Because of the machine, at this moment.
    Circumstances(String),
    /// It has ended its compiler, and is to be tried once more, behind all others.
    Again,
}

impl From<String> for NotLoaded {
    fn from(why: String) -> Self {
        Self::Contents(why)
    }
}

/// Refuses what cannot be compiled at its first bytes.
pub(in crate::sandbox) fn check_kind(bytes: &[u8]) -> Result<(), String> {
    if bytes.is_empty() {
        return Err("it is empty; has it been written completely?".into());
    }
    // All compiled code of wasmtime is ELF.
    if bytes.starts_with(b"\x7fELF") {
        return Err(
            "it is compiled code, which cannot be trusted; put the .wasm there that it was made of"
                .into(),
        );
    }
    if is_component(bytes) || bytes.starts_with(MODULE_HEADER) {
        return Ok(());
    }
    if bytes.starts_with(b"\0asm") {
        return Err(
            "it is cut off, or of a version of WebAssembly that this host does not know".into(),
        );
    }
    Err(
        "it is not WebAssembly; a handler module is a component, or a core module of wasm32-wasip1"
            .into(),
    )
}

/// A component as it is; else it is a core module of wasm32-wasip1.
pub(in crate::sandbox) fn is_component(bytes: &[u8]) -> bool {
    bytes.starts_with(COMPONENT_HEADER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_webassembly_is_named_for_what_it_is() {
        for (bytes, word) in [
            (&b""[..], "empty"),
            (b"hello", "not WebAssembly"),
            (b"(module)", "not WebAssembly"),
            (b"\x7fELF\x02\x01\x01", "compiled code"),
            (b"\0asm", "cut off"),
            (b"\0asm\x02\0\0\0", "cut off"),
        ] {
            let why = check_kind(bytes).expect_err("must be refused");
            assert!(why.contains(word), "{bytes:?}: {why}");
        }
    }
}
