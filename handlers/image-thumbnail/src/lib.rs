//! Makes a thumbnail of a picture.

mod picture;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use rouse_sdk::{Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use picture::{Format, Size};

/// The payload of `image.thumbnail`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The picture, a PNG or JPEG in a granted directory.
    pub path: String,
    /// The thumbnail, in a directory granted for writing. The name ends in `.jpg`, `.jpeg` or `.png`. Missing folders
    /// are created; an existing file is replaced.
    pub out: String,
    /// The maximum width of the thumbnail, in pixels.
    #[serde(default = "default_side")]
    pub width_max: u32,
    /// The maximum height of the thumbnail, in pixels.
    #[serde(default = "default_side")]
    pub height_max: u32,
    /// The quality of a JPEG, 1 to 100.
    #[serde(default = "default_quality")]
    pub quality: u8,
}

fn default_side() -> u32 {
    256
}

fn default_quality() -> u8 {
    85
}

/// The largest permitted width or height of a thumbnail, in pixels.
const SIDE_MAX: u32 = 4096;

/// The result of `image.thumbnail`.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Thumbnail {
    /// The path of the thumbnail.
    pub out: String,
    /// The original picture.
    pub original: Picture,
    /// The thumbnail.
    pub thumbnail: Picture,
}

/// A picture in a file.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Picture {
    /// PNG or JPEG, as detected from the content.
    pub format: Format,
    /// The size of the upright picture, in pixels.
    pub size: Size,
    /// The size of the file, in bytes.
    pub bytes: usize,
}

/// Makes a thumbnail of a PNG or JPEG file. The picture keeps its aspect ratio and is never enlarged.
#[handler(name = "image.thumbnail", timeout = "2m", capabilities = ["dirs"])]
pub fn thumbnail(ctx: &Ctx, input: Input) -> Result<Thumbnail, Error> {
    let out_format = check(&input)?;
    remove_parts(ctx, &input.out);

    ctx.progress(10, "reading");
    let bytes = fs::read(&input.path).map_err(|error| file_error("read", &input.path, error))?;
    let original_bytes = bytes.len();

    ctx.progress(20, "decoding");
    let (format, picture) = picture::decode(bytes, &input.path)?;
    let original = Picture {
        format,
        size: Size::from_picture(&picture),
        bytes: original_bytes,
    };
    check_abort(ctx)?;

    ctx.progress(60, "resizing");
    let small = picture::shrink(picture, input.width_max, input.height_max);
    check_abort(ctx)?;

    ctx.progress(80, "encoding");
    let bytes = picture::encode(&small, out_format, input.quality)?;
    check_abort(ctx)?;

    ctx.progress(90, "writing");
    write_atomically(ctx, &input.out, &bytes)
        .map_err(|error| file_error("write", &input.out, error))?;
    Ok(Thumbnail {
        out: input.out,
        original,
        thumbnail: Picture {
            format: out_format,
            size: Size::from_picture(&small),
            bytes: bytes.len(),
        },
    })
}

/// Checks rules that the types do not enforce; returns the format that the name of the thumbnail implies.
fn check(input: &Input) -> Result<Format, Error> {
    let refuse = |why: String| Err(Error::permanent(why).kind("invalid_payload"));
    let sides = 1..=SIDE_MAX;
    if !sides.contains(&input.width_max) || !sides.contains(&input.height_max) {
        return refuse(format!(
            "width_max and height_max must be from 1 to {SIDE_MAX}"
        ));
    }
    if !(1..=100).contains(&input.quality) {
        return refuse("quality must be from 1 to 100".to_owned());
    }
    if input.path == input.out {
        return refuse("path and out must be different files".to_owned());
    }
    let Some(format) = Format::from_name(&input.out) else {
        return refuse(format!(
            "{}: out must end in .jpg, .jpeg or .png",
            input.out
        ));
    };
    Ok(format)
}

fn check_abort(ctx: &Ctx) -> Result<(), Error> {
    match ctx.abort().reason() {
        None => Ok(()),
        Some(reason) => Err(Error::retryable(format_args!("stopped: {reason}"))),
    }
}

/// The temporary file of an attempt. Each attempt has its own, so that an attempt that was wrongly declared lost never
/// writes to another attempt's file.
fn part(ctx: &Ctx, out: &str, attempt: u32) -> String {
    format!("{out}.{}-{attempt}.part", ctx.job().id)
}

/// Removes the temporary files of earlier attempts that were stopped while they wrote: an attempt cannot remove a file
/// after its abort.
fn remove_parts(ctx: &Ctx, out: &str) {
    for attempt in 1..ctx.job().attempt {
        // Most attempts have left none. A file that cannot be removed does no harm, and must not fail the job.
        let _ = fs::remove_file(part(ctx, out, attempt));
    }
}

/// Writes a file atomically: until the new content is complete, there is the old file or none, however often the job
/// runs.
fn write_atomically(ctx: &Ctx, out: &str, bytes: &[u8]) -> io::Result<()> {
    let part = part(ctx, out, ctx.job().attempt);
    if let Some(folder) = Path::new(out).parent().filter(|folder| *folder != "") {
        // A granted directory already exists, and cannot be created from inside the sandbox.
        if !folder.is_dir() {
            fs::create_dir_all(folder)?;
        }
    }
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, out));
    if written.is_err() {
        // If the temporary file cannot be removed either, the first error is still the one to report.
        let _ = fs::remove_file(&part);
    }
    written
}

/// The error of a file operation. A full disk, or a file in use, may be available at the next attempt; a file that is
/// missing or not granted will not.
fn file_error(action: &str, path: &str, error: io::Error) -> Error {
    let message = format!("cannot {action} {path}: {error}");
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::Interrupted | ErrorKind::ResourceBusy => {
            Error::retryable(message)
        }
        kind => {
            let error = Error::permanent(format_args!(
                "{message}. Check that it exists, that rouse.toml grants its directory to image.thumbnail, and \
                 that the grants of the job include that directory"
            ));
            match kind {
                ErrorKind::NotFound => error.kind("file_not_found"),
                _ => error.kind("file_denied"),
            }
        }
    }
}

export!(thumbnail);

#[cfg(test)]
mod tests;
