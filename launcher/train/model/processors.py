"""Processors of models that read images and text: an image processor with a tokenizer.

Pillow's image processors are used where a family has one: they need no torchvision, and give the same pixels
on each machine. The processors of most families also hold one for video, whose classes need torchvision; it
is left out where that is missing, since no video is read here, and its configuration is kept for the result.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError

VIDEO = "video_processor"
FILE = "processor_config.json"
_INSTALL = "pip install 'effilaunch[vision]'"


def tokenizer_of(processing: Any) -> Any:
    """The tokenizer of a processor; what is one already, or an image processor, as it is."""
    return getattr(processing, "tokenizer", processing)


def image_mark(processor: Any) -> Any:
    """What a chat template writes for an image, which the processor expands; None without such a mark."""
    return getattr(processor, "image_placeholder_token", None) or getattr(processor, "image_token", None)


_AROUND = (("vision_start", "vision_end"), ("vision_bos", "vision_eos"), ("image_start", "image_end"))
"""Tokens that stand before and after an image's, by their names in a processor."""


def around_image(processor: Any) -> tuple[str, str]:
    """Tokens that a chat template writes before and after an image, where the processor has them."""
    for begin, end in _AROUND:
        first, last = (getattr(processor, f"{name}_token", None) for name in (begin, end))
        if isinstance(first, str) and isinstance(last, str):
            return first, last
    return "", ""


def without_video(kind: type[Any]) -> type[Any]:
    """The processor class, as it is made and saved without a video processor."""
    from transformers import ProcessorMixin

    names = tuple(kind.get_attributes())
    kept = [name for name in names if name != VIDEO]

    class Parts(ProcessorMixin):  # between `kind` and the base that checks the parts
        def __init__(self, *args: Any, **parts: Any) -> None:
            given = dict(zip(names, args, strict=False)) | parts
            given.pop(VIDEO, None)
            super().__init__(**given)

    def make(self: Any, *args: Any, **more: Any) -> None:
        kind.__init__(self, **{VIDEO: None, **dict(zip(kept, args, strict=False)), **more})
        if f"self.{VIDEO}" in inspect.getsource(kind.save_pretrained):
            raise AttributeError(f"{kind.__name__} saves its {VIDEO}")
        _ = self.model_input_names  # AttributeError where those of the video processor are among them

    own = inspect.signature(kind.__init__)
    asked = {name: one for name, one in own.parameters.items() if name != VIDEO}
    # save_pretrained writes the fields of the signature.
    make.__signature__ = own.replace(parameters=list(asked.values()))  # type: ignore[attr-defined]
    fields = [name for name in asked if name != "self"]
    body = {
        "__init__": make,
        "get_attributes": classmethod(lambda _: list(kept)),
        # from_pretrained would read the fields that it passes on from the code of `make`.
        "validate_init_kwargs": staticmethod(
            lambda processor_config, valid_kwargs: kind.validate_init_kwargs(processor_config, fields)
        ),
    }
    return type(kind.__name__, (kind, Parts), body)


def make_processor(kind: type[Any], **parts: Any) -> Any:
    """A processor of its parts; MachineError where a package is missing that its class needs.

    A video processor among the parts is used for a class that cannot be made without one.
    """
    try:
        if VIDEO not in kind.get_attributes():
            return kind(**parts)
        try:
            return without_video(kind)(**{name: part for name, part in parts.items() if name != VIDEO})
        except AttributeError:
            if parts.get(VIDEO) is None:
                raise
            return kind(**parts)
    except ImportError as error:
        raise package_missing(error) from error


def read_processor(reference: str, options: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    """The processor of a folder or hub id.

    sizes: fields of the image processor that replace its own. RecipeError where there is no processor or the
    image processor has no such field, MachineError where a package is missing.
    """
    from transformers import AutoProcessor

    kind = processor_class(reference, options)
    try:
        if kind is not None and VIDEO in kind.get_attributes():
            found = _read_without_video(kind, reference, options)
        else:
            found = AutoProcessor.from_pretrained(reference, backend="pil", **options)
    except ImportError as error:
        raise package_missing(error) from error
    if not hasattr(found, "image_processor") or not hasattr(found, "tokenizer"):
        message = f"{reference} has a {type(found).__name__}, not an image processor with a tokenizer"
        hint = "save the model's processor beside the weights: processor_config.json"
        raise RecipeError(Problem("processor-missing", message, path="model.name_or_path", hint=hint))
    found.image_processor = with_sizes(found.image_processor, sizes)
    return preferring(found, sizes)


def _read_without_video(kind: type[Any], reference: str, options: Mapping[str, Any]) -> Any:
    """A processor whose class has a video part, without it where the class can do without."""
    try:
        found = without_video(kind).from_pretrained(reference, backend="pil", **options)
    except AttributeError:
        if not has_torchvision():
            raise ImportError("torchvision makes video processors") from None
        return kind.from_pretrained(reference, **options)
    found.of_video = _video_settings(reference, options)
    return found


def processor_class(reference: str, options: Mapping[str, Any]) -> type[Any] | None:
    """transformers' processor class, named beside the processor or by the model's type; None for a class that
    transformers does not have."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    for file in (FILE, "preprocessor_config.json"):
        name = _content(reference, file, options).get("processor_class")
        if isinstance(name, str):
            found: type[Any] | None = getattr(transformers, name, None)
            return found
    config = transformers.AutoConfig.from_pretrained(reference, **options)
    found = PROCESSOR_MAPPING.get(type(config), None)
    return found


def with_sizes(image_processor: Any, sizes: Mapping[str, Any]) -> Any:
    """The image processor with other values for some fields. RecipeError for one that it does not read."""
    kind = type(image_processor)
    known = sorted(name for name in kind.valid_kwargs.__annotations__ if name in SIZES)
    for name in sizes:
        if name not in known:
            message, hint = f"{kind.__name__} has no {name}", f"it has {', '.join(known)}"
            raise RecipeError(Problem("image-size", message, path=f"model.image_sizes.{name}", hint=hint))
    return kind.from_dict(image_processor.to_dict(), **sizes) if sizes else image_processor


def preferring(processor: Any, fields: Collection[str]) -> Any:
    """The processor, changed to use its image processor's values for these fields.

    Some processor classes override them (`images_kwargs`): Gemma 3 never pans and scans and InternVL always
    crops, whatever the image processor's file sets.
    """
    kind = type(processor)
    own = getattr(kind, "images_kwargs", {})
    kept = {name: value for name, value in own.items() if name not in fields}
    if kept != own:
        processor.__class__ = type(kind.__name__, (kind,), {"images_kwargs": kept})
    return processor


SIZES = (
    "size", "crop_size", "max_image_size", "min_pixels", "max_pixels", "max_soft_tokens",
    "do_image_splitting", "do_pan_and_scan", "pan_and_scan_max_num_crops", "max_patches", "min_patches",
    "crop_to_patches",
    "image_grid_pinpoints", "longest_edge",
)  # fmt: skip
"""Fields of image processors that decide how many pixels and tokens an image has."""


def save_processing(processing: Any, folder: Path) -> None:
    """`save_pretrained`, with the configuration of a video processor that was left out. None: nothing."""
    if processing is None:
        return
    processing.save_pretrained(folder)
    kept, file = getattr(processing, "of_video", None), folder / FILE
    if kept and file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**content, VIDEO: kept}, indent=2) + "\n", encoding="utf-8")


def package_missing(error: ImportError) -> MachineError:
    """What to install for a processor."""
    name = next((n for n in ("torchvision", "num2words") if n in str(error).lower()), None)
    message = f"the model's processor needs {name or 'a package'}, which is not installed"
    message += "" if name else f": {str(error).strip().splitlines()[0]}"
    hint = f"{_INSTALL}; torchvision must be built for the installed torch"
    return MachineError(Problem("package-missing", message, path="model.name_or_path", hint=hint))


def has_torchvision() -> bool:
    """Whether video processors, and the image processors that are not Pillow's, can be made."""
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


def _video_settings(reference: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings of the video processor beside a processor, None without one."""
    whole = _content(reference, "video_preprocessor_config.json", options)
    return _content(reference, FILE, options).get(VIDEO) or whole or None


def _content(reference: str, file: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """A JSON file of a folder or hub id; empty where there is none."""
    from transformers.utils import cached_file

    given = {name: options[name] for name in ("revision", "cache_dir") if name in options}
    try:
        path = cached_file(reference, file, **given)
    except OSError:
        return {}
    return dict(json.loads(Path(str(path)).read_text(encoding="utf-8")))
