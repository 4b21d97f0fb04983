//! Decodes, shrinks and encodes pictures. No file access.

use std::io::Cursor;

use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::PngEncoder;
use image::imageops::FilterType;
use image::{
    DynamicImage, GenericImageView, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits,
    Rgb, RgbImage,
};
use rouse_sdk::Error;
use schemars::JsonSchema;
use serde::Serialize;

/// The size limit of a decoded picture: 80 MiB are 28 megapixels in colour, and leave room for the rest within the
/// host's default limit of 128 MiB of memory.
const DECODED_BYTES_MAX: u64 = 80 << 20;

/// A file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// JPEG.
    Jpeg,
    /// PNG.
    Png,
}

impl Format {
    /// The format for a file name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let (_, extension) = name.rsplit_once('.')?;
        match extension.to_ascii_lowercase().as_str() {
            "jpg" | "jpeg" => Some(Self::Jpeg),
            "png" => Some(Self::Png),
            _ => None,
        }
    }
}

/// Width and height, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Size {
    /// Horizontal.
    pub width: u32,
    /// Vertical.
    pub height: u32,
}

impl Size {
    pub(crate) fn from_picture(picture: &DynamicImage) -> Self {
        let (width, height) = picture.dimensions();
        Self { width, height }
    }
}

/// Decodes a file, and rotates the picture upright.
pub(crate) fn decode(bytes: Vec<u8>, path: &str) -> Result<(Format, DynamicImage), Error> {
    let undecodable = |error: ImageError| {
        Error::permanent(format_args!("cannot decode {path}: {error}")).kind("undecodable")
    };
    let format = match image::guess_format(&bytes).map_err(undecodable)? {
        ImageFormat::Jpeg => Format::Jpeg,
        ImageFormat::Png => Format::Png,
        other => {
            let message = format!("cannot decode {path}: {other:?} is neither PNG nor JPEG");
            return Err(Error::permanent(message).kind("undecodable"));
        }
    };
    let mut reader = ImageReader::with_format(
        Cursor::new(bytes),
        match format {
            Format::Jpeg => ImageFormat::Jpeg,
            Format::Png => ImageFormat::Png,
        },
    );
    let mut limits = Limits::default();
    limits.max_alloc = Some(DECODED_BYTES_MAX);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(undecodable)?;
    if decoder.total_bytes() > DECODED_BYTES_MAX {
        let (width, height) = decoder.dimensions();
        let message = format!(
            "{path} has {width} × {height} pixels, which is too many; at most {DECODED_BYTES_MAX} bytes once \
             decoded are allowed"
        );
        return Err(Error::permanent(message).kind("picture_too_large"));
    }
    let orientation = decoder.orientation().map_err(undecodable)?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(undecodable)?;
    picture.apply_orientation(orientation);
    Ok((format, picture))
}

/// Fits a picture into a box. It keeps its aspect ratio and is never enlarged.
pub(crate) fn shrink(picture: DynamicImage, width_max: u32, height_max: u32) -> DynamicImage {
    let Size { width, height } = Size::from_picture(&picture);
    if width <= width_max && height <= height_max {
        return picture;
    }
    picture.resize(width_max, height_max, FilterType::Lanczos3)
}

/// Encodes a picture.
pub(crate) fn encode(
    picture: &DynamicImage,
    format: Format,
    quality: u8,
) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    match format {
        Format::Jpeg => {
            on_white(picture).write_with_encoder(JpegEncoder::new_with_quality(&mut bytes, quality))
        }
        Format::Png => picture.write_with_encoder(PngEncoder::new(&mut bytes)),
    }
    .map_err(|error| {
        Error::permanent(format_args!("cannot encode the thumbnail: {error}")).kind("unencodable")
    })?;
    Ok(bytes)
}

/// Draws the picture on white, because JPEG has no transparency.
fn on_white(picture: &DynamicImage) -> RgbImage {
    if !picture.color().has_alpha() {
        return picture.to_rgb8();
    }
    let picture = picture.to_rgba8();
    RgbImage::from_fn(picture.width(), picture.height(), |x, y| {
        let [r, g, b, alpha] = picture.get_pixel(x, y).0.map(u32::from);
        let over_white = |channel: u32| {
            let mixed = (channel * alpha + 255 * (255 - alpha) + 127) / 255;
            u8::try_from(mixed).unwrap_or(u8::MAX)
        };
        Rgb([over_white(r), over_white(g), over_white(b)])
    })
}
