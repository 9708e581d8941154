"""POST /tokenize and /detokenize, GET /tokenizer_info: requests like any other, which the tokenizer itself answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
from quart import Blueprint, Response, g, request

from pipeline.errors import RequestError
from pipeline.events import Answered, Cancelled, Failed
from pipeline.failpoints import failpoint
from pipeline.log import Quota
from web.answers import error_response, json_response, name_unknown
from web.frontend import Frontend, OpenRequest
from web.idempotency import HEADER, SCHEMA, once_of
from web.openai.errors import error_of
from web.openai.tokenizer import (
    DESCRIBE_ENDPOINT,
    DETOKENIZE_ENDPOINT,
    TOKENIZE_ENDPOINT,
    DescribeRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
    text_body,
    tokens_body,
)
from web.operations import operation

logger = structlog.get_logger()

Asked = TokenizeRequest | DetokenizeRequest | DescribeRequest
V1: Final = "/v1"
"""SGLang has both of what is posted below it, too."""


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

    @routes.get(DESCRIBE_ENDPOINT)
    @operation("What the tokenizer is: its special tokens, its chat template")
    async def describe() -> Response:
        return await answered(DESCRIBE_ENDPOINT, lambda _: DescribeRequest())

    async def answered(endpoint: str, parse: Callable[[bytes], Asked]) -> Response:
        quota: Quota | None = g.quota
        body = await request.get_data(False, False, False)
        try:
            asked = parse(body)
            once = once_of(request.headers.get(HEADER), endpoint, body, scope=quota.key if quota else "")
            frontend.admit()
            event = asked.submitted(frontend=frontend.name, model=frontend.readiness.resolve(asked.model))
        except RequestError as error:  # the canonical line of a request that has no history
            logger.info("request", status=error.status, error=error.code, param=error.param)
            raise
        opened = await frontend.open([event], once=once, quota=quota)
        try:
            response = await _response(opened, frontend.readiness.context)
        except Exception:
            raise opened.break_off() from None
        response.headers["x-minisgl-uid"] = opened.uid
        name_unknown(response, asked.unknown)
        return response

    return routes


async def _response(opened: OpenRequest, context: int) -> Response:
    while True:
        for heard in await opened.next():
            failpoint("web.before_first_byte")
            match heard.event:
                case Answered() as answer:
                    return json_response(_body(answer, opened, context))
                case Failed() | Cancelled() as ended:
                    return error_response(error_of(ended))


def _body(answer: Answered, opened: OpenRequest, context: int) -> bytes:
    match opened.event.task:
        case "tokenize":
            return tokens_body(answer, opened.event, context)
        case "detokenize":
            return text_body(answer)
        case _:
            return answer.text.encode()
