/** A request that touches the boundary between prefill and decode. Its answer must be that of one server which computes it alone. */
export interface BoundaryCase {
  readonly name: string;
  readonly path: "/v1/completions" | "/v1/chat/completions" | "/v1/responses";
  readonly body: Readonly<Record<string, unknown>>;
  /** The naive proxy gets it right as well: the case guards against a regression, not against naivety. */
  readonly toyToo?: true;
}

/** Words of the tiny model's vocabulary; `seed` makes prompts differ. */
export function words(count: number, seed: number): string {
  return Array.from({ length: count }, (_, i) => `t${((7 * i * i + 3 * i + seed * 37) % 1000) + 10}`).join(
    " ",
  );
}

const one = words(70, 1);
const several = [words(40, 2), words(100, 3)];
const ids = [one, ...several].map((text) => text.split(" ").map((word) => Number(word.slice(1))));
const messages = [{ role: "user", content: words(50, 4) }];
const tools = [
  { type: "function", function: { name: "f", parameters: { type: "object", properties: {} } } },
  { type: "function", function: { name: "g", parameters: { type: "object", properties: {} } } },
];
const greedy = { model: "tiny", temperature: 0, max_tokens: 8, ignore_eos: true };
const sampled = { ...greedy, temperature: 0.9, seed: 7 };
const counted = { stream: true, stream_options: { include_usage: true } };

const completions: readonly Omit<BoundaryCase, "path">[] = [
  { name: "one prompt", body: { ...greedy, prompt: one }, toyToo: true },
  { name: "several prompts", body: { ...greedy, prompt: several } },
  { name: "several prompts in token ids", body: { ...greedy, prompt: ids.slice(1) } },
  { name: "one prompt in token ids", body: { ...greedy, prompt: ids[0] }, toyToo: true },
  { name: "several copies", body: { ...sampled, prompt: one, n: 3 } },
  { name: "several prompts, several copies", body: { ...sampled, prompt: several, n: 2 } },
  { name: "min_tokens above one", body: { ...greedy, prompt: one, min_tokens: 6 } },
  { name: "max_tokens 1", body: { ...greedy, prompt: one, max_tokens: 1 }, toyToo: true },
  { name: "echo", body: { ...greedy, prompt: one, echo: true }, toyToo: true },
  { name: "echo with logprobs", body: { ...greedy, prompt: one, echo: true, logprobs: 2 }, toyToo: true },
  { name: "prompt_logprobs", body: { ...greedy, prompt: one, prompt_logprobs: 1 }, toyToo: true },
  { name: "logprobs", body: { ...greedy, prompt: one, logprobs: 3 }, toyToo: true },
  { name: "a stream with its usage", body: { ...greedy, prompt: one, ...counted } },
  { name: "a stream of several prompts", body: { ...greedy, prompt: several, ...counted } },
  { name: "a stream of several copies", body: { ...sampled, prompt: one, n: 2, ...counted } },
];

const chats: readonly Omit<BoundaryCase, "path">[] = [
  { name: "a chat", body: { ...greedy, messages }, toyToo: true },
  {
    name: "tools and arguments of the chat template",
    body: { ...greedy, messages, tools, tool_choice: "none", chat_template_kwargs: { extra: "t77 t78" } },
    toyToo: true,
  },
  { name: "a chat in several copies", body: { ...sampled, messages, n: 2 } },
  {
    name: "a chat with max_completion_tokens and min_tokens",
    body: { ...greedy, messages, max_completion_tokens: 5, min_tokens: 5 },
  },
  { name: "a chat with prompt_logprobs", body: { ...greedy, messages, prompt_logprobs: 1 }, toyToo: true },
  { name: "a chat, streamed", body: { ...greedy, messages, ...counted } },
];

/** Refused by the servers: the status and the words must be theirs. */
export const REFUSALS: readonly Omit<BoundaryCase, "path">[] = [
  { name: "a value out of its range", body: { ...greedy, prompt: one, temperature: -1 } },
  { name: "a model that nobody serves", body: { ...greedy, prompt: one, model: "other" } },
  { name: "a prompt beyond the model's length", body: { ...greedy, prompt: words(1100, 5) } },
  // The prefill leg has a limit of its own, so only the decode worker refuses it, when blocks are held.
  { name: "more tokens than the model's length", body: { ...greedy, prompt: one, max_tokens: 5000 } },
];

export const BOUNDARY_CASES: readonly BoundaryCase[] = [
  ...completions.map((each) => ({ ...each, path: "/v1/completions" as const })),
  ...chats.map((each) => ({ ...each, path: "/v1/chat/completions" as const })),
  {
    name: "the Responses API",
    path: "/v1/responses",
    body: { model: "tiny", temperature: 0, max_output_tokens: 8, input: words(50, 6) },
  },
];

type Fields = Record<string, unknown>;

/** What of an answer two servers must agree on: not its id and time, and log probabilities to three digits. */
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

/** The texts of a stream by choice, their ends and the usage: which tokens share an event is the server's affair. */
function ofStream(text: string): unknown {
  const events = text.split("\n\n").flatMap((event) => (event.startsWith("data: ") ? [event.slice(6)] : []));
  const choices: Fields[] = [];
  let usage: unknown;
  for (const event of events) {
    if (event === "[DONE]") continue;
    const chunk = JSON.parse(event) as Fields;
    usage = chunk.usage ?? usage;
    for (const choice of (chunk.choices ?? []) as Fields[]) {
      const index = Number(choice.index);
      const delta = (choice.delta ?? {}) as Fields;
      const so = choices[index] ?? { text: "", finish: null };
      const more = String(choice.text ?? delta.content ?? "");
      choices[index] = { text: `${String(so.text)}${more}`, finish: choice.finish_reason ?? so.finish };
    }
  }
  return { choices, usage, done: events.at(-1) === "[DONE]" };
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
