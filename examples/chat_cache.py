"""A conversation that computes only what is new: python examples/chat_cache.py [MODEL] < messages

MODEL: a bundle, or a Hugging Face or mlx-lm model folder. One message per line.
"""

import sys

from ss_runtime import generate, load, make_prompt_cache, save_prompt_cache

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "models/base/ss-demo-base")
cache = make_prompt_cache(model)
for line in sys.stdin:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": line.rstrip()}])
    print(generate(model, tokenizer, prompt, max_tokens=60, prompt_cache=cache))
save_prompt_cache("chat.safetensors", cache)
print(f"{len(cache.text)} tokens in chat.safetensors")
