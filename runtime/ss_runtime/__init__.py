"""Speculative Streaming on Apple devices: generate with a bundle of ss-convert.

    from ss_runtime import load, stream_generate

    model, tokenizer = load("build/sqlctx", adapter="sqlctx")
    prompt = model.prompt(question="How many singers?", context="CREATE TABLE singer (name VARCHAR)")
    for response in stream_generate(model, tokenizer, prompt, max_tokens=100):
        print(response.text, end="", flush=True)

Names, arguments and responses are mlx-lm's: a script for that library runs with its import changed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ss_runtime.api import GenerationResponse as GenerationResponse
    from ss_runtime.api import generate as generate
    from ss_runtime.api import load as load
    from ss_runtime.api import make_logits_processors as make_logits_processors
    from ss_runtime.api import make_sampler as make_sampler
    from ss_runtime.api import stream_generate as stream_generate
    from ss_runtime.loaded_model import SpeculativeModel as SpeculativeModel
    from ss_runtime.prompt_cache import PromptCache as PromptCache
    from ss_runtime.prompt_cache import load_prompt_cache as load_prompt_cache
    from ss_runtime.prompt_cache import make_prompt_cache as make_prompt_cache
    from ss_runtime.prompt_cache import save_prompt_cache as save_prompt_cache
    from ss_runtime.settings import DraftSettings as DraftSettings
    from ss_runtime.settings import RuntimeSettings as RuntimeSettings

_HOMES = {
    "DraftSettings": "settings",
    "GenerationResponse": "api",
    "PromptCache": "prompt_cache",
    "RuntimeSettings": "settings",
    "SpeculativeModel": "loaded_model",
    "generate": "api",
    "load": "api",
    "load_prompt_cache": "prompt_cache",
    "make_logits_processors": "api",
    "make_prompt_cache": "prompt_cache",
    "make_sampler": "api",
    "save_prompt_cache": "prompt_cache",
    "stream_generate": "api",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """What is asked for, with the modules that it takes: a command loads none of the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
