/**
 * A request that depends on the split between prefill and decode. Its answer must equal that of one
 * server that computes it alone.
 */
export interface BoundaryCase {
  readonly name: string;
  readonly path: "/v1/completions" | "/v1/chat/completions" | "/v1/responses" | "/v1/messages";
  readonly body: Readonly<Record<string, unknown>>;
  /** A string that the answer must contain. Without it the case tests nothing. */
  readonly mustContain?: string;
  /** The toy proxy answers correctly too. The case only guards `kv-proxy` against regressions. */
  readonly toyPasses?: true;
  /** The toy proxy answers correctly, but P holds some of the blocks until their lease expires. */
  readonly toyLeaks?: true;
}

/** A prompt of words of the tiny model's vocabulary. Another `seed` gives another prompt. */
export function words(count: number, seed: number): string {
  return Array.from(
    { length: count },
    (_, i) => `t${((7 * i * i + 3 * i + seed * 37) % 1000) + 10}`,
  ).join(" ");
}

const one = words(70, 1);
const several = [words(40, 2), words(100, 3)];
/**
 * Two prompts of two blocks each. A D that computes prompt log probabilities uses no cached blocks,
 * and its engine dies when the transfer parameters name too few blocks.
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
const sampled = { ...greedy, temperature: 0.9, seed: 7 };
const counted = { stream: true, stream_options: { include_usage: true } };
/**
 * Guided decoding forces the tiny model to call a tool. The model chooses the tool and the
 * arguments.
 */
const calling = { ...greedy, messages, tools, max_tokens: 24, ignore_eos: false };
const CALL = '"arguments":';
const callOfF = { type: "function", function: { name: "f" } };
const format = { type: "json_schema", json_schema: { name: "a", schema: parameters } };
const OBJECT = '{\\"a\\":';

const completions: readonly Omit<BoundaryCase, "path">[] = [
  { name: "one prompt", body: { ...greedy, prompt: one }, toyPasses: true },
  { name: "several prompts", body: { ...greedy, prompt: several } },
  { name: "several prompts as token ids", body: { ...greedy, prompt: ids.slice(1) } },
  { name: "one prompt as token ids", body: { ...greedy, prompt: ids[0] }, toyPasses: true },
  { name: "n 3", body: { ...sampled, prompt: one, n: 3 }, toyLeaks: true },
  { name: "several prompts, n 2", body: { ...sampled, prompt: several, n: 2 } },
  { name: "min_tokens 6", body: { ...greedy, prompt: one, min_tokens: 6 } },
  { name: "max_tokens 1", body: { ...greedy, prompt: one, max_tokens: 1 }, toyPasses: true },
  { name: "echo", body: { ...greedy, prompt: one, echo: true }, toyPasses: true },
  {
    name: "echo with logprobs",
    body: { ...greedy, prompt: one, echo: true, logprobs: 2 },
    toyPasses: true,
  },
  {
    name: "prompt_logprobs",
    body: { ...greedy, prompt: one, prompt_logprobs: 1 },
    toyPasses: true,
  },
  { name: "logprobs", body: { ...greedy, prompt: one, logprobs: 3 }, toyPasses: true },
  { name: "a stream with usage", body: { ...greedy, prompt: one, ...counted } },
  { name: "a stream of several prompts", body: { ...greedy, prompt: several, ...counted } },
  { name: "a stream with n 2", body: { ...sampled, prompt: one, n: 2, ...counted } },
  // Variants of cases that the toy proxy answers correctly for one prompt and n 1: several prompts,
  // n 2, a stream.
  { name: "max_tokens 1, several prompts", body: { ...greedy, prompt: several, max_tokens: 1 } },
  {
    name: "max_tokens 1, streamed",
    body: { ...greedy, prompt: one, max_tokens: 1, min_tokens: 1, ...counted },
  },
  { name: "echo, n 2", body: { ...sampled, prompt: one, echo: true, n: 2 }, toyLeaks: true },
  {
    name: "echo with logprobs, several prompts",
    body: { ...greedy, prompt: twoBlocksEach, echo: true, logprobs: 2 },
    toyLeaks: true,
  },
  {
    name: "prompt_logprobs, several prompts",
    body: { ...greedy, prompt: twoBlocksEach, prompt_logprobs: 1 },
    toyLeaks: true,
  },
  { name: "logprobs, n 2", body: { ...sampled, prompt: one, logprobs: 3, n: 2 }, toyLeaks: true },
  // P's leg has none of these members.
  {
    name: "response_format",
    body: { ...greedy, prompt: one, ignore_eos: false, max_tokens: 24, response_format: format },
    mustContain: OBJECT,
    toyPasses: true,
  },
  { name: "stop", body: { ...greedy, prompt: one, stop: [" t1", " t2"] }, toyPasses: true },
  {
    name: "logprob_token_ids",
    body: { ...greedy, prompt: one, logprobs: 1, logprob_token_ids: [11, 12] },
    toyPasses: true,
  },
  {
    name: "echo with logprobs and logprob_token_ids",
    body: { ...greedy, prompt: one, echo: true, logprobs: 1, logprob_token_ids: [11, 12] },
    toyPasses: true,
  },
];

const chats: readonly Omit<BoundaryCase, "path">[] = [
  { name: "a chat", body: { ...greedy, messages }, toyPasses: true },
  {
    name: "a chat with tools and chat_template_kwargs",
    body: {
      ...greedy,
      messages,
      tools,
      tool_choice: "none",
      chat_template_kwargs: { extra: "t77 t78" },
    },
    toyPasses: true,
  },
  { name: "a chat with n 2", body: { ...sampled, messages, n: 2 }, toyLeaks: true },
  {
    name: "a chat with max_completion_tokens and min_tokens",
    body: { ...greedy, messages, max_completion_tokens: 5, min_tokens: 5 },
  },
  {
    name: "a chat with prompt_logprobs",
    body: { ...greedy, messages, prompt_logprobs: 1 },
    toyPasses: true,
  },
  { name: "a chat, streamed", body: { ...greedy, messages, ...counted } },
  {
    name: "a chat with tools and chat_template_kwargs, n 2",
    body: {
      ...sampled,
      messages,
      tools,
      tool_choice: "none",
      chat_template_kwargs: { extra: "t77 t78" },
      n: 2,
    },
    toyLeaks: true,
  },
  {
    name: "a chat with prompt_logprobs, n 2",
    body: { ...sampled, messages, prompt_logprobs: 1, n: 2 },
    toyLeaks: true,
  },
  {
    name: "tool_choice with a named function",
    body: { ...calling, tool_choice: callOfF },
    mustContain: CALL,
    toyPasses: true,
  },
  {
    name: "tool_choice required",
    body: { ...calling, tool_choice: "required" },
    mustContain: CALL,
    toyPasses: true,
  },
  {
    name: "tool_choice required, streamed",
    body: { ...calling, tool_choice: "required", ...counted },
    mustContain: CALL,
  },
  {
    name: "tool_choice required, n 3",
    body: { ...calling, temperature: 0.9, seed: 7, tool_choice: "required", n: 3 },
    mustContain: CALL,
    toyLeaks: true,
  },
  {
    name: "a chat with response_format and logprobs",
    body: {
      ...calling,
      tools: undefined,
      response_format: format,
      logprobs: true,
      top_logprobs: 2,
    },
    mustContain: OBJECT,
    toyPasses: true,
  },
];

const response = { model: "tiny", temperature: 0, max_output_tokens: 8, input: words(50, 6) };
const functions = ["f", "g"].map((name) => ({ type: "function", name, parameters }));
const responses: readonly Omit<BoundaryCase, "path">[] = [
  { name: "the Responses API", body: response },
  { name: "the Responses API, streamed", body: { ...response, stream: true } },
  {
    name: "the Responses API with a text format",
    body: {
      ...response,
      max_output_tokens: 24,
      text: { format: { ...format.json_schema, type: "json_schema" } },
    },
    mustContain: OBJECT,
  },
  ...["required", { type: "function", name: "f" }].flatMap((tool_choice) =>
    [false, true].map((stream) => ({
      name: `the Responses API with the tool choice ${JSON.stringify(tool_choice)}${stream ? ", streamed" : ""}`,
      body: { ...response, max_output_tokens: 24, tools: functions, tool_choice, stream },
      mustContain: '"arguments":',
    })),
  ),
];

const message = { model: "tiny", temperature: 0, max_tokens: 8, messages };
const messageTools = ["f", "g"].map((name) => ({ name, input_schema: parameters }));
const callingMessage = { ...message, max_tokens: 24, tools: messageTools };
const messagesApi: readonly Omit<BoundaryCase, "path">[] = [
  ...[false, true].flatMap((stream) => {
    const how = stream ? ", streamed" : "";
    return [
      { name: `a message${how}`, body: { ...message, stream } },
      {
        name: `a message with a system prompt${how}`,
        body: { ...message, system: words(9, 7), stream },
      },
      {
        name: `a message with tools that are not called${how}`,
        body: { ...message, tools: messageTools, tool_choice: { type: "none" }, stream },
      },
      {
        name: `a message with stop_sequences${how}`,
        body: { ...message, stop_sequences: [" t1", " t2"], stream },
      },
      // With one token of its arguments, vLLM answers 400.
      ...[{ type: "tool", name: "f" }, { type: "tool", name: "g" }, { type: "any" }].map(
        (tool_choice) => ({
          name: `a message with the tool choice ${JSON.stringify(tool_choice)}${how}`,
          body: { ...callingMessage, tool_choice, stream },
          mustContain: "tool_use",
        }),
      ),
    ];
  }),
  {
    name: "a message with an output format",
    body: {
      ...message,
      max_tokens: 24,
      output_config: { format: { type: "json_schema", schema: parameters } },
    },
    mustContain: OBJECT,
  },
];

/** Requests that a server refuses. The proxy must return the server's status and message. */
export const REFUSALS: readonly Omit<BoundaryCase, "path">[] = [
  { name: "temperature out of range", body: { ...greedy, prompt: one, temperature: -1 } },
  { name: "an unknown model", body: { ...greedy, prompt: one, model: "other" } },
  { name: "a prompt longer than max_model_len", body: { ...greedy, prompt: words(1100, 5) } },
  // P's leg has no stop strings, and `max_tokens` of its own, so P accepts these requests and holds
  // blocks. Only D refuses them.
  {
    name: "more stop strings than the server takes",
    body: { ...greedy, prompt: one, stop: ["a", "b", "c", "d", "e"] },
  },
  {
    name: "max_tokens larger than max_model_len",
    body: { ...greedy, prompt: one, max_tokens: 5000 },
  },
];

export const BOUNDARY_CASES: readonly BoundaryCase[] = [
  ...completions.map((each) => ({ ...each, path: "/v1/completions" as const })),
  ...chats.map((each) => ({ ...each, path: "/v1/chat/completions" as const })),
  ...responses.map((each) => ({ ...each, path: "/v1/responses" as const })),
  ...messagesApi.map((each) => ({ ...each, path: "/v1/messages" as const })),
];

/** The request with a new cache salt, so that a server finds nothing of it in its prefix cache. */
export const salted = (body: BoundaryCase["body"]) => ({
  ...body,
  cache_salt: crypto.randomUUID(),
});

type Fields = Record<string, unknown>;

/**
 * The part of an answer in which two servers must agree: no ids, no times; log probabilities
 * rounded to three digits.
 */
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

/**
 * The text, tool calls and finish reason of each choice of a stream, and its usage. How a server
 * divides tokens into events is ignored.
 */
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

/**
 * The event types in their order without repetitions, the text of the events, and the response in
 * the last event.
 */
function ofResponse(events: readonly Fields[]): unknown {
  const types = events.map(({ type }) => type);
  const isText = ({ type }: Fields) => type === "response.output_text.delta";
  return {
    types: types.filter((type, at) => type !== types[at - 1]),
    text: events.flatMap((event) => (isText(event) ? [event.delta] : [])).join(""),
    response: events.at(-1)?.response,
  };
}

/**
 * The event types in their order without repetitions, the content of each block, and what the first
 * and the last events say of the message.
 */
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

/**
 * The usage of a message. A server that computes the prompt counts its full blocks as written to
 * its cache, and a D, which gets them, does not.
 */
function tokensOf({ input_tokens: input, output_tokens, ...cached }: Fields): Fields {
  const { cache_creation_input_tokens: created = 0, cache_read_input_tokens: read = 0 } = cached;
  return { input_tokens: Number(input) + Number(created) + Number(read), output_tokens };
}

/** A parsed answer without ids and times, log probabilities rounded to three digits. */
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
