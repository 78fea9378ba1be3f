"""Images of rows: where they are, and opening them, checked.

A row names an image by the path of a file (from the folder of the data file), or holds the file's bytes, as
they are or in base64. Opened images are turned as their EXIF data say and converted to RGB, as transformers'
`load_image` does.
"""

from __future__ import annotations

import base64
import binascii
import io
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.rows.sources import Row, bad_row, kind_of

if TYPE_CHECKING:
    from PIL.Image import Image

KEYS = ("image", "path", "url", "base64", "bytes", "image_url", "content", "value")
"""Keys under which a part of a message, or an entry of a list of images, holds its image."""
_DOWNLOAD = "download the images, and write the paths of the files into the rows"
_URLS = ("http://", "https://", "s3://", "gs://", "hf://", "ftp://")
_PLAIN = frozenset({"RGB", "L", "1", "P"})
"""Modes whose colours RGB has too; P with transparency is another one."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The file of an image: its absolute path, or its bytes."""

    path: str | None
    content: bytes | None = None

    @property
    def name(self) -> str:
        return self.path or "an image in the row"

    def source(self) -> Any:
        return self.path if self.content is None else io.BytesIO(self.content)


def image_file(row: Row, value: Any, place: str) -> ImageFile:
    """The file that a value names or holds. RecipeError for a missing file, an address, or something else."""
    if isinstance(value, Mapping):  # as datasets writes images into Parquet, or an entry of a list
        held = [value[key] for key in ("bytes", *KEYS) if value.get(key) is not None]
        if not held:
            raise bad_row(row, f"{place} holds no image; its keys: {', '.join(map(str, value)) or 'none'}")
        return image_file(row, held[0], place)
    if isinstance(value, bytes):
        return ImageFile(None, value)
    if hasattr(value, "save"):  # a PIL image, from a `format_row` hook
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return ImageFile(None, buffer.getvalue())
    if not isinstance(value, str) or not value:
        raise bad_row(row, f"{place} holds {kind_of(value)}, expected an image's path or bytes")
    if value.startswith("data:"):
        return ImageFile(None, _decoded(row, value, place))
    if value.startswith(_URLS):
        message = f"{place} is an address ({value[:80]}); images are not downloaded"
        raise bad_row(row, message, _DOWNLOAD, code="image-url")
    path = (Path(row.file).parent / value.removeprefix("file://")).absolute()
    try:
        found = path.is_file()
    except (OSError, ValueError):  # such as base64 without the head of a data URI: no name of a file
        found = False
    if not found:
        if len(value) > 255 and (content := _from_base64(value)) is not None:
            return ImageFile(None, content)
        hint = "paths start from the folder of the data file"
        raise bad_row(row, f"there is no image {value[:255]}", hint, code="image-missing")
    return ImageFile(str(path))


def _decoded(row: Row, uri: str, place: str) -> bytes:
    """The bytes of a data URI."""
    head, comma, body = uri.partition(",")
    content = _from_base64(body) if comma and head.endswith(";base64") else None
    if content is None:
        raise bad_row(row, f"{place} is a data URI that is not base64 ({head[:60]})", code="bad-image")
    return content


def _from_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Opened:
    """An image in memory."""

    image: Image
    """In RGB, upright."""
    mode: str | None
    """The mode that was converted and that RGB cannot hold, such as CMYK or RGBA; None for others."""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return int(self.image.width), int(self.image.height)


def open_image(file: ImageFile) -> Opened:
    """An image, all of it read. RecipeError (without a place) for one that cannot be trained on as it is."""
    from PIL import Image, ImageOps

    with _explained(file), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(file.source()) as image:
            frames = int(getattr(image, "n_frames", 1))
            if frames > 1:
                raise _Refused("image-animated", f"has {frames} frames", "write the frame that is meant")
            image.load()  # all of it: a file that is cut off opens well
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode} has more than 8 bits per channel, which RGB clips")
            transparent = "transparency" in image.info and image.mode != "RGBA"
            mode = None if image.mode in _PLAIN and not transparent else image.mode
            return Opened(ImageOps.exif_transpose(image).convert("RGB"), mode)


class _Refused(Exception):
    """An image that opens well and is refused: (code, what it is, what to do)."""


@contextmanager
def _explained(file: ImageFile) -> Iterator[None]:
    from PIL import Image

    try:
        yield
    except _Refused as error:
        code, what, hint = error.args
        raise RecipeError(Problem(code, f"{file.name} {what}", hint=hint)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        limit = Image.MAX_IMAGE_PIXELS
        message = f"{file.name} has more than {limit:,} pixels, Pillow's limit against decompression bombs"
        raise RecipeError(Problem("image-too-large", message, hint="make it smaller")) from error
    except FileNotFoundError as error:
        raise RecipeError(Problem("image-missing", f"there is no image {file.name}")) from error
    except (OSError, SyntaxError, ValueError, AttributeError, TypeError, EOFError) as error:
        message = f"{file.name} cannot be read: {error}"
        raise RecipeError(Problem("bad-image", message, hint="fix or remove the row")) from error


def open_of_row(row: Row, file: ImageFile) -> Opened:
    """`open_image`; a RecipeError names the row."""
    try:
        return open_image(file)
    except RecipeError as error:
        (problem,) = error.problems
        raise bad_row(row, problem.message, problem.hint, code=problem.code) from error


THUMBNAIL = 160
"""Pixels of a thumbnail's longer side, at most."""


def thumbnail(file: ImageFile) -> str:
    """A small JPEG of an image as a data URI, which can be shown when the file is gone."""
    small = open_image(file).image
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, format="JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


COLOURS = {"blue": (30, 30, 200), "green": (30, 200, 30), "red": (200, 30, 30)}
"""Of images that are made up for `--tiny`."""


def coloured(draw: random.Random, name: str, side: int = 32) -> bytes:
    """A PNG of one colour, in a shade."""
    from PIL import Image

    shade = tuple(max(0, min(255, value + draw.randint(-20, 20))) for value in COLOURS[name])
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), shade).save(buffer, format="PNG")
    return buffer.getvalue()
