"""Answer one question with an application's adapter: python examples/generate.py [BUNDLE]

make demo writes build/sqlctx.
"""

import sys

from ss_runtime import generate, load

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "build/sqlctx")
prompt = model.prompt(
    question="How many libraries are there?",
    context="CREATE TABLE library (name VARCHAR, city VARCHAR)",
)
print(generate(model, tokenizer, prompt, max_tokens=80))
