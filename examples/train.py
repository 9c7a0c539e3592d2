"""Train a speculative adapter on a frozen base model: a first look, on a few rows.

python examples/train.py --app sqlctx --base ss-demo-base --data apps/sqlctx/demo.jsonl --output runs/mine
"""

import argparse

from ss_device import AdapterInputs, AdapterSchedule, train_adapter

parser = argparse.ArgumentParser()
parser.add_argument("--app", default="sqlctx", help="a folder under apps/, or its path")
parser.add_argument(
    "--base", default="ss-demo-base", help="a name under models/base, a folder, or a hub id"
)
parser.add_argument("--data", default="apps/sqlctx/demo.jsonl", help="JSON lines with the app's fields")
parser.add_argument("--output", default="runs/mine", help="adapter folder to write")
parser.add_argument("--limit", type=int, default=100, help="rows to use")
parser.add_argument("--epochs", type=float, default=5.0, help="passes over them")
args = parser.parse_args()

schedule, inputs = AdapterSchedule(epochs=args.epochs), AdapterInputs(limit=args.limit)
adapter = train_adapter(
    args.app, args.base, args.data, args.output, schedule=schedule, inputs=inputs, report=print, force=True
)
print("tokens per call on held-out rows:", adapter.record["validation"]["tokens_per_call"])
