/** A request that depends on the split between prefill and decode. Its answer must equal that of one server that computes it alone. */
export interface BoundaryCase {
  readonly name: string;
  readonly path: "/v1/completions" | "/v1/chat/completions" | "/v1/responses";
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
  return Array.from({ length: count }, (_, i) => `t${((7 * i * i + 3 * i + seed * 37) % 1000) + 10}`).join(
    " ",
  );
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
/** Guided decoding forces the tiny model to call a tool. The model chooses the tool and the arguments. */
const calling = { ...greedy, messages, tools, max_tokens: 24, ignore_eos: false };
const CALL = '"arguments":';
const callOfF = { type: "function", function: { name: "f" } };

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
  { name: "echo with logprobs", body: { ...greedy, prompt: one, echo: true, logprobs: 2 }, toyPasses: true },
  { name: "prompt_logprobs", body: { ...greedy, prompt: one, prompt_logprobs: 1 }, toyPasses: true },
  { name: "logprobs", body: { ...greedy, prompt: one, logprobs: 3 }, toyPasses: true },
  { name: "a stream with usage", body: { ...greedy, prompt: one, ...counted } },
  { name: "a stream of several prompts", body: { ...greedy, prompt: several, ...counted } },
  { name: "a stream with n 2", body: { ...sampled, prompt: one, n: 2, ...counted } },
  // Variants of cases that the toy proxy answers correctly for one prompt and n 1: several prompts, n 2, a stream.
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
  {
    name: "logprobs, n 2",
    body: { ...sampled, prompt: one, logprobs: 3, n: 2 },
    toyLeaks: true,
  },
];

const chats: readonly Omit<BoundaryCase, "path">[] = [
  { name: "a chat", body: { ...greedy, messages }, toyPasses: true },
  {
    name: "a chat with tools and chat_template_kwargs",
    body: { ...greedy, messages, tools, tool_choice: "none", chat_template_kwargs: { extra: "t77 t78" } },
    toyPasses: true,
  },
  { name: "a chat with n 2", body: { ...sampled, messages, n: 2 }, toyLeaks: true },
  {
    name: "a chat with max_completion_tokens and min_tokens",
    body: { ...greedy, messages, max_completion_tokens: 5, min_tokens: 5 },
  },
  { name: "a chat with prompt_logprobs", body: { ...greedy, messages, prompt_logprobs: 1 }, toyPasses: true },
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
];

const response = { model: "tiny", temperature: 0, max_output_tokens: 8, input: words(50, 6) };

/** Requests that a server refuses. The proxy must return the server's status and message. */
export const REFUSALS: readonly Omit<BoundaryCase, "path">[] = [
  { name: "temperature out of range", body: { ...greedy, prompt: one, temperature: -1 } },
  { name: "an unknown model", body: { ...greedy, prompt: one, model: "other" } },
  { name: "a prompt longer than max_model_len", body: { ...greedy, prompt: words(1100, 5) } },
  // The proxy sets `max_tokens` of the prefill leg, so P accepts the request and holds blocks. Only D refuses it.
  { name: "max_tokens larger than max_model_len", body: { ...greedy, prompt: one, max_tokens: 5000 } },
];

export const BOUNDARY_CASES: readonly BoundaryCase[] = [
  ...completions.map((each) => ({ ...each, path: "/v1/completions" as const })),
  ...chats.map((each) => ({ ...each, path: "/v1/chat/completions" as const })),
  { name: "the Responses API", path: "/v1/responses", body: response },
  { name: "the Responses API, streamed", path: "/v1/responses", body: { ...response, stream: true } },
];

/** The request with a new cache salt, so that a server finds nothing of it in its prefix cache. */
export const salted = (body: BoundaryCase["body"]) => ({ ...body, cache_salt: crypto.randomUUID() });

type Fields = Record<string, unknown>;

/** The part of an answer in which two servers must agree: no ids, no times; log probabilities rounded to three digits. */
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

/** The text, tool calls and finish reason of each choice of a stream, and its usage. How a server divides tokens into events is ignored. */
function ofStream(text: string): unknown {
  const events = text.split("\n\n").flatMap((event) => /^data: (.*)$/m.exec(event)?.[1] ?? []);
  const parts = events.filter((event) => event !== "[DONE]").map((event) => JSON.parse(event) as Fields);
  if (parts.some(({ type }) => String(type).startsWith("response."))) return ofResponse(parts);
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

/** The event types in their order without repetitions, the text of the events, and the response in the last event. */
function ofResponse(events: readonly Fields[]): unknown {
  const types = events.map(({ type }) => type);
  const isText = ({ type }: Fields) => type === "response.output_text.delta";
  return {
    types: types.filter((type, at) => type !== types[at - 1]),
    text: events.flatMap((event) => (isText(event) ? [event.delta] : [])).join(""),
    response: events.at(-1)?.response,
  };
}

const IDENTITY = new Set([
  "id",
  "created",
  "created_at",
  "kv_transfer_params",
  "system_fingerprint",
  "metrics",
  "prompt_tokens_details",
  "input_tokens_details",
]);

function withoutIdentity(value: unknown): unknown {
  if (typeof value === "number") return Number.isInteger(value) ? value : Math.round(value * 1000) / 1000;
  if (Array.isArray(value)) return value.map(withoutIdentity);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(
    Object.entries(value)
      .filter(([key]) => !IDENTITY.has(key))
      .map(([key, each]) => [key, withoutIdentity(each)]),
  );
}
