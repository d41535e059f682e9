"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from types import MappingProxyType

from fastapi import APIRouter
from starlette.requests import Request

from specdec.gateway.api.errors import invalid
from specdec.gateway.api.tokens import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfoAnswer,
)
from specdec.gateway.chat.messages import to_chat_messages
from specdec.gateway.http.events import while_connected
from specdec.gateway.parts import Parts
from specdec.gateway.routes.answers import JsonResponse, body_of, errors
from specdec.gateway.translation.sampling import add_token_ids
from specdec.gateway.upstream.caller import CallerStub
from specdec.v1 import coordinator_pb2 as api

_TOKENIZE_NAMES = MappingProxyType(
    {
        "text": "prompt",
        "tools_json": "tools",
        "template_variables_json": "chat_template_kwargs",
        "documents_json": "documents",
    }
)
_DETOKENIZE_NAMES = MappingProxyType({"token_ids": "tokens"})


def token_routes(parts: Parts) -> APIRouter:
    """The routes of the tokenizer."""
    router = APIRouter(tags=["tokens"])

    @router.post(
        "/tokenize",
        responses={200: {"model": TokenizeAnswer}, **errors(has_body=True)},
        openapi_extra=body_of(TokenizeBody),
    )
    async def tokenize(request: Request) -> JsonResponse:
        """Token ids of a text or a conversation."""
        request.state.field_names = _TOKENIZE_NAMES
        asked, body = await parts.reader.read(request, TokenizeBody, _tokenize_request)
        return JsonResponse(
            await while_connected(request.receive, _tokenize(parts.caller(request, asked.model), asked, body))
        )

    @router.post(
        "/detokenize",
        responses={200: {"model": DetokenizeAnswer}, **errors(has_body=True)},
        openapi_extra=body_of(DetokenizeBody),
    )
    async def detokenize(request: Request) -> JsonResponse:
        """Text of token ids."""
        request.state.field_names = _DETOKENIZE_NAMES
        asked, body = await parts.reader.read(request, DetokenizeBody, _detokenize_request)
        caller = parts.caller(request, asked.model)
        return JsonResponse({"prompt": (await caller.call("Detokenize", body)).text})

    @router.get("/tokenizer_info", responses={200: {"model": TokenizerInfoAnswer}, **errors(has_body=False)})
    async def tokenizer_info(request: Request, model: str | None = None) -> JsonResponse:
        """The special tokens and the chat template of a model's tokenizer."""
        caller = parts.caller(request, model, holds=False)
        info = await caller.call("GetModelInfo", api.GetModelInfoRequest(with_tokenizer=True))
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template")
        told = {name: getattr(info.tokenizer, name) for name in names if info.tokenizer.HasField(name)}
        return JsonResponse(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **told,
                "vocab_size": info.tokenizer.vocab_size or info.target.vocab_size,
                "model_max_length": info.max_model_len,
            }
        )

    return router


def _detokenize_request(asked: DetokenizeBody) -> api.DetokenizeRequest:
    body, ids = api.DetokenizeRequest(model=asked.model or "", skip_special_tokens=False), api.TokenIds()
    add_token_ids(ids, asked.tokens)
    body.token_ids.MergeFrom(ids.token_ids)
    return body


def _tokenize_request(asked: TokenizeBody) -> api.TokenizeRequest:
    body = api.TokenizeRequest(model=asked.model or "", add_special_tokens=asked.add_special_tokens)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "one of prompt and messages is required")
    if asked.messages is None:
        body.text = asked.prompt or ""
    else:
        body.messages.CopyFrom(
            to_chat_messages(
                asked.messages,
                asked.tools,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=bool(asked.continue_final_message),
                template_variables=asked.chat_template_kwargs,
                documents=asked.documents,
                chat_template=asked.chat_template,
            )
        )
    return body


async def _tokenize(caller: CallerStub, asked: TokenizeBody, body: api.TokenizeRequest) -> dict[str, object]:
    answer = await caller.call("Tokenize", body)
    info = await caller.call("GetModelInfo", api.GetModelInfoRequest())
    told: dict[str, object] = {
        "count": len(answer.token_ids),
        "max_model_len": info.max_model_len,
        "tokens": list(answer.token_ids),
    }
    if asked.return_token_strs:
        told["token_strs"] = list(answer.tokens)
    return told
