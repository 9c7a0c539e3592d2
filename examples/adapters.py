"""Several applications on one base, switched per prompt: python examples/adapters.py BUNDLE

ss-convert --adapter sqlctx --adapter e2e_nlg --output build/apps --target mlx
"""

import sys

from ss_runtime import generate, load

sql, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "build/apps", adapter="sqlctx")
restaurants = sql.with_adapter("e2e_nlg")  # shares the base's weights with the first
base = sql.with_adapter(None)  # the base alone: no drafts

context = "CREATE TABLE library (name VARCHAR, city VARCHAR)"
prompts = {
    sql: sql.prompt(question="How many libraries are there?", context=context),
    restaurants: restaurants.prompt(mr="name[The Punter], food[Indian], priceRange[cheap]"),
    base: "The capital of France",
}
for model, prompt in prompts.items():
    print(f"{model.name}: {generate(model, tokenizer, prompt, max_tokens=60)}")
