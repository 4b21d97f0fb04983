//! Makes a thumbnail of a picture.

mod picture;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use rouse_sdk::{Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use picture::{Format, Size};

/// What `image.thumbnail` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The picture, a PNG or JPEG in a granted directory.
    pub path: String,
    /// The thumbnail, in a directory granted for writing: `….jpg`, `….jpeg` or `….png`. Its
    /// folders are made; a file that is there is replaced.
    pub out: String,
    /// The thumbnail is at most so wide, in pixels.
    #[serde(default = "default_side")]
    pub width_max: u32,
    /// The thumbnail is at most so high, in pixels.
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

/// The thumbnail's longest side, in pixels; a larger one is no thumbnail.
const SIDE_MAX: u32 = 4096;

/// What `image.thumbnail` gives back.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Thumbnail {
    /// Where it is.
    pub out: String,
    /// The picture as it was.
    pub original: Picture,
    /// The thumbnail.
    pub thumbnail: Picture,
}

/// A picture in a file.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Picture {
    /// PNG or JPEG, by its content.
    pub format: Format,
    /// In pixels, the right way up.
    pub size: Size,
    /// The size of the file.
    pub bytes: usize,
}

/// Makes a thumbnail of a PNG or JPEG file. The picture keeps its shape and is never enlarged.
#[handler(name = "image.thumbnail", timeout = "2m", capabilities = ["dir"])]
pub fn thumbnail(ctx: &Ctx, input: Input) -> Result<Thumbnail, Error> {
    let out_format = check(&input)?;

    ctx.progress(10, "reading");
    let bytes = fs::read(&input.path).map_err(|error| denied("read", &input.path, error))?;
    let original_bytes = bytes.len();

    ctx.progress(20, "decoding");
    let (format, picture) = picture::decode(bytes, &input.path)?;
    let original = Picture {
        format,
        size: Size::of(&picture),
        bytes: original_bytes,
    };
    go_on(ctx)?;

    ctx.progress(60, "resizing");
    let small = picture::shrink(picture, input.width_max, input.height_max);
    go_on(ctx)?;

    ctx.progress(80, "encoding");
    let bytes = picture::encode(&small, out_format, input.quality)?;
    go_on(ctx)?;

    ctx.progress(90, "writing");
    write_whole(ctx, &input.out, &bytes).map_err(|error| denied("write", &input.out, error))?;
    Ok(Thumbnail {
        out: input.out,
        original,
        thumbnail: Picture {
            format: out_format,
            size: Size::of(&small),
            bytes: bytes.len(),
        },
    })
}

/// Checks what the types cannot say; gives the format that the name of the thumbnail asks for.
fn check(input: &Input) -> Result<Format, Error> {
    let refuse = |why: String| Err(Error::permanent(why).kind("bad-payload"));
    let sides = 1..=SIDE_MAX;
    if !sides.contains(&input.width_max) || !sides.contains(&input.height_max) {
        return refuse(format!("width_max and height_max are from 1 to {SIDE_MAX}"));
    }
    if !(1..=100).contains(&input.quality) {
        return refuse("quality is from 1 to 100".to_owned());
    }
    if input.path == input.out {
        return refuse("path and out are the same file: the picture would be lost".to_owned());
    }
    let Some(format) = Format::of_name(&input.out) else {
        return refuse(format!("{}: out ends in .jpg, .jpeg or .png", input.out));
    };
    Ok(format)
}

fn go_on(ctx: &Ctx) -> Result<(), Error> {
    match ctx.abort().reason() {
        None => Ok(()),
        Some(reason) => Err(Error::retryable(format_args!("stopped: {reason}"))),
    }
}

/// Writes a file so that it is there whole or not at all, however often the job runs.
fn write_whole(ctx: &Ctx, out: &str, bytes: &[u8]) -> io::Result<()> {
    let job = ctx.job();
    let part = format!("{out}.{}-{}.part", job.id, job.attempt);
    if let Some(folder) = Path::new(out).parent().filter(|folder| *folder != "") {
        // A granted directory cannot be made from within, and is there already.
        if !folder.is_dir() {
            fs::create_dir_all(folder)?;
        }
    }
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, out));
    if written.is_err() {
        // Nothing more can be done about a part that cannot be removed; the first error counts.
        let _ = fs::remove_file(&part);
    }
    written
}

/// A file that is missing, or outside of every grant, will still be so at the next attempt; a
/// full disk may not.
fn denied(verb: &str, path: &str, error: io::Error) -> Error {
    let message = format!("cannot {verb} {path}: {error}");
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::Interrupted | ErrorKind::ResourceBusy => {
            Error::retryable(message)
        }
        kind => Error::permanent(format_args!(
            "{message}. Is it there, and does rouse.toml grant its directory to image.thumbnail, and do the grants of the job leave it?"
        ))
        .kind(if kind == ErrorKind::NotFound {
            "file-not-found"
        } else {
            "file-denied"
        }),
    }
}

export!(thumbnail);

#[cfg(test)]
mod tests;
