"""An independent check of Anthropic's rules for a request."""

import json
import re
from base64 import b64decode

from culm.wire.codec import Json

NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


def faults(body: dict[str, Json], *, sees_images: bool) -> list[str]:
    """Return the violations for which Anthropic would refuse the request."""
    messages: list[Json] = body["messages"]
    roles = [message["role"] for message in messages]
    found = [] if roles == (["user", "assistant"] * len(roles))[: len(roles)] else ["no turns"]
    found += [] if roles and roles[-1] == "user" else ["the last word is not a user's"]
    called: list[str] = []
    for n, message in enumerate(messages):
        content: list[Json] = message["content"]
        found += [] if content else ["an empty message"]
        for block in content:
            found += block_faults(block, message["role"], sees_images=sees_images)
        answers = [b["tool_use_id"] for b in content if b["type"] == "tool_result"]
        if sorted(answers) != sorted(called):
            found.append(f"message {n} answers {answers} to {called}")
        if [b["type"] for b in content[: len(answers)]] != ["tool_result"] * len(answers):
            found.append("results are not first")
        called = [b["id"] for b in content if b["type"] == "tool_use"]
    found += [] if not called else ["calls without results"]
    blocks = [block for message in messages for block in message["content"]]
    ids = [b["id"] for b in blocks if b["type"] == "tool_use"]
    found += [] if len(ids) == len(set(ids)) else ["an id twice"]
    found += [] if not ids or body.get("tools") else ["calls, but no tools"]
    marks = json.dumps(body).count('"cache_control"')
    found += [] if marks <= 4 else ["too many caches"]
    return found + thinking_faults(body)


def block_faults(block: Json, role: str, *, sees_images: bool) -> list[str]:
    match block["type"]:
        case "text":
            return [] if block["text"].strip() else ["empty text"]
        case "tool_use" if role == "assistant":
            good = NAME.fullmatch(block["id"]) and NAME.fullmatch(block["name"])
            return [] if good and isinstance(block["input"], dict) else [f"a bad call: {block}"]
        case "tool_result" if role == "user":
            content: Json = block["content"]
            if isinstance(content, str):
                return [] if content.strip() else ["an empty result"]
            kinds = {inner["type"] for inner in content}
            is_wrong = not content or (block.get("is_error") and kinds != {"text"})
            inside = [f for b in content for f in block_faults(b, role, sees_images=sees_images)]
            return [*inside, *(["a bad result"] if is_wrong else [])]
        case "image" if role == "user" and sees_images:
            source = block["source"]
            if source["type"] == "url":
                return [] if source["url"].startswith("https://") else ["a bad address"]
            kinds = ("image/jpeg", "image/png", "image/gif", "image/webp")
            good = source["media_type"] in kinds and b64decode(source["data"], validate=True)
            return [] if good else ["a bad image"]
        case "thinking" if role == "assistant":
            return [] if block["signature"] else ["thinking without a signature"]
        case "redacted_thinking" if role == "assistant":
            return [] if block["data"] else ["nothing was redacted"]
        case kind:
            return [f"{kind} by {role}"]


def thinking_faults(body: dict[str, Json]) -> list[str]:
    if "thinking" not in body:
        return []
    found = [f"{name} with thinking" for name in ("temperature", "top_p", "top_k") if name in body]
    if not 1024 <= body["thinking"]["budget_tokens"] < body["max_tokens"]:
        found.append("a bad budget")
    messages: list[Json] = body["messages"]
    while messages[-1]["content"][0]["type"] == "tool_result":
        *messages, called, _ = messages
        if "thinking" not in called["content"][0]["type"]:
            found.append("a call without thinking")
    return found
