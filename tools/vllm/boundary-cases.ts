/**
 * It depends on the split between prefill and decode. The answer must equal that of one server
 * alone.
 */
export interface BoundaryCase {
  readonly name: string;
  readonly path: "/v1/completions" | "/v1/chat/completions" | "/v1/responses" | "/v1/messages";
  readonly body: Readonly<Record<string, unknown>>;
  /** Without it in the answer the case tests nothing. */
  readonly mustContain?: string | undefined;
}

/** `more` is added to the usual body of the route. */
type Row = readonly [name: string, more: BoundaryCase["body"], mustContain?: string];

const casesOf = (path: BoundaryCase["path"], base: object, rows: readonly Row[]): BoundaryCase[] =>
  rows.map(([name, more, mustContain]) => ({
    name,
    path,
    body: { ...base, ...more },
    mustContain,
  }));

export function words(count: number, seed: number): string {
  return Array.from(
    { length: count },
    (_, i) => `t${((7 * i * i + 3 * i + seed * 37) % 1000) + 10}`,
  ).join(" ");
}

const one = words(70, 1);
const several = [words(40, 2), words(100, 3)];
/**
 * The engine of a D that computes prompt log probabilities dies when the transfer parameters name
 * too few blocks.
 */
const twoBlocksEach = [words(40, 2), words(50, 3)];
const ids = [one, ...several].map((text) => text.split(" ").map((word) => Number(word.slice(1))));
const messages = [{ role: "user", content: words(50, 4) }];
const parameters = {
  type: "object",
  properties: { a: { enum: ["x", "y", "z"] } },
  required: ["a"],
  additionalProperties: false,
};
const tools = ["f", "g"].map((name) => ({ type: "function", function: { name, parameters } }));
const greedy = { model: "tiny", temperature: 0, max_tokens: 8, ignore_eos: true };
const sampled = { temperature: 0.9, seed: 7 };
const counted = { stream: true, stream_options: { include_usage: true } };
const CALL = '"arguments":';
const OBJECT = '{\\"a\\":';
const format = { type: "json_schema", json_schema: { name: "a", schema: parameters } };
const structured = { ignore_eos: false, max_tokens: 24, response_format: format };

const completions = casesOf("/v1/completions", { ...greedy, prompt: one }, [
  ["one prompt", {}],
  ["several prompts", { prompt: several }],
  ["several prompts as token ids", { prompt: ids.slice(1) }],
  ["one prompt as token ids", { prompt: ids[0] }],
  ["n 3", { ...sampled, n: 3 }],
  ["several prompts, n 2", { ...sampled, prompt: several, n: 2 }],
  ["min_tokens 6", { min_tokens: 6 }],
  ["max_tokens 1", { max_tokens: 1 }],
  ["echo", { echo: true }],
  ["echo with logprobs", { echo: true, logprobs: 2 }],
  ["prompt_logprobs", { prompt_logprobs: 1 }],
  ["logprobs", { logprobs: 3 }],
  ["a stream with usage", counted],
  ["a stream of several prompts", { prompt: several, ...counted }],
  ["a stream with n 2", { ...sampled, n: 2, ...counted }],
  ["max_tokens 1, several prompts", { prompt: several, max_tokens: 1 }],
  ["max_tokens 1, streamed", { max_tokens: 1, min_tokens: 1, ...counted }],
  ["echo, n 2", { ...sampled, echo: true, n: 2 }],
  ["echo with logprobs, several prompts", { prompt: twoBlocksEach, echo: true, logprobs: 2 }],
  ["prompt_logprobs, several prompts", { prompt: twoBlocksEach, prompt_logprobs: 1 }],
  ["logprobs, n 2", { ...sampled, logprobs: 3, n: 2 }],
  // P's leg has none of these members.
  ["response_format", structured, OBJECT],
  ["stop", { stop: [" t1", " t2"] }],
  ["logprob_token_ids", { logprobs: 1, logprob_token_ids: [11, 12] }],
  [
    "echo with logprobs and logprob_token_ids",
    { echo: true, logprobs: 1, logprob_token_ids: [11, 12] },
  ],
]);

const uncalled = {
  tools,
  tool_choice: "none",
  chat_template_kwargs: { extra: "t77 t78" },
};
/** Guided decoding forces the tiny model to call a tool. */
const calling = { tools, max_tokens: 24, ignore_eos: false, tool_choice: "required" };
const callOfF = { type: "function", function: { name: "f" } };
const chats = casesOf("/v1/chat/completions", { ...greedy, messages }, [
  ["a chat", {}],
  ["a chat with tools and chat_template_kwargs", uncalled],
  ["a chat with n 2", { ...sampled, n: 2 }],
  ["a chat with max_completion_tokens and min_tokens", { max_completion_tokens: 5, min_tokens: 5 }],
  ["a chat with prompt_logprobs", { prompt_logprobs: 1 }],
  ["a chat, streamed", counted],
  ["a chat with tools and chat_template_kwargs, n 2", { ...sampled, ...uncalled, n: 2 }],
  ["a chat with prompt_logprobs, n 2", { ...sampled, prompt_logprobs: 1, n: 2 }],
  ["tool_choice with a named function", { ...calling, tool_choice: callOfF }, CALL],
  ["tool_choice required", calling, CALL],
  ["tool_choice required, streamed", { ...calling, ...counted }, CALL],
  ["tool_choice required, n 3", { ...calling, ...sampled, n: 3 }, CALL],
  [
    "a chat with response_format and logprobs",
    { ...structured, logprobs: true, top_logprobs: 2 },
    OBJECT,
  ],
]);

const longer = { max_output_tokens: 24 };
const functions = ["f", "g"].map((name) => ({ type: "function", name, parameters }));
const response = { model: "tiny", temperature: 0, max_output_tokens: 8, input: words(50, 6) };
const responses = casesOf("/v1/responses", response, [
  ["the Responses API", {}],
  ["the Responses API, streamed", { stream: true }],
  [
    "the Responses API with a text format",
    { ...longer, text: { format: { ...format.json_schema, type: "json_schema" } } },
    OBJECT,
  ],
  ...["required", { type: "function", name: "f" }].flatMap((tool_choice) =>
    [false, true].map(
      (stream): Row => [
        `the Responses API with the tool choice ${JSON.stringify(tool_choice)}${stream ? ", streamed" : ""}`,
        { ...longer, tools: functions, tool_choice, stream },
        CALL,
      ],
    ),
  ),
]);

const messageTools = ["f", "g"].map((name) => ({ name, input_schema: parameters }));
const message = { model: "tiny", temperature: 0, max_tokens: 8, messages };
const messagesApi = casesOf("/v1/messages", message, [
  ...[false, true].flatMap((stream): Row[] => {
    const how = stream ? ", streamed" : "";
    return [
      [`a message${how}`, { stream }],
      [`a message with a system prompt${how}`, { system: words(9, 7), stream }],
      [
        `a message with tools that are not called${how}`,
        { tools: messageTools, tool_choice: { type: "none" }, stream },
      ],
      [`a message with stop_sequences${how}`, { stop_sequences: [" t1", " t2"], stream }],
      // With one token of its arguments, vLLM answers 400.
      ...[{ type: "tool", name: "f" }, { type: "tool", name: "g" }, { type: "any" }].map(
        (tool_choice): Row => [
          `a message with the tool choice ${JSON.stringify(tool_choice)}${how}`,
          { max_tokens: 24, tools: messageTools, tool_choice, stream },
          "tool_use",
        ],
      ),
    ];
  }),
  [
    "a message with an output format",
    {
      max_tokens: 24,
      output_config: { format: { type: "json_schema", schema: parameters } },
    },
    OBJECT,
  ],
]);

/** The proxy must return the server's status and message. */
export const REFUSALS = casesOf("/v1/completions", { ...greedy, prompt: one }, [
  ["temperature out of range", { temperature: -1 }],
  ["an unknown model", { model: "other" }],
  ["a prompt longer than max_model_len", { prompt: words(1100, 5) }],
  // P's leg has no stop strings, and `max_tokens` of its own: only D refuses these requests.
  ["more stop strings than the server takes", { stop: ["a", "b", "c", "d", "e"] }],
  ["max_tokens larger than max_model_len", { max_tokens: 5000 }],
]);

export const greedyOf = (prompt: string | readonly string[], max_tokens: number) => ({
  model: "tiny",
  temperature: 0,
  prompt,
  max_tokens,
});

export const BOUNDARY_CASES = [...completions, ...chats, ...responses, ...messagesApi];

export const salted = (body: BoundaryCase["body"]) => ({
  ...body,
  cache_salt: crypto.randomUUID(),
});

type Fields = Record<string, unknown>;

/** No ids, no times; log probabilities rounded. */
export async function comparable(response: Response): Promise<unknown> {
  const text = await response.text();
  const type = (response.headers.get("content-type") ?? "").split(";")[0];
  const body = type === "text/event-stream" ? ofStream(text) : parsed(text);
  return { status: response.status, type, body: withoutIdentity(body) };
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** How a server divides tokens into events is ignored. */
function ofStream(text: string): unknown {
  const events = text.split("\n\n").flatMap((event) => /^data: (.*)$/m.exec(event)?.[1] ?? []);
  const parts = events
    .filter((event) => event !== "[DONE]")
    .map((event) => JSON.parse(event) as Fields);
  if (parts.some(({ type }) => String(type).startsWith("response."))) return ofResponse(parts);
  if (parts.some(({ type }) => type === "message_start")) return ofMessage(parts);
  const choices: Fields[] = [];
  let usage: unknown;
  for (const chunk of parts) {
    usage = chunk.usage ?? usage;
    for (const choice of (chunk.choices ?? []) as Fields[]) {
      const index = Number(choice.index);
      const delta = (choice.delta ?? {}) as Fields;
      const soFar = choices[index] ?? { text: "", calls: [], finish: null };
      const more = String(choice.text ?? delta.content ?? "");
      choices[index] = {
        text: `${String(soFar.text)}${more}`,
        calls: callsOf(soFar.calls as Fields[], (delta.tool_calls ?? []) as Fields[]),
        finish: choice.finish_reason ?? soFar.finish,
      };
    }
  }
  return { choices, usage, done: events.at(-1) === "[DONE]" };
}

function callsOf(soFar: readonly Fields[], deltas: readonly Fields[]): Fields[] {
  const calls = [...soFar];
  for (const { index, function: made } of deltas) {
    const { name, arguments: more = "" } = made as Fields;
    const call = calls[Number(index)];
    calls[Number(index)] = {
      name: call?.name ?? name,
      arguments: `${String(call?.arguments ?? "")}${String(more)}`,
    };
  }
  return calls;
}

/** Event types without repetitions. */
function ofResponse(events: readonly Fields[]): unknown {
  const types = events.map(({ type }) => type);
  const isText = ({ type }: Fields) => type === "response.output_text.delta";
  return {
    types: types.filter((type, at) => type !== types[at - 1]),
    text: events.flatMap((event) => (isText(event) ? [event.delta] : [])).join(""),
    response: events.at(-1)?.response,
  };
}

function ofMessage(events: readonly Fields[]): unknown {
  const types = events.map(({ type }) => type);
  const blocks: string[] = [];
  for (const { index, content_block: begun, delta } of events) {
    const { text = "", partial_json: json = "", thinking = "" } = (delta ?? {}) as Fields;
    const { type, name } = (begun ?? {}) as Fields;
    if (index === undefined) continue;
    const at = Number(index);
    blocks[at] =
      `${blocks[at] ?? [type, name].join(" ")}${String(text)}${String(json)}${String(thinking)}`;
  }
  const message = events.find(({ type }) => type === "message_start")?.message;
  const end = events.find(({ type }) => type === "message_delta");
  return { types: types.filter((type, at) => type !== types[at - 1]), blocks, message, end };
}

const IDENTITY = new Set([
  "id",
  "call_id",
  "created",
  "created_at",
  "kv_transfer_params",
  "system_fingerprint",
  "metrics",
  "prompt_tokens_details",
  "input_tokens_details",
]);

/** Only a server that computes the prompt counts its blocks as written to its cache. */
function tokensOf({ input_tokens: input, output_tokens, ...cached }: Fields): Fields {
  const { cache_creation_input_tokens: created = 0, cache_read_input_tokens: read = 0 } = cached;
  return { input_tokens: Number(input) + Number(created) + Number(read), output_tokens };
}

export function withoutIdentity(value: unknown): unknown {
  if (typeof value === "number")
    return Number.isInteger(value) ? value : Math.round(value * 1000) / 1000;
  if (Array.isArray(value)) return value.map(withoutIdentity);
  if (typeof value !== "object" || value === null) return value;
  if ("cache_creation_input_tokens" in value) return tokensOf(value as Fields);
  return Object.fromEntries(
    Object.entries(value)
      .filter(([key]) => !IDENTITY.has(key))
      .map(([key, each]) => [key, withoutIdentity(each)]),
  );
}
