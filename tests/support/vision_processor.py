"""A real processor for text and images, of small local files: the tokenizer of a package, and LLaVA's processor with
CLIP's image processor (the one that works with PIL alone) for pictures of 28 x 28 pixels.

    processor = make_processor(tokenizer_folder)
"""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE, PATCH = 28, 14
TOKENS = (SIDE // PATCH) ** 2
"""Of one image."""


def make_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_processor(folder: str) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    sides = {"height": SIDE, "width": SIDE}
    # Neither normalised nor rescaled: a test can read the colours off the tensors.
    images = CLIPImageProcessorPil(size=sides, crop_size=sides, do_normalize=False, do_rescale=False)
    return LlavaProcessor(
        images, make_tokenizer(folder), patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip
