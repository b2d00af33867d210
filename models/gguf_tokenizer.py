"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

Two kinds exist. `gpt2` is byte-level BPE with merges; how text is cut before merging has only a name in the file
(`tokenizer.ggml.pre`). `llama` is SentencePiece BPE, whose merges follow from the scores.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from models.errors import TokenizerError
from models.gguf_file import GGUFFile
from models.gguf_model import Fields
from models.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated", False), byte_level])


def _gpt2(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm(backend: Backend) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def _qwen2(backend: Backend) -> None:
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _split(rf"{_LETTERS}|\p{{N}}|{_REST}")


def _llama3(backend: Backend) -> None:
    backend.pre_tokenizer = _split(rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}")


PRE_TOKENIZERS: dict[str, Callable[[Backend], None]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _qwen2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
}
"""How each supported `tokenizer.ggml.pre` cuts text. Tests compare smollm and qwen2 with what transformers makes of
real models' texts, and the others with splits worked out by hand."""


def has_tokenizer(file: GGUFFile) -> bool:
    """Whether the file carries a vocabulary at all (some hold weights only)."""
    return "tokenizer.ggml.tokens" in file.metadata


def build_backend(file: GGUFFile) -> Backend:
    """The file's tokenizer, with its special tokens, and BOS and EOS as its flags say.

    Raises:
        CheckpointError: a key is missing or of a wrong type.
        TokenizerError: a kind of tokenizer or of cutting that isn't supported, or an inconsistent vocabulary.
    """
    fields = Fields(file)
    tokens = fields.get("tokenizer.ggml.tokens", list)
    types = fields.get("tokenizer.ggml.token_type", np.ndarray, np.full(len(tokens), _NORMAL)).tolist()
    if len(types) != len(tokens):
        raise TokenizerError(f"{file.path}: {len(tokens)} tokens, but {len(types)} token types")
    kind = fields.get("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{file.path}: the tokenizer is of kind {kind!r}; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) "
            "are supported"
        )
    if kind == "llama":
        # The converter writes user-defined runs of spaces as such; their names in SentencePiece are made of ▁.
        tokens = [t.replace(" ", "▁") if y == _USER_DEFINED else t for t, y in zip(tokens, types, strict=True)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"{file.path}: the vocabulary holds {len(tokens) - len(vocab)} tokens twice")
    try:
        backend = _byte_level(fields, vocab) if kind == "gpt2" else _sentencepiece(fields, vocab, types)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exceptions, for instance for a merge outside the vocabulary
        raise TokenizerError(f"{file.path}: the vocabulary is inconsistent: {error}") from None
    _add_tokens(backend, tokens, types)
    _add_bos_eos(backend, fields, tokens, kind)
    return backend


def _byte_level(fields: Fields, vocab: dict[str, int]) -> Backend:
    pre = fields.optional("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        what = "lacks 'tokenizer.ggml.pre'" if pre is None else f"has 'tokenizer.ggml.pre' = {pre!r}"
        raise TokenizerError(
            f"{fields.path}: the file {what}, so how it cuts text before merging isn't known; supported are "
            f"{', '.join(PRE_TOKENIZERS)}. Convert the model anew with a current llama.cpp, or load its "
            "Hugging Face folder"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", list)]
    model = BPE(vocab, merges, ignore_merges=PRE_TOKENIZERS[pre] is _llama3)
    backend = Backend(model)
    PRE_TOKENIZERS[pre](backend)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: Fields, vocab: dict[str, int], types: list[int]) -> Backend:
    scores = fields.get("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != len(vocab):
        raise TokenizerError(f"{fields.path}: {len(vocab)} tokens, but {len(scores)} scores")
    unknown = next((token for token, index in vocab.items() if types[index] == _UNKNOWN), None)
    index = fields.optional("tokenizer.ggml.unknown_token_id", int)
    if unknown is None and index is not None:
        unknown = next((token for token, at in vocab.items() if at == index), None)
    model = BPE(vocab, _merges_by_score(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    backend = Backend(model)
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", bool, True):
        spaces.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(decode)
    return backend


def _merges_by_score(vocab: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """All ways to join two tokens into a third, best score first; ties in order of ids, as SentencePiece has it."""
    merges: list[tuple[str, str]] = []
    merged: list[int] = []
    for token, index in vocab.items():
        cuts = [
            (vocab[left], vocab[right], left, right)
            for left, right in ((token[:k], token[k:]) for k in range(1, len(token)))
            if left in vocab and right in vocab
        ]
        cuts.sort()
        merges += [(left, right) for _, _, left, right in cuts]
        merged += [index] * len(cuts)
    order = np.argsort(-scores[np.array(merged, np.int64)].astype(np.float64), kind="stable")
    return [merges[i] for i in order]


def _add_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special (left out of decoded text); user-defined ones are only matched whole.

    Runs of ▁ are matched after spaces have become ▁, all others before.
    """
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    backend.add_tokens([AddedToken(t, normalized="▁" in t, special=False) for t in defined])


def _add_bos_eos(backend: Backend, fields: Fields, tokens: list[str], kind: str) -> None:
    """Follow the file's add_bos_token and add_eos_token; without them, llama.cpp's defaults."""
    adds_by_default = kind == "llama" or PRE_TOKENIZERS.get(fields.get("tokenizer.ggml.pre", str, "")) is _llama3
    template, special = ["$A"], []
    for which, default in (("bos", adds_by_default), ("eos", False)):
        if not fields.get(f"tokenizer.ggml.add_{which}_token", bool, default):
            continue
        index = fields.optional(f"tokenizer.ggml.{which}_token_id", int)
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise TokenizerError(f"{fields.path}: the {which} token has id {index}, there are {len(tokens)} tokens")
        template.insert(0 if which == "bos" else 2, tokens[index])
        special.append((tokens[index], index))
    if special:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def gguf_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The file's tokenizer with its special tokens, end-of-turn ids and chat templates; None if it has no vocabulary.

    Raises:
        CheckpointError, TokenizerError: as `build_backend`.
    """
    if not has_tokenizer(file):
        return None
    fields = Fields(file)
    backend = build_backend(file)
    special = {}
    for role, key in _ROLES.items():
        index = fields.optional(f"tokenizer.ggml.{key}_token_id", int)
        token = backend.id_to_token(index) if index is not None and index >= 0 else None
        if token is not None:
            special[role] = token
    ends = [fields.optional(f"tokenizer.ggml.{key}_token_id", int) for key in ("eot", "eom")]
    prefix = "tokenizer.chat_template"
    templates = {
        "default" if key == prefix else key[len(prefix) + 1 :]: value
        for key, value in file.metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
    }
    return Tokenizer(backend, special, [e for e in ends if e is not None], templates, source=str(file.path))
