"""Text as it comes, drafted tokens in green: python examples/stream.py [BUNDLE [TEMPERATURE]]"""

import sys

from ss_runtime import load, make_sampler, stream_generate

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "build/sqlctx")
prompt = model.prompt(
    question="Which cities have a library?",
    context="CREATE TABLE library (name VARCHAR, city VARCHAR)",
)
sampler = make_sampler(temp=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0, seed=1)
for response in stream_generate(model, tokenizer, prompt, max_tokens=80, sampler=sampler):
    color = "\033[32m" if response.from_draft else "\033[0m"
    print(color + response.text, end="", flush=True)
print(f"\033[0m\n{response.generation_tokens} tokens in {response.model_calls} calls")
print(f"{response.generation_tps:.1f} tokens per second, {response.peak_memory:.2f} GB")
