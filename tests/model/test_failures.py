"""Vendors' error responses and the failures shown to the user.

The bodies are written from the vendors' public documentation.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.model.base import ProviderAccess
from culm.model.failures import (
    ErrorClass,
    ProviderError,
    ProviderPeer,
    classify,
    on_no_stream,
    on_status,
    on_stream_error,
    parse_problem,
    peer_of,
)
from culm.wire.codec import Json

PEER = ProviderPeer("acme", "api.acme.example", "model-1")


def error(message: str, kind: str | None = None, code: Json = None) -> Json:
    """Return an error in the format of OpenAI and compatible vendors."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def gemini(code: int, message: str, status: str, *reasons: str) -> Json:
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": r} for r in reasons]
    return [{"error": {"code": code, "message": message, "status": status, "details": details}}]


def anthropic(kind: str, message: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}}


def mistral(message: Json, kind: str, code: str | None = None) -> Json:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


AUTH = [
    pytest.param(401, error("Incorrect API key provided", "x", "invalid_api_key"), id="openai"),
    pytest.param(401, error("No auth credentials found", code=401), id="openrouter"),
    pytest.param(401, error("Invalid API Key", "invalid_request_error"), id="groq"),
    pytest.param(401, error("Authentication Fails", "authentication_error"), id="deepseek"),
    pytest.param(401, {"message": "Unauthorized", "request_id": "1"}, id="mistral"),
    pytest.param(
        400,
        {"code": "Client specified an invalid argument", "error": "Incorrect API key provided: x"},
        id="xai",
    ),
    pytest.param(
        400, gemini(400, "API key not valid.", "INVALID_ARGUMENT", "API_KEY_INVALID"), id="gemini"
    ),
    pytest.param(401, anthropic("authentication_error", "invalid x-api-key"), id="anthropic"),
    pytest.param(403, anthropic("permission_error", "not allowed"), id="anthropic 403"),
    pytest.param(None, anthropic("authentication_error", "no"), id="anthropic in a stream"),
]
QUOTA = [
    pytest.param(
        429,
        error("You exceeded your current quota", "insufficient_quota", "insufficient_quota"),
        id="openai",
    ),
    pytest.param(402, error("This request requires more credits", code=402), id="openrouter"),
    pytest.param(402, error("Insufficient Balance", "unknown_error"), id="deepseek"),
    pytest.param(403, {"error": "Your team has used all available credits"}, id="xai"),
    pytest.param(
        400,
        anthropic("invalid_request_error", "Your credit balance is too low to access the API"),
        id="anthropic",
    ),
    pytest.param(402, anthropic("billing_error", "pay"), id="anthropic 402"),
    pytest.param(None, anthropic("billing_error", "pay"), id="anthropic in a stream"),
]
CONTEXT = [
    pytest.param(
        400,
        error("This model's maximum context length is 8192 tokens", "x", "context_length_exceeded"),
        id="openai",
    ),
    pytest.param(
        400,
        error("This endpoint's maximum context length is 32768 tokens", code=400),
        id="openrouter",
    ),
    pytest.param(
        400,
        {
            "error": {
                "message": "Provider returned error",
                "code": 400,
                "metadata": {"raw": '{"message":"prompt is too long: 9 tokens"}'},
            }
        },
        id="behind openrouter",
    ),
    pytest.param(
        400, error("Please reduce the length of the messages or completion.", "x"), id="groq"
    ),
    pytest.param(
        400, error("This model's maximum context length is 65536 tokens.", "x"), id="deepseek"
    ),
    pytest.param(
        400,
        mistral("Prompt contains 40000 tokens, too large for model with 32768 maximum", "x"),
        id="mistral",
    ),
    pytest.param(
        400,
        {"error": "This model's maximum prompt length is 131072 but the request contains 200000"},
        id="xai",
    ),
    pytest.param(
        400,
        gemini(400, "The input token count (9) exceeds the maximum allowed", "INVALID_ARGUMENT"),
        id="gemini",
    ),
    pytest.param(
        400,
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size",
                "type": "exceed_context_size_error",
            }
        },
        id="llama.cpp",
    ),
    pytest.param(
        400,
        {"error": "The number of tokens to keep is greater than the context length"},
        id="lm studio",
    ),
    pytest.param(500, error("context size exceeded", "server_error"), id="as a 500"),
    pytest.param(
        400, anthropic("invalid_request_error", "prompt is too long: 9 > 8"), id="anthropic"
    ),
    pytest.param(413, error("prompt is too long", "x"), id="as a 413"),
]
FILTER = [
    pytest.param(400, error("rejected", "x", "content_policy_violation"), id="openai"),
    pytest.param(
        400,
        error("triggering Azure OpenAI's content management policy", None, "content_filter"),
        id="azure",
    ),
    pytest.param(
        403,
        {"error": {"code": 403, "message": "Your input was flagged", "metadata": {"reasons": []}}},
        id="openrouter",
    ),
    pytest.param(400, error("Content Exists Risk", "invalid_request_error"), id="deepseek"),
    pytest.param(
        400,
        anthropic("invalid_request_error", "Output blocked by content filtering policy"),
        id="anthropic",
    ),
]
MODEL = [
    pytest.param(
        404,
        error("The model `x` does not exist", "invalid_request_error", "model_not_found"),
        id="openai",
    ),
    pytest.param(400, error("x is not a valid model ID", code=400), id="openrouter"),
    pytest.param(400, error("`x` has been retired", "x", "model_decommissioned"), id="groq"),
    pytest.param(400, error("Model Not Exist", "invalid_request_error"), id="deepseek"),
    pytest.param(400, mistral("Invalid model: x", "invalid_model", "1500"), id="mistral"),
    pytest.param(404, {"code": "Not found", "error": "The model x does not exist"}, id="xai"),
    pytest.param(
        404, gemini(404, "models/x is not found for API version v1main", "NOT_FOUND"), id="gemini"
    ),
    pytest.param(404, error('model "x" not found, try pulling it first', "api_error"), id="ollama"),
    pytest.param(404, error("No models loaded.", "invalid_request_error"), id="lm studio"),
    pytest.param(404, mistral("The model `x` does not exist.", "NotFoundError"), id="vllm"),
    pytest.param(404, anthropic("not_found_error", "model: claude-x"), id="anthropic"),
]
DOWN = [
    pytest.param(500, error("The server had an error", "server_error"), id="openai"),
    pytest.param(503, gemini(503, "The model is overloaded.", "UNAVAILABLE"), id="gemini"),
    pytest.param(529, anthropic("overloaded_error", "Overloaded"), id="anthropic"),
    pytest.param(500, anthropic("api_error", "Internal server error"), id="anthropic 500"),
    pytest.param(502, None, id="without a word"),
]
RATE = [
    pytest.param(429, error("Rate limit reached", "tokens", "rate_limit_exceeded"), id="openai"),
    pytest.param(
        429,
        gemini(429, "You exceeded your current quota, please check billing", "RESOURCE_EXHAUSTED"),
        id="gemini",
    ),
    pytest.param(429, anthropic("rate_limit_error", "slow down"), id="anthropic"),
    pytest.param(None, anthropic("rate_limit_error", "slow down"), id="anthropic in a stream"),
]


def title_of(status: int | None, body: Json) -> tuple[str, bool]:
    """Return the title of a failure with a status or inside a stream, and if it is transient."""
    if status is None:
        failure = on_stream_error(PEER, body["error"])
    else:
        failure = on_status(PEER, status, {}, json.dumps(body).encode() if body else b"")
    assert failure.hint, "every failure needs a hint"
    return failure.title, failure.transient


@pytest.mark.parametrize(("status", "body"), AUTH)
def test_a_refused_key_is_an_authentication_problem(status: int | None, body: Json) -> None:
    assert title_of(status, body) == ("Authentication problem", False)


@pytest.mark.parametrize(("status", "body"), QUOTA)
def test_an_empty_account_is_a_permanent_failure(status: int | None, body: Json) -> None:
    assert title_of(status, body) == ("Out of credit", False)


@pytest.mark.parametrize(("status", "body"), CONTEXT)
def test_a_conversation_that_is_too_long_is_recognized(status: int, body: Json) -> None:
    assert title_of(status, body) == ("The conversation is too long", False)


@pytest.mark.parametrize(("status", "body"), FILTER)
def test_refused_content_is_recognized(status: int, body: Json) -> None:
    assert title_of(status, body) == ("The content was refused", False)


@pytest.mark.parametrize(("status", "body"), MODEL)
def test_a_missing_model_is_recognized(status: int, body: Json) -> None:
    assert title_of(status, body) == ("Model not found", False)


@pytest.mark.parametrize(("status", "body"), DOWN)
def test_a_provider_that_is_down_is_a_transient_failure(status: int, body: Json) -> None:
    assert title_of(status, body) == ("The provider has a problem", True)


@pytest.mark.parametrize(("status", "body"), RATE)
def test_a_rate_limit_is_a_transient_failure(status: int | None, body: Json) -> None:
    assert title_of(status, body) == ("Too many requests", True)


def test_a_call_that_the_provider_cannot_parse_is_a_transient_failure() -> None:
    body = error("Failed to call a function.", "invalid_request_error", "tool_use_failed")
    assert title_of(400, body) == ("The model made a broken call", True)


def test_a_request_that_is_too_large_is_a_permanent_failure() -> None:
    body = anthropic("request_too_large", "Request exceeds the maximum size")
    assert title_of(413, body) == ("The request is too large", False)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, error("Invalid value for 'temperature'", "invalid_request_error")),
        (400, error("messages: roles must alternate", "invalid_request_error")),
        (400, error("tool 'context' is defined twice", "invalid_request_error")),
        (400, anthropic("invalid_request_error", "max_tokens: Field required")),
        (422, {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs"}]}),
    ],
)
def test_an_unclassified_error_is_a_permanent_refusal(status: int, body: Json) -> None:
    failure = on_status(PEER, status, {}, json.dumps(body).encode())
    assert (failure.title, failure.transient) == ("The provider refused", False)


@pytest.mark.parametrize(
    ("status", "body", "hint"),
    [
        (
            401,
            error("no"),
            "check the key of provider acme: `culm models` shows where it comes from",
        ),
        (404, error("The model m does not exist"), "`culm models acme` lists what it offers"),
        (
            404,
            None,
            "check the base_url of provider acme; `culm models acme` lists what it offers",
        ),
        (
            400,
            error("prompt is too long"),
            "summarize the session, or choose a model with a larger context",
        ),
    ],
)
def test_a_hint_names_the_fix(status: int, body: Json, hint: str) -> None:
    sent = b"" if body is None else json.dumps(body).encode()
    assert on_status(PEER, status, {}, sent).hint == hint


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            mistral({"detail": [{"loc": ["body", "n"], "msg": "Extra", "type": "x"}]}, "x"),
            "body.n: Extra",
        ),
        ({"error": {"message": "a", "metadata": {"raw": "b"}}}, "a: b"),
        ({"error": {"message": "{curly} {who}"}}, "{curly} {who}"),
    ],
)
def test_the_message_is_found_in_every_error_format(body: Json, message: str) -> None:
    failure = on_status(PEER, 400, {}, json.dumps(body).encode())
    assert failure.message == f"acme refused (400): {message}"


# --- secrets

SECRETS = {
    "the key": ProviderAccess(base_url="https://h.example/v1", api_key="s3cr3t-value-12"),
    "a key with odd letters": ProviderAccess(
        base_url="https://h.example/v1", api_key="s3cr3t/va=lue+12"
    ),
    "a header": ProviderAccess(
        base_url="https://h.example/v1", headers={"X-Key": "Token s3cr3t-value-12"}
    ),
    "a password": ProviderAccess(base_url="https://user:s3cr3t-value-12@h.example/v1"),
    "a query": ProviderAccess(base_url="https://h.example/v1?key=s3cr3t-value-12"),
    "an address that is none": ProviderAccess(base_url="http://[::1/v1", api_key="s3cr3t-value-12"),
}


@pytest.mark.parametrize("access", SECRETS.values(), ids=SECRETS.keys())
def test_no_echoed_secret_of_the_access_is_shown(access: ProviderAccess) -> None:
    peer = peer_of(access, "model-1", "acme")
    echo = "s3cr3t-value-12 s3cr3t/va=lue+12 s3cr3t%2Fva%3Dlue%2B12"
    shown = [
        on_status(peer, 401, {}, json.dumps(error(echo)).encode()),
        on_status(peer, 307, {"Location": f"https://h.example/?k={echo}"}, b""),
        on_status(peer, 500, {}, echo.encode()),
        on_stream_error(peer, echo),
        on_no_stream(peer, "text/html", echo.encode()),
    ]
    secret = "/va" if "/va" in access.api_key else "-value"
    for failure in shown:
        text = f"{failure.title} {failure.message} {failure.hint}"
        assert f"s3cr3t{secret}" not in text
        assert "s3cr3t%2F" not in text or secret != "/va"
    assert "s3cr3t" not in repr(peer)


def test_a_very_short_key_is_not_masked_in_texts() -> None:
    peer = peer_of(ProviderAccess(api_key="x", headers={"X-Mode": "fast"}), "model-1", "acme")
    assert peer.quote("a fast box") == "a fast box"


# --- any response

FIELDS = ("error", "message", "detail", "details", "msg", "loc", "code", "status", "type", "raw")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner),
)


@given(JSON, st.none() | st.integers(400, 599))
def test_every_body_is_classified(body: Json, status: int | None) -> None:
    problem = parse_problem(json.dumps(body).encode())
    assert isinstance(classify(status, problem), ErrorClass)
    assert isinstance(ProviderError.of(body).message, str)


@given(st.binary(max_size=100))
def test_any_bytes_give_a_message(body: bytes) -> None:
    assert isinstance(parse_problem(body).message, str)
