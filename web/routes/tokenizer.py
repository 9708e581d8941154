"""POST /tokenize and /detokenize, GET /tokenizer_info: requests that the tokenize stage answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from quart import Blueprint, Response

from pipeline.errors import RequestError
from pipeline.events import Answered, Cancelled, Failed, Submitted
from pipeline.process.failpoints import failpoint
from web.live.frontend import Frontend
from web.live.open_request import OpenRequest
from web.routes.answers import error_response, json_response
from web.routes.generations import answer
from web.routes.openapi import operation
from web.wire.anthropic.schemas import CountRequest, parse_count
from web.wire.endpoints import COUNT_ENDPOINT
from web.wire.idempotency import HEADER, SCHEMA
from web.wire.openai.errors import error_of
from web.wire.openai.tokenizer import (
    DESCRIBE_ENDPOINT,
    DETOKENIZE_ENDPOINT,
    TOKENIZE_ENDPOINT,
    DescribeRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
    refuse_too_many,
    text_body,
    tokens_body,
)
from web.wire.submit import Defaults

Asked = TokenizeRequest | DetokenizeRequest | DescribeRequest | CountRequest
COLLECT_S: Final = 1e-4
"""Pause before the next look for answers, for each one that is missing. All are looked at then, so to look after each
one takes most of the time of a body of very many."""
V1: Final = "/v1"
"""SGLang also serves the two POST routes below this path."""


def tokenizer_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("tokenizer", __name__)

    @routes.post(TOKENIZE_ENDPOINT)
    @routes.post(V1 + TOKENIZE_ENDPOINT)
    @operation("The token ids of a text or a conversation", TokenizeRequest, headers={HEADER: SCHEMA})
    async def tokenize() -> Response:
        return await answered(TOKENIZE_ENDPOINT, parse_tokenize)

    @routes.post(DETOKENIZE_ENDPOINT)
    @routes.post(V1 + DETOKENIZE_ENDPOINT)
    @operation("The text of token ids", DetokenizeRequest, headers={HEADER: SCHEMA})
    async def detokenize() -> Response:
        return await answered(DETOKENIZE_ENDPOINT, parse_detokenize)

    @routes.post(COUNT_ENDPOINT)
    @operation("How many tokens a conversation has, in Anthropic's form", CountRequest, headers={HEADER: SCHEMA})
    async def count() -> Response:
        return await answered(COUNT_ENDPOINT, parse_count)

    @routes.get(DESCRIBE_ENDPOINT)
    @operation("Describe the tokenizer: special tokens, chat template")
    async def describe() -> Response:
        return await answered(DESCRIBE_ENDPOINT, _describe)

    async def answered(endpoint: str, parse: Callable[[bytes], Asked]) -> Response:
        return await answer(frontend, endpoint, parse, _events, lambda opened: _response(opened, frontend))

    return routes


def _describe(body: bytes) -> DescribeRequest:
    return DescribeRequest()


def _events(request: Asked, *, frontend: str, model: str, defaults: Defaults) -> list[Submitted]:
    return request.submitted(frontend=frontend, model=model)


async def _response(opened: OpenRequest, frontend: Frontend) -> Response:
    answers: dict[int, Answered] = {}
    while True:
        for event in await opened.next():
            failpoint("web.before_first_byte")
            match event.event:
                case Answered() as answered:
                    answers[event.index] = answered
                case Failed() | Cancelled() as ended:
                    return error_response(error_of(ended))
            try:
                refuse_too_many(answers.values())
            except RequestError as error:
                return error_response(opened.refuse(error))
        if missing := len(opened.events) - len(answers):
            await asyncio.sleep(COLLECT_S * missing)
        else:
            in_order = [answers[index] for index in range(len(answers))]
            return json_response(_body(in_order, opened.event, frontend.readiness.context))


def _body(answers: Sequence[Answered], asked: Submitted, context: int) -> bytes:
    match asked.task:
        case "tokenize" if asked.endpoint == COUNT_ENDPOINT:
            return b'{"input_tokens":%d}' % len(answers[0].token_ids)
        case "tokenize":
            return tokens_body(answers, asked, context)
        case "detokenize":
            return text_body(answers, asked)
        case _:
            return answers[0].text.encode()
