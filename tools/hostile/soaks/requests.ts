// The requests of engines.ts, and what one engine answers to them.
import { type SendOptions, send } from "./soak.js";

type Body = Readonly<Record<string, unknown>>;

export interface SoakRequest {
  readonly path: string;
  readonly body?: Body;
  /** What one engine is asked in its place: it serves one prompt and one choice at a time. */
  readonly parts?: readonly Body[];
}

export interface Told {
  readonly status: number;
  /** The error, or the names of models. */
  readonly said: readonly string[];
  readonly choices: readonly Choice[];
  /** Tokens of the prompts and of the choices. A stream has them where they are asked for. */
  readonly usage: readonly number[];
}

interface Choice {
  text: string;
  readonly tokens: number[];
  readonly logprobs: number[];
  finish: readonly unknown[];
}

/** Of every route that the demo's engine serves, and of routes and members that it refuses. */
export function soakRequests(prompts: readonly (readonly number[])[]): SoakRequest[] {
  return prompts.flatMap((prompt, at): SoakRequest[] => {
    const text = prompt.map((token) => `t${token}`).join(" ");
    const other = prompts[(at + 1) % prompts.length] ?? [];
    const greedy = { temperature: 0, ignore_eos: true, max_tokens: 16 };
    const seeded = { temperature: 0.8, top_k: 20, seed: 100 * at, max_tokens: 24 };
    const messages = [
      { role: "system", content: "t7 t8 t9" },
      { role: "user", content: [{ type: "text", text }] },
    ];
    const asked = (path: string, base: Body) => (given: Body, parts?: readonly Body[]) => {
      const body = { ...base, return_token_ids: true, ...given };
      return { path, body, ...(parts && { parts: parts.map((part) => ({ ...body, ...part })) }) };
    };
    const completions = asked("/v1/completions", { prompt });
    const chat = asked("/v1/chat/completions", { messages });
    const copies = [
      { n: 1, seed: seeded.seed },
      { n: 1, seed: seeded.seed + 1 },
    ];
    return [
      completions(greedy),
      completions({ ...seeded, prompt: text, stop: ["t5", " t9"] }),
      completions({ ...seeded, n: 2 }, copies),
      completions({ ...greedy, prompt: [prompt, other] }, [{ prompt }, { prompt: other }]),
      completions({ ...greedy, prompt: text, logprobs: 3, return_token_ids: false }),
      chat({ ...seeded, top_p: 0.9, stop: "1 t" }),
      chat({ ...seeded, n: 2 }, copies),
      // Much to read.
      chat({ ...greedy, max_tokens: 100, logprobs: true, top_logprobs: 20 }),
      completions({ ...greedy, logit_bias: { 5: 100 } }),
      chat({ ...greedy, logprobs: true, top_logprobs: 99 }),
      { path: "/v1/responses", body: { input: text } },
      { path: "/v1/messages", body: { messages, max_tokens: 9 } },
      { path: "/tokenize", body: { prompt: text } },
      { path: "/v1/embeddings", body: { input: text } },
      { path: "/v1/models" },
      { path: "/health" },
    ];
  });
}

/** Sends a request. Throws as `send`. */
export async function ask(
  url: string,
  { path, body }: SoakRequest,
  options?: SendOptions,
): Promise<Told> {
  const { status, text } = await send(url + path, body, options);
  return told(status, text);
}

/** What one engine answers, asked for each part alone. */
export async function askAlone(url: string, request: SoakRequest): Promise<Told> {
  const { path, body, parts } = request;
  if (parts === undefined) return ask(url, request);
  const each: Told[] = [];
  for (const part of parts) each.push(await ask(url, { path, body: part }));

  const sum = (of: readonly Told[], at: 0 | 1) =>
    of.reduce((all, { usage }) => all + (usage[at] ?? 0), 0);
  // Two choices have one prompt.
  const prompts = body?.["n"] === 2 ? each.slice(0, 1) : each;
  const choices = each.flatMap((one) => one.choices);
  return { status: 200, said: [], choices, usage: [sum(prompts, 0), sum(each, 1)] };
}

interface Answer {
  readonly error?: { readonly message: string };
  readonly data?: readonly { readonly id: string }[];
  readonly choices?: readonly AnswerChoice[];
  readonly usage?: { readonly prompt_tokens: number; readonly completion_tokens: number } | null;
}

interface AnswerChoice {
  readonly index: number;
  readonly text?: string;
  readonly message?: { readonly content: string };
  readonly delta?: { readonly content?: string };
  readonly token_ids?: readonly number[];
  readonly logprobs?: {
    readonly token_logprobs?: readonly number[];
    readonly content?: readonly { readonly logprob: number }[];
  } | null;
  readonly finish_reason?: string | null;
  readonly stop_reason?: string | number | null;
}

/** Reads an answer, streamed or not. Throws for a stream without an end, or with an error. */
export function told(status: number, text: string): Told {
  const isStream = text.startsWith("data: ");
  const events = isStream
    ? text.split("\n\n").flatMap((event) => (event === "" ? [] : [event.slice("data: ".length)]))
    : [text === "" ? "{}" : text];
  if (isStream && events.pop() !== "[DONE]") throw new Error("the stream has no [DONE]");
  const answers = events.map((event) => JSON.parse(event) as Answer);
  const error = answers.find((answer) => answer.error !== undefined)?.error;
  if (status === 200 && error !== undefined) throw new Error(error.message);

  const choices: Choice[] = [];
  for (const one of answers.flatMap((answer) => answer.choices ?? [])) {
    choices[one.index] ??= { text: "", tokens: [], logprobs: [], finish: [] };
    const choice = choices[one.index] as Choice;
    const { token_logprobs = [], content = [] } = one.logprobs ?? {};
    choice.text += one.text ?? one.message?.content ?? one.delta?.content ?? "";
    choice.tokens.push(...(one.token_ids ?? []));
    choice.logprobs.push(...token_logprobs, ...content.map(({ logprob }) => logprob));
    if (one.finish_reason != null) choice.finish = [one.finish_reason, one.stop_reason ?? null];
  }
  const usage = answers.find((answer) => answer.usage != null)?.usage;
  return {
    status,
    said: [
      ...(error ? [error.message] : []),
      ...answers.flatMap(({ data = [] }) => data.map(({ id }) => id)),
    ],
    choices,
    usage: usage == null ? [] : [usage.prompt_tokens, usage.completion_tokens],
  };
}

/** Log probabilities may differ as results of other batches do. */
export function sameAnswer(one: Told, wanted: Told): boolean {
  const exact = ({ status, said, choices }: Told) =>
    JSON.stringify([status, said, choices.map(({ logprobs: _, ...choice }) => choice)]);
  const logprobs = ({ choices }: Told) => choices.flatMap((choice) => choice.logprobs);
  const [given, expected] = [logprobs(one), logprobs(wanted)];
  return (
    exact(one) === exact(wanted) &&
    (one.usage.length === 0 || String(one.usage) === String(wanted.usage)) &&
    given.length === expected.length &&
    given.every((value, at) => Math.abs(value - (expected[at] ?? 0)) < 1e-3)
  );
}
