"""Byte-level BPE tokenizer for a base model, saved as a Hugging Face tokenizer folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ss_device.errors import UserError
from ss_device.training.corpus import BOS, EOS, PAD, source_texts
from ss_device.training.recipe import Recipe

# Digits in groups of three and punctuation apart from words, so that an identifier is cut the same
# way wherever it stands: copying it is then a copy of the same tokens.
SPLIT = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"


def train_tokenizer(recipe: Recipe, data: Path, folder: Path) -> Tokenizer:
    """Train on a seeded sample of the recipe's texts (by source weight) and save into `folder`."""
    if any(source.kind == "continuations" for source in recipe.sources):
        raise UserError(
            f"recipe '{recipe.name}': continuations are token ids of the model that wrote them; give its "
            "folder with --tokenizer"
        )
    rng = np.random.default_rng(recipe.seed)
    texts: list[str] = []
    for source in recipe.sources:
        if source.kind == "repeat":
            continue
        rows = [prompt + completion for prompt, completion in source_texts(source, data)]
        count = min(len(rows), int(recipe.tokenizer.sample_documents * source.weight))
        texts.extend(rows[i][:4000] for i in rng.permutation(len(rows))[:count])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for t in (PAD, BOS, EOS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if recipe.vocab_size < (least := len(special) + len(alphabet)):
        raise UserError(f"recipe '{recipe.name}': vocab_size {recipe.vocab_size} must be at least {least}")
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return tokenizer
