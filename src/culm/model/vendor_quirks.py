"""Where vendors deviate from OpenAI's chat completions, as data.

An accent says what a request must look like and how to count an answer. What servers do to a
stream needs no accent: the reader takes all of it from everybody. Who the vendor is, is decided
where the `Access` is made; one that nobody knows is spoken to in the plainest words.
"""

from collections.abc import Mapping

from msgspec import Struct

from culm.model.base import ProviderAccess

ANY_ID = r".+"

_PENALTIES = frozenset({"frequency_penalty", "presence_penalty"})
_SAMPLING = _PENALTIES | {"temperature", "top_p"}


class VendorQuirks(Struct, frozen=True, kw_only=True):
    """The deviations of one vendor; the defaults are what most take."""

    counts_when_asked: bool = True  # Tokens, for `stream_options`.
    prices_when_asked: bool = False  # Tells what an answer cost, for `usage`.
    max_tokens: str = "max_tokens"  # What it calls the bound of an answer.
    # With tools it refuses every effort but this, which is not what its models do by themselves.
    effort_with_tools: str = ""
    nests_effort: bool = False  # `reasoning.effort` instead of `reasoning_effort`.
    takes_top_k: bool = False  # Those who do not know it refuse the request.
    refused_by_reasoners: frozenset[str] = frozenset()  # Settings their reasoning models refuse.
    call_id: str = ANY_ID  # What an id of a call must match, whoever gave it.
    after_results: str = ""  # Said by the assistant where a user may not follow results.
    returns_reasoning: bool = False  # It wants `reasoning_content` back, with every answer.
    returns_details: bool = False  # It wants `reasoning_details` back, of the same model.
    # What stands for the signature of a call that another model made. Not empty: calls are signed,
    # and the signatures of the same model go back.
    foreign_signature: str = ""
    counts_thoughts_apart: bool = False  # `completion_tokens` is without those of the reasoning.


PLAIN = VendorQuirks()

_LOCAL = VendorQuirks(takes_top_k=True)
_BY_VENDOR: Mapping[str, VendorQuirks] = {
    "openai": VendorQuirks(
        max_tokens="max_completion_tokens",
        effort_with_tools="none",
        refused_by_reasoners=_SAMPLING,
        call_id=r".{1,40}",  # Longer ones, which others give, it refuses.
    ),
    "openrouter": VendorQuirks(
        prices_when_asked=True,
        nests_effort=True,
        takes_top_k=True,
        returns_details=True,
    ),
    "groq": PLAIN,
    # In thinking mode, which is the default, it refuses a history in which the thoughts behind
    # a call are missing; where it needs none it ignores them.
    "deepseek": VendorQuirks(returns_reasoning=True),
    "mistral": VendorQuirks(
        counts_when_asked=False,  # It counts unasked, and has refused to be asked.
        call_id=r"[a-zA-Z0-9]{9}",
        after_results="Understood.",
    ),
    "xai": VendorQuirks(refused_by_reasoners=_PENALTIES, counts_thoughts_apart=True),
    "gemini": VendorQuirks(
        foreign_signature="skip_thought_signature_validator",
        counts_thoughts_apart=True,
    ),
    "ollama": PLAIN,
    "llamacpp": _LOCAL,
    "lmstudio": _LOCAL,
    "vllm": _LOCAL,
}


def quirks_of(access: ProviderAccess) -> VendorQuirks:
    return _BY_VENDOR.get(access.vendor, PLAIN)
