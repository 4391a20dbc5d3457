"""The form that an answer is to have, as OpenAI's and vLLM's clients ask for it, in decode's words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from client.gateway.limits import MAX_CHOICES, MAX_KEYS, MAX_TOKEN_IDS, at_most
from client.gateway.no_ops import RENAMED
from client.gateway.strict import Strict, drop_unknown


class JsonSchema(BaseModel):
    """The schema, with a name that nobody looks at."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, values: Any) -> Any:
        return drop_unknown(cls, values)


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """Of llama.cpp's and Together's interface, which instructor's mode JSON_SCHEMA asks in."""


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredRequest(Strict):
    """The ways to ask for a form; one of them."""

    response_format: ResponseFormat | None = None
    """OpenAI's. With `strict` a schema that cannot be enforced as a whole is refused; without, what cannot be is left out."""
    structured_outputs: Annotated[dict[str, Any], at_most(MAX_KEYS, "keys")] | None = None
    """vLLM's, and decode's own."""
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True), at_most(MAX_CHOICES, "strings")] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True), at_most(MAX_TOKEN_IDS, "token ids")] | None = None
    """vLLM's; none where there is none in it."""
    _sent: dict[str, str] = PrivateAttr(default_factory=dict)
    """Fields that the client calls otherwise, and how."""

    @model_validator(mode="wrap")
    @classmethod
    def _keep_names(cls, values: Any, handler: ModelWrapValidatorHandler[StructuredRequest]) -> StructuredRequest:
        request = handler(values)
        if isinstance(values, dict):
            request._sent = {RENAMED[key]: key for key in values if key in RENAMED and RENAMED[key] not in values}
        return request

    @model_validator(mode="after")
    def _check_forms(self) -> StructuredRequest:
        self.allowed_token_ids = self.allowed_token_ids or None
        if self.structured_outputs is not None and self.structured_outputs == self._guided():
            # By both names, for servers of any age, as guidance's client sends it.
            for name in (*_GUIDED, "guided_whitespace_pattern"):
                setattr(self, name, None)
        given = self._given_forms()
        if len(given) > 1:
            raise ValueError(f"the answer can have one form: give one of {', '.join(self._sent.get(name, name) for name in given)}")
        if self.guided_whitespace_pattern is not None and given != ["guided_json"]:
            raise ValueError("guided_whitespace_pattern has no effect without guided_json")
        if isinstance(self.response_format, SchemaFormat) and self.response_format.json_schema.schema_ is None:
            raise ValueError("response_format.json_schema.schema is missing")
        return self

    def _given_forms(self) -> list[str]:
        """Fields that ask for a form, which text is not."""
        return [name for name in _FORMS if getattr(self, name) is not None and not isinstance(getattr(self, name), TextFormat)]

    def form(self) -> dict[str, Any] | None:
        """decode's `structured_outputs`."""
        if isinstance(self.response_format, ObjectFormat):
            schema = self.response_format.schema_
            return {"json_object": True} if schema is None else {"json": schema, "is_lenient": True}
        if isinstance(self.response_format, SchemaFormat):
            own = self.response_format.json_schema
            return {"json": own.schema_, "is_lenient": not own.strict}
        if self.structured_outputs is not None:
            return self.structured_outputs
        return self._guided() or None

    def _guided(self) -> dict[str, Any]:
        """What is asked for by vLLM's older names."""
        names = (*_GUIDED, "guided_whitespace_pattern")
        return {name.removeprefix("guided_"): value for name in names if (value := getattr(self, name)) is not None}

    def server_names(self) -> dict[str, str]:
        """What of a request decode calls otherwise: by its names, the client's own."""
        given = next(iter(self._given_forms()), "structured_outputs")
        if given == "structured_outputs":
            return self._sent
        if given != "response_format":
            sent = self._sent.get(given, given)
            names = {"structured_outputs": sent, f"structured_outputs.{given.removeprefix('guided_')}": sent}
            return {**self._sent, **names, "structured_outputs.whitespace_pattern": "guided_whitespace_pattern"}
        place = "json_schema.schema" if isinstance(self.response_format, SchemaFormat) else "schema"
        names = {"structured_outputs": given, "structured_outputs.json": f"{given}.{place}", "structured_outputs.json_object": given}
        return {**self._sent, **names}


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids")
_FORMS = ("response_format", "structured_outputs", *_GUIDED)
