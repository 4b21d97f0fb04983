use std::path::PathBuf;

use image::{Rgba, RgbaImage};
use rouse_sdk::{AbortReason, TestCtx};
use serde_json::json;
use tempfile::TempDir;

use super::*;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// A picture whose left half is red and whose right half is transparent.
    fn picture(&self, name: &str, width: u32, height: u32) {
        let picture = RgbaImage::from_fn(width, height, |x, _| {
            let alpha = if x < width / 2 { 255 } else { 0 };
            Rgba([255, 0, 0, alpha])
        });
        picture.save(self.path(name)).unwrap();
    }

    fn input(&self, path: &str, out: &str) -> Input {
        Input {
            path: self.text(path),
            out: self.text(out),
            width_max: 50,
            height_max: 50,
            quality: 90,
        }
    }

    fn refused(&self, path: &str, out: &str) -> Error {
        let error = thumbnail(&TestCtx::new(), self.input(path, out)).unwrap_err();
        assert!(error.permanent, "{error}");
        assert!(!self.path(out).exists() || path == out);
        error
    }
}

#[test]
fn a_png_becomes_a_small_jpeg_with_the_same_aspect_ratio() {
    let folder = Folder::new();
    folder.picture("cat.png", 400, 200);
    let ctx = TestCtx::new();
    let result = thumbnail(&ctx, folder.input("cat.png", "thumbs/small/cat.jpg")).unwrap();

    let (width, height) = (400, 200);
    assert_eq!(result.original.size, Size { width, height });
    assert_eq!(result.original.format, Format::Png);
    let (width, height) = (50, 25);
    assert_eq!(result.thumbnail.size, Size { width, height });
    assert_eq!(result.thumbnail.format, Format::Jpeg);

    let written = fs::read(folder.path("thumbs/small/cat.jpg")).unwrap();
    assert_eq!(written.len(), result.thumbnail.bytes);
    let small = image::load_from_memory(&written).unwrap().to_rgb8();
    assert_eq!(small.dimensions(), (50, 25));
    // Red on the left; transparent areas are white.
    let [r, g, _] = small.get_pixel(5, 12).0;
    assert!(r > 220 && g < 40, "{r} {g}");
    let [r, g, b] = small.get_pixel(45, 12).0;
    assert!(r.min(g).min(b) > 230, "{r} {g} {b}");

    let steps: Vec<_> = ctx.progress_reports().into_iter().map(|p| p.step).collect();
    assert_eq!(
        steps,
        ["reading", "decoding", "resizing", "encoding", "writing"]
    );
}

#[test]
fn the_format_is_detected_by_content_and_png_stays_transparent() {
    let folder = Folder::new();
    folder.picture("cat.png", 80, 80);
    fs::rename(folder.path("cat.png"), folder.path("cat.jpg")).unwrap();
    let result = thumbnail(&TestCtx::new(), folder.input("cat.jpg", "out.PNG")).unwrap();
    assert_eq!(result.original.format, Format::Png);
    let written = fs::read(folder.path("out.PNG")).unwrap();
    let small = image::load_from_memory(&written).unwrap().to_rgba8();
    assert_eq!(small.get_pixel(45, 25).0[3], 0);
}

#[test]
fn a_small_picture_is_not_enlarged_and_only_the_thumbnail_is_left() {
    let folder = Folder::new();
    folder.picture("dot.png", 3, 2);
    let result = thumbnail(&TestCtx::new(), folder.input("dot.png", "out.png")).unwrap();
    assert_eq!(result.thumbnail.size, result.original.size);
    assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), 2);
}

#[test]
fn a_missing_picture_is_named_and_not_retried() {
    let error = Folder::new().refused("no.png", "out.jpg");
    assert_eq!(error.kind, "file_not_found");
    assert!(error.message.contains("no.png"), "{error}");
    assert!(error.message.contains("rouse.toml"), "{error}");
}

#[test]
fn an_invalid_picture_is_named_and_not_retried() {
    let folder = Folder::new();
    folder.picture("cut.png", 400, 200);
    let whole = fs::read(folder.path("cut.png")).unwrap();
    fs::write(folder.path("cut.png"), &whole[..whole.len() / 2]).unwrap();
    fs::write(folder.path("text.png"), "hello").unwrap();
    fs::write(folder.path("empty.png"), "").unwrap();
    fs::write(folder.path("film.png"), b"GIF89a\0\0\0\0").unwrap();
    for name in ["cut.png", "text.png", "empty.png", "film.png"] {
        let error = folder.refused(name, "out.jpg");
        assert_eq!(error.kind, "undecodable");
        assert!(error.message.contains(name), "{error}");
    }
}

#[test]
fn a_picture_that_claims_to_be_huge_is_refused_before_it_is_decoded() {
    let folder = Folder::new();
    folder.picture("bomb.png", 4, 4);
    let mut png = fs::read(folder.path("bomb.png")).unwrap();
    // Width and height follow the signature and the header of the first chunk.
    png[16..24].copy_from_slice(&[0, 0, 0x75, 0x30, 0, 0, 0x75, 0x30]);
    let checksum = crc32(&png[12..29]);
    png[29..33].copy_from_slice(&checksum.to_be_bytes());
    fs::write(folder.path("bomb.png"), png).unwrap();
    let error = folder.refused("bomb.png", "out.jpg");
    assert_eq!(error.kind, "picture_too_large", "{error}");
    assert!(error.message.contains("30000 × 30000"), "{error}");
}

/// The checksum of a PNG chunk (RFC 2083, annex 15).
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 * (crc & 1))
        })
    })
}

#[test]
fn invalid_payloads_are_refused_before_anything_is_read() {
    let folder = Folder::new();
    assert!(folder.refused("a.png", "out.gif").message.contains(".jpg"));
    assert!(folder.refused("a.png", "out").message.contains(".jpg"));
    assert!(
        folder
            .refused("a.png", "a.png")
            .message
            .contains("different files")
    );
    for field in ["width_max", "height_max", "quality"] {
        let payload = json!({"path": "a.png", "out": "b.png", field: 0});
        let error = TestCtx::new().run::<super::thumbnail>(payload).unwrap_err();
        assert_eq!(
            (error.kind.as_ref(), error.permanent),
            ("invalid_payload", true)
        );
        assert!(error.message.contains(field), "{error}");
    }
}

#[test]
fn an_aborted_attempt_writes_nothing() {
    let folder = Folder::new();
    folder.picture("cat.png", 100, 100);
    let ctx = TestCtx::new();
    ctx.fire_abort(AbortReason::TimedOut);
    let error = thumbnail(&ctx, folder.input("cat.png", "out.jpg")).unwrap_err();
    assert_eq!(error.message, "stopped: timed_out");
    assert!(!folder.path("out.jpg").exists());
}

#[test]
fn a_thumbnail_that_cannot_be_written_leaves_no_temporary_file() {
    let folder = Folder::new();
    folder.picture("cat.png", 100, 100);
    fs::create_dir(folder.path("out.jpg")).unwrap();
    let error = thumbnail(&TestCtx::new(), folder.input("cat.png", "out.jpg")).unwrap_err();
    assert!(error.message.contains("cannot write"), "{error}");
    assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), 2);
}

#[test]
fn leftovers_of_a_stopped_attempt_are_removed_by_the_next_one() {
    let folder = Folder::new();
    let ctx = TestCtx::for_job(|job| {
        job.id = 7;
        job.attempt = 3;
    });
    let left = |of: &str| {
        let part = folder.path(&format!("out.jpg.{of}.part"));
        fs::write(&part, "half").unwrap();
        part
    };
    let own = [left("7-1"), left("7-2")];
    // Another job may be writing it.
    let others = left("8-1");
    // Even if the attempt then fails.
    let error = thumbnail(&ctx, folder.input("no.png", "out.jpg")).unwrap_err();
    assert_eq!(error.kind, "file_not_found");
    assert!(own.iter().all(|part| !part.exists()) && others.exists());
}
