import type { Endpoint } from "@kv/fleet/front-end";
import { KV_PARAMS_TEXT } from "@kv/testing/http/fake-upstream";

type Fields = Readonly<Record<string, unknown>>;

/** What an instance answers. */
export interface ScriptedAnswer {
  readonly contentType: string;
  readonly text: string;
}

const JSON_TYPE = "application/json";
const STREAM_TYPE = "text/event-stream; charset=utf-8";
/** Of all tokens D counts 99 as cached, as it got their KV from P. */
const usage = {
  prompt_tokens: 102,
  completion_tokens: 2,
  total_tokens: 104,
  prompt_tokens_details: { cached_tokens: 99 },
};
const responseUsage = { input_tokens: 102, input_tokens_details: { cached_tokens: 99 } };
const messageUsage = { input_tokens: 3, cache_read_input_tokens: 99 };
/** A host that no client gets to know. */
export const HIDDEN_HOST = "10.9.8.7";
const kv_transfer_params = { remote_host: HIDDEN_HOST, note: 'a"}]' };
/** In UTF-8 its characters have 1 to 4 bytes. */
const TEXT = 'aé€🎈\n"[DONE]"';

/** A prefill instance's answer to its leg. */
export function prefillAnswer(endpoint: Endpoint): ScriptedAnswer {
  const own = { "/v1/responses": '"output":[]', "/v1/messages": '"content":[]' } as Readonly<
    Record<string, string>
  >;
  const members =
    own[endpoint] ??
    `"choices":[{"index":0,"text":"x"}],"usage":{"prompt_tokens_details":{"cached_tokens":2}}`;
  return {
    contentType: JSON_TYPE,
    text: `{"id":"é-1",${members},"kv_transfer_params":${KV_PARAMS_TEXT}}`,
  };
}

/**
 * A decode instance's answer to a body, as vLLM gives it: each prompt and copy has a choice of its
 * own.
 */
export function decodeAnswer(endpoint: Endpoint, body: Fields): ScriptedAnswer {
  const streamed = body.stream === true;
  const contentType = streamed ? STREAM_TYPE : JSON_TYPE;
  if (endpoint === "/v1/responses")
    return { contentType, text: streamed ? RESPONSE_STREAM : RESPONSE };
  if (endpoint === "/v1/messages")
    return { contentType, text: streamed ? MESSAGE_STREAM : MESSAGE };
  const prompts =
    Array.isArray(body.prompt) && typeof body.prompt[0] !== "number" ? body.prompt.length : 1;
  const count = prompts * Number(body.n ?? 1);
  const isChat = endpoint === "/v1/chat/completions";
  const indices = Array.from({ length: count }, (_, index) => index);
  if (!streamed) {
    const choices = indices.map((index) =>
      isChat
        ? { index, message: { role: "assistant", content: TEXT }, routed_experts: "AAAA" }
        : { index, text: TEXT, routed_experts: "AAAA" },
    );
    const answer = { id: "é-1", created: 1, choices, usage, kv_transfer_params };
    return { contentType, text: JSON.stringify(answer) };
  }
  const event = (choices: readonly object[], more: object = {}) =>
    `data: ${JSON.stringify({ id: "é-1", created: 1, choices, ...more })}\n\n`;
  const piece = (index: number, content: string) =>
    event(
      [isChat ? { index, delta: { content } } : { index, text: content }],
      // vLLM reports them with the last token.
      content === "z" ? { kv_transfer_params } : {},
    );
  const pieces = [TEXT, "z"].flatMap((content) => indices.map((index) => piece(index, content)));
  return { contentType, text: `${pieces.join("")}${event([], { usage })}data: [DONE]\n\n` };
}

const named = (name: string, data: object) =>
  `event: ${name}\ndata: ${JSON.stringify({ type: name, ...data })}\n\n`;
const output = [{ type: "message", content: [{ type: "output_text", text: TEXT }] }];
const response = {
  id: "é-1",
  output,
  usage: responseUsage,
  status: "completed",
  kv_transfer_params,
};
const RESPONSE = JSON.stringify(response);
const RESPONSE_STREAM =
  named("response.created", { response: { id: "é-1" } }) +
  named("response.output_text.delta", { delta: TEXT }) +
  named("response.completed", { response });
const content = [{ type: "text", text: TEXT }];
const message = { id: "é-1", type: "message", content, usage: messageUsage, kv_transfer_params };
const MESSAGE = JSON.stringify(message);
const MESSAGE_STREAM =
  named("message_start", { message: { ...message, content: [] } }) +
  named("content_block_delta", { index: 0, delta: { type: "text_delta", text: TEXT } }) +
  named("message_stop", {});

/**
 * The events of a stream in the order of the choices. Where streams are merged, the order between
 * choices is chance.
 */
export function byChoice(text: string): string {
  if (!text.startsWith("data: ")) return text;
  const indexOf = (event: string) =>
    Number(/"index":(\d+)/.exec(event)?.[1] ?? Number.MAX_SAFE_INTEGER);
  const events = text.split("\n\n").map((event) => ({ event, index: indexOf(event) }));
  return events
    .sort((a, b) => a.index - b.index)
    .map(({ event }) => event)
    .join("\n\n");
}
