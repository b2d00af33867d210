"""The tokenizer of a Hugging Face folder: tokenizer.json, with what tokenizer_config.json adds to it."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from models.errors import TokenizerError
from models.hf_folder import read_optional_json
from models.regular_file import check_regular
from models.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_UNSUPPORTED = ("tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, None if it holds no file of one.

    Raises:
        CheckpointError: a file isn't valid JSON, or no file.
        TokenizerError: tokenizer.json isn't a tokenizer, contradicts tokenizer_config.json, or only an older format
            is there; a template isn't UTF-8.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        found = [name for name in _UNSUPPORTED if (folder / name).exists()]
        if not found:
            return None
        raise TokenizerError(
            f"{folder}: has {found[0]} but no tokenizer.json, the only format read; make one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    check_regular(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{path}: isn't a tokenizer that can be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    config = read_optional_json(folder / "tokenizer_config.json")
    special = _special_tokens(folder, config)
    _add_declared_tokens(folder, backend, config)
    _mark_special(backend, list(special.values()) + _more_special(config))
    _follow_bos_eos_flags(backend, config, special)
    return Tokenizer(backend, special, templates=_templates(folder, config), source=str(folder))


def _text(token: Any) -> str | None:
    """A special token is stored as its text or as an object with the text in it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    older = read_optional_json(folder / "special_tokens_map.json")
    texts = {role: _text(config.get(role)) or _text(older.get(role)) for role in _ROLES}
    return {role: text for role, text in texts.items() if text is not None}


def _more_special(config: dict[str, Any]) -> list[str]:
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    values = list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else []
    return [text for text in map(_text, values) if text is not None]


def _add_declared_tokens(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add tokens that only tokenizer_config.json knows; they must get the ids it states."""
    declared = config.get("added_tokens_decoder")
    entries = declared.items() if isinstance(declared, dict) else ()
    tokens = [(int(index), token) for index, token in entries if index.isdecimal() and isinstance(token, dict)]
    for index, token in sorted(tokens, key=lambda entry: entry[0]):
        text = _text(token)
        if text is None or backend.token_to_id(text) is not None:
            continue
        flags = {k: bool(token.get(k)) for k in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != index:
            raise TokenizerError(
                f"{folder}: tokenizer_config.json gives {text!r} the id {index}, after tokenizer.json it would be "
                f"{backend.token_to_id(text)}"
            )


def _mark_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Named special tokens are matched whole and left out of decoded text, even if tokenizer.json doesn't say so."""
    added = backend.get_added_tokens_decoder()
    for text in texts:
        index = backend.token_to_id(text)
        if index is not None and not (index in added and added[index].special):
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _follow_bos_eos_flags(backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """add_bos_token and add_eos_token, where stated, overrule tokenizer.json's template."""
    if not isinstance(config.get("add_bos_token"), bool) and not isinstance(config.get("add_eos_token"), bool):
        return
    template, used = ["$A"], []
    for role, flag, place in (("bos_token", "add_bos_token", 0), ("eos_token", "add_eos_token", 2)):
        index = backend.token_to_id(special[role]) if role in special else None
        if config.get(flag) is True and index is not None:
            template.insert(place, special[role])
            used.append((special[role], index))
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own (the newer way) win over tokenizer_config.json's entry."""
    stored = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        for entry in stored:
            name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if isinstance(name, str) and isinstance(text, str):
                templates[name] = text
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            templates[name] = _template_text(path)
    return templates


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: isn't UTF-8: {error}") from None
