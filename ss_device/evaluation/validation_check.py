"""Does decoding give the tokens per call that validation predicted at the end of an adapter's training?"""

from __future__ import annotations

from pathlib import Path

from ss_device.adapter import load_adapter
from ss_device.application import load_application
from ss_device.base_model import open_base
from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.evaluation.acceptance import measure
from ss_device.reference.device import chosen_device
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_stream_model
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.chat_template import with_tokenizer_template
from ss_device.training.examples import encode_examples, load_prompts


def decode_validation(
    adapter_folder: Path, base_folder: Path, texts: Path, max_length: int, device: str | None = None
) -> dict:
    """Decode the validation documents of an adapter's training with a chain of γ + 1 nodes, in float32.

    texts, max_length: what the adapter was trained on, the base's own greedy text, and its longest
    example: the same rows are held out again. Returns `documents`, `predicted` and `decoded` tokens per
    call, `same_text` (documents whose decoded text is the recorded one) and `acceptance_by_depth`.
    UserError for an adapter whose record has no such prediction.
    """
    base, adapter = open_base(base_folder), load_adapter(adapter_folder)
    predicted = adapter.record.get("validation")
    if not predicted:
        raise UserError(f"{adapter_folder}: its training recorded no validation")
    app = with_tokenizer_template(load_application(adapter.app), base.path)
    shape, seed = base.architecture, adapter.record["seed"]
    tokenizer = read_tokenizer(base.path)
    pairs = load_prompts(app, texts, None, seed)
    documents = encode_examples(
        app, pairs, tokenizer, shape.bos_id, shape.end_id, max_length, shape.vocab_size
    )
    documents = documents[: predicted["documents"]]
    nodes = adapter.config.num_streams + 1
    stream_model = load_stream_model(base, adapter, device=chosen_device(device))
    model = ReferenceStepModel(stream_model, nodes, nodes, None, "draft")
    prompts = [d.ids[: d.prompt_length].tolist() for d in documents]
    completions = [d.ids[d.prompt_length :].tolist() for d in documents]
    counts, outputs = measure(
        model, Drafter(nodes, "chain", bigram_bias=adapter.bigram_bias()), prompts,
        max(len(c) for c in completions), frozenset(shape.eos_ids),
    )  # fmt: skip
    summary = counts.summary()
    return {
        "documents": len(documents),
        "predicted": predicted["tokens_per_call"],
        "decoded": summary["tokens_per_call"],
        "same_text": sum(a == b for a, b in zip(outputs, completions, strict=True)),
        "acceptance_by_depth": summary["acceptance_by_depth"],
    }
