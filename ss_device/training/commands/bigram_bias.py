"""ss-train bigram-bias: train a bigram bias once for a base, on the texts of its applications."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ss_device.command_line import add_device
from ss_device.errors import UserError
from ss_device.settings import add_settings, settings_of
from ss_device.training.commands.common import BASE_HELP, RECORDS_HELP
from ss_device.training.settings import BigramBiasSettings

if TYPE_CHECKING:
    from ss_device.base_model import BaseFolder
    from ss_device.training.corpus import Document


def add(commands) -> None:
    """Its place among the sub-commands."""
    parser = commands.add_parser(
        "bigram-bias",
        help="train a bigram bias once for a base, on the texts of its applications",
        example="ss-train bigram-bias sqlctx=own_sql.jsonl e2e_nlg=own_e2e.jsonl "
        "--base models/base/mine --output models/base/mine.bigram_bias.safetensors",
    )
    parser.add_argument("data", nargs="+", metavar="APP=FILE", help="JSON lines of each application")
    parser.add_argument("--base", type=Path, required=True, help=BASE_HELP)
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    add_settings(parser, BigramBiasSettings)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help=RECORDS_HELP)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Train it and write the file."""
    from ss_device.base_model import open_base
    from ss_device.outputs import check_new_file
    from ss_device.training.bigram_bias import save_bigram_bias, train_bigram_bias
    from ss_device.training.progress import training_progress

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    check_new_file(arguments.output, arguments.force)
    base, settings = open_base(arguments.base), settings_of(arguments, BigramBiasSettings)
    documents = _documents(arguments.data, base)
    with training_progress("bigram bias", arguments.json) as report:
        tensors = train_bigram_bias(
            documents, base.architecture.vocab_size, settings, report, arguments.device
        )
    save_bigram_bias(tensors, base.identity, arguments.output)
    return 0


def _documents(items: Sequence[str], base: BaseFolder) -> list[Document]:
    """Those of every application, each named `APP=FILE`."""
    from ss_device.application import load_application
    from ss_device.tokenizer_file import read_tokenizer
    from ss_device.training.examples import encode_examples, load_prompts

    tokenizer, shape = read_tokenizer(base.path), base.architecture
    documents = []
    for item in items:
        name, separator, path = item.partition("=")
        if not separator:
            raise UserError(f"'{item}' is not APP=FILE, as sqlctx=own.jsonl")
        app = load_application(name)
        pairs = load_prompts(app, Path(path))
        documents += encode_examples(
            app, pairs, tokenizer, shape.bos_id, shape.end_id, shape.max_positions, shape.vocab_size
        )
    return documents
