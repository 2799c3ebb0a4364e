"""Deviations of vendors from OpenAI's chat completions, as data.

They describe the form of requests and the counting of tokens. Deviations in streams need no entry,
because the parser accepts all of them from every vendor. The vendor is determined where the
`ProviderAccess` is made; an unknown vendor gets the plainest form of requests.
"""

from collections.abc import Mapping

from msgspec import Struct

from culm.model.base import ProviderAccess

ANY_ID = r".+"

_PENALTIES = frozenset({"frequency_penalty", "presence_penalty"})
_SAMPLING = _PENALTIES | {"temperature", "top_p"}


class VendorQuirks(Struct, frozen=True, kw_only=True):
    """The deviations of one vendor; the defaults work with most vendors."""

    counts_when_asked: bool = True  # It reports tokens on request, by `stream_options`.
    prices_when_asked: bool = False  # It reports the cost on request, by `usage`.
    max_tokens: str = "max_tokens"  # Its name for the limit of an answer.
    # The only effort that it accepts together with tools; not the default of its models.
    effort_with_tools: str = ""
    nests_effort: bool = False  # `reasoning.effort` instead of `reasoning_effort`.
    takes_top_k: bool = False  # Vendors without it reject the request.
    refused_by_reasoners: frozenset[str] = frozenset()  # Settings that its reasoning models reject.
    call_id: str = ANY_ID  # A pattern that all call ids must match.
    # An assistant message to insert if a user message must not directly follow results.
    after_results: str = ""
    returns_reasoning: bool = False  # It wants `reasoning_content` returned with every answer.
    returns_details: bool = False  # It wants `reasoning_details` returned to the same model.
    # Replaces the signature of a call by another model. If not empty, calls have signatures, which
    # are returned to the same model.
    foreign_signature: str = ""
    counts_thoughts_apart: bool = False  # `completion_tokens` excludes reasoning tokens.


PLAIN = VendorQuirks()

_LOCAL = VendorQuirks(takes_top_k=True)
_BY_VENDOR: Mapping[str, VendorQuirks] = {
    "openai": VendorQuirks(
        max_tokens="max_completion_tokens",
        effort_with_tools="none",
        refused_by_reasoners=_SAMPLING,
        call_id=r".{1,40}",  # It rejects the longer ids of other vendors.
    ),
    "openrouter": VendorQuirks(
        prices_when_asked=True,
        nests_effort=True,
        takes_top_k=True,
        returns_details=True,
    ),
    "groq": PLAIN,
    # In thinking mode, which is the default, it rejects a history without the reasoning before a
    # call; otherwise it ignores reasoning.
    "deepseek": VendorQuirks(returns_reasoning=True),
    "mistral": VendorQuirks(
        counts_when_asked=False,  # It always reports tokens, and has rejected `stream_options`.
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
