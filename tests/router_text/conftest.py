"""A byte tokenizer and a real byte-level BPE, trained here."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from router.text.detokenize import Vocabulary


@pytest.fixture(scope="session")
def bytes_vocabulary() -> Vocabulary:
    """Token n is byte n; token 256 is special."""
    return Vocabulary((*(bytes([n]) for n in range(256)), b"<end>"), frozenset({256}))


@pytest.fixture(scope="session")
def trained_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        "The quick brown fox jumps over the lazy dog. 😀 café naïve 中文字符 " * 5,
        "user system assistant hello world stop END of the story",
    ]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken("two words", special=False)])
    return tokenizer.to_str()
