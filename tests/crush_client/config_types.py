"""The configuration as the Crush client declares it (crush-wire §5.2), and where it panics."""

from tests.crush_client.golang import (
    Any,
    Bool,
    Bytes,
    Float,
    Int,
    Map,
    Ptr,
    Record,
    Slice,
    Str,
    Struct,
    Time,
    record,
)

STR, INT, FLOAT, BOOL, BYTES, TIME, ANY = Str(), Int(), Float(), Bool(), Bytes(), Time(), Any()
UINT32 = Int(0, (1 << 32) - 1)
TEXTS, TEXT_MAP, ANY_MAP = Slice(STR), Map(STR), Map(ANY)


class Panic(Exception):
    """The client dereferenced nil: the terminal shows a Go stack trace and the TUI exits."""


OAUTH_CLIENT = Struct(
    "oauth.Client",
    {"client_id?": STR, "client_secret?": STR, "auth_url?": STR, "token_url?": STR}
    | {"auth_style?": INT},
)
OAUTH_TOKEN = Struct(
    "oauth.Token",
    {"access_token": STR, "refresh_token?": STR, "expires_in": INT, "expires_at": INT}
    | {"client?": Ptr(OAUTH_CLIENT)},
)
SELECTED_MODEL = Struct(
    "SelectedModel",
    {"model": STR, "provider": STR, "reasoning_effort?": STR, "think?": BOOL, "max_tokens?": INT}
    | {"temperature?": Ptr(FLOAT), "top_p?": Ptr(FLOAT), "top_k?": Ptr(INT)}
    | {"frequency_penalty?": Ptr(FLOAT), "presence_penalty?": Ptr(FLOAT)}
    | {"provider_options?": ANY_MAP},
)
MODEL = Struct(
    "catwalk.Model",
    {"id": STR, "name": STR, "cost_per_1m_in": FLOAT, "cost_per_1m_out": FLOAT}
    | {"cost_per_1m_in_cached": FLOAT, "cost_per_1m_out_cached": FLOAT}
    | {"context_window": INT, "default_max_tokens": INT, "can_reason": BOOL}
    | {"reasoning_levels?": TEXTS, "default_reasoning_effort?": STR, "supports_attachments": BOOL}
    | {
        "options?": Struct(
            "catwalk.ModelOptions",
            {"temperature?": Ptr(FLOAT), "top_p?": Ptr(FLOAT), "top_k?": Ptr(INT)}
            | {"frequency_penalty?": Ptr(FLOAT), "presence_penalty?": Ptr(FLOAT)}
            | {"provider_options?": ANY_MAP},
        )
    },
)
PROVIDER_CONFIG = Struct(
    "ProviderConfig",
    {"id?": STR, "name?": STR, "base_url?": STR, "type?": STR, "api_key?": STR}
    | {"oauth?": Ptr(OAUTH_TOKEN), "disable?": BOOL, "system_prompt_prefix?": STR}
    | {"extra_headers?": TEXT_MAP, "extra_body?": ANY_MAP, "provider_options?": ANY_MAP}
    | {"aws_auth_refresh?": STR, "flat_rate?": BOOL, "discover_models?": Ptr(BOOL)}
    | {"models?": Slice(MODEL)},
)
MCP_CONFIG = Struct(
    "MCPConfig",
    {"type": STR, "command?": STR, "env?": TEXT_MAP, "args?": TEXTS, "url?": STR}
    | {"disabled?": BOOL, "disabled_tools?": TEXTS, "enabled_tools?": TEXTS, "timeout?": INT}
    | {"headers?": TEXT_MAP, "oauth?": BOOL, "oauth_client_id?": STR, "oauth_client_secret?": STR}
    | {"oauth_callback_port?": INT, "oauth_token?": Ptr(OAUTH_TOKEN)},
)
LSP_CONFIG = Struct(
    "LSPConfig",
    {"disabled?": BOOL, "command?": STR, "args?": TEXTS, "env?": TEXT_MAP, "filetypes?": TEXTS}
    | {"root_markers?": TEXTS, "init_options?": ANY_MAP, "options?": ANY_MAP, "timeout?": INT},
)
LIMITS = Struct("Completions", {"max_depth?": Ptr(INT), "max_items?": Ptr(INT)})
TUI_OPTIONS = Struct(
    "TUIOptions",
    {"compact_mode?": BOOL, "diff_mode?": STR, "completions?": LIMITS}
    | {"transparent?": Ptr(BOOL), "scrollbar?": STR},
)
OPTIONS = Struct(
    "Options",
    {"context_paths?": TEXTS, "global_context_paths?": TEXTS, "skills_paths?": TEXTS}
    | {"tui?": Ptr(TUI_OPTIONS), "debug?": BOOL, "debug_lsp?": BOOL}
    | {"disable_auto_summarize?": BOOL, "data_directory?": STR, "disabled_tools?": TEXTS}
    | {"disable_provider_auto_update?": BOOL, "disable_default_providers?": BOOL}
    | {
        "attribution?": Ptr(
            Struct(
                "Attribution",
                {"trailer_style?": STR, "co_authored_by?": Ptr(BOOL), "generated_with?": BOOL},
            )
        )
    }
    | {"disable_metrics?": BOOL, "initialize_as?": STR, "auto_lsp?": Ptr(BOOL)}
    | {"progress?": Ptr(BOOL), "notifications?": STR, "disabled_skills?": TEXTS},
)
_TIMED = Struct("ToolTimeout", {"timeout?": Ptr(INT)})  # Nanoseconds.
_HOOK = Struct("HookConfig", {"name?": STR, "matcher?": STR, "command": STR, "timeout?": INT})
CONFIG = Struct(
    "Config",
    {"$schema?": STR, "models?": Map(SELECTED_MODEL), "recent_models?": Map(Slice(SELECTED_MODEL))}
    | {"providers?": Ptr(Map(PROVIDER_CONFIG)), "mcp?": Map(MCP_CONFIG), "lsp?": Map(LSP_CONFIG)}
    | {"options?": Ptr(OPTIONS)}
    | {"permissions?": Ptr(Struct("Permissions", {"allowed_tools?": TEXTS}))}
    | {"tools?": Struct("Tools", {"ls?": LIMITS, "grep?": _TIMED, "glob?": _TIMED})}
    | {"hooks?": Map(Slice(_HOOK)), "env?": TEXT_MAP},
)


def check_config(config: Record | None) -> Record:
    """Dereference what the client dereferences without a check; raises `Panic` for nil."""
    if config is None:
        raise Panic("config is nil")
    options = config.find_record("options")
    if options is None:
        raise Panic("config.options is nil")
    if options.find_record("tui") is None:
        raise Panic("config.options.tui is nil")
    if config.values["providers"] is None:
        raise Panic("config.providers is nil")
    return config


def is_configured(config: Record) -> bool:
    """Return True if a provider is enabled; otherwise the TUI shows onboarding."""
    found = config.mapping("providers").values()
    return any(not record(provider).flag("disable") for provider in found)
