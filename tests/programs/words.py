"""A vocabulary of words, its tokenizer, sentences of it, and a small model of them."""

from __future__ import annotations

import random
from typing import Any

_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
_WORDS = (
    "the a cat dog bird tree house runs sits flies over under near red blue green small big old "
    "new and but then"
)
WORDS = tuple(_WORDS.split())
VOCABULARY = {word: number for number, word in enumerate([*_SPECIAL, *WORDS])}


def tokenizer() -> Any:
    """A fast tokenizer of transformers; a token is a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ("pad_token", "bos_token", "eos_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=made, **dict(zip(names, _SPECIAL, strict=True)))


def bert_config(**more: Any) -> Any:
    """transformers' config of a small BERT over the vocabulary, without dropout."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        **more,
    )


def sentences(count: int, length: int, seed: int) -> list[str]:
    """Sentences of ``length`` words."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=length)) for _ in range(count)]
