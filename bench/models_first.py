"""The cost of the first use of an adapter in a process that has aiohttp already.

Usage: python -m bench.models_first NAME     (a child: milliseconds of CPU on stdout, then it ends)
"""

import asyncio
import importlib
import sys
import time

import aiohttp

from culm.model.base import LanguageModel, ModelSetup, ProviderAccess
from culm.wire.config import Model as ModelInfo

# Repeated here: an import of `models_sides.py` would load more than a first use has.
ADAPTERS = {"openai": "OpenAiModel", "anthropic": "AnthropicModel"}


async def first_ms(name: str) -> float:
    async with aiohttp.ClientSession() as http:
        access = ProviderAccess(name, base_url="http://127.0.0.1:9/v1", api_key="k")
        setup = ModelSetup(http, access, ModelInfo(id="demo-1"), 30.0, 30.0)
        start_s = time.process_time()
        module = importlib.import_module(f"culm.model.{name}.model")
        made: LanguageModel = getattr(module, ADAPTERS[name])(setup)
        took_ms = (time.process_time() - start_s) * 1000
        assert callable(made.stream)
        return took_ms


if __name__ == "__main__":
    print(asyncio.run(first_ms(sys.argv[1])))
