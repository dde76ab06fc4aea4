"""A vocabulary of words, its tokenizer, sentences of it, and a small model of them."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.trainer_scene import shared_folder

_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
_WORDS = (
    "the a cat dog bird tree house runs sits flies over under near red blue green small big old "
    "new and but then"
)
WORDS = tuple(_WORDS.split())
VOCABULARY = {word: number for number, word in enumerate([*_SPECIAL, *WORDS])}
# Config options of transformers' models.
SIZES = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ("pad_token", "bos_token", "eos_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=made, **dict(zip(names, _SPECIAL, strict=True)))


def bert_config(**more: Any) -> Any:
    """transformers' config of a small BERT over the vocabulary, without dropout."""
    from transformers import BertConfig

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**SIZES, **no_dropout, max_position_embeddings=32, **more)


def encoder(*modules: Any) -> Any:
    """A small BERT of sentence-transformers, the mean of its outputs, and ``modules`` on it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertModel

    torch.manual_seed(0)
    folder = str(shared_folder())
    if not dist.is_initialized() or dist.get_rank() == 0:
        BertModel(bert_config()).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return SentenceTransformer(modules=[Transformer(folder), Pooling(32), *modules], device="cpu")


def sentences(count: int, length: int, seed: int) -> list[str]:
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=length)) for _ in range(count)]
