// The requests of engine-soak.ts, and what one engine answers to them.
import { setTimeout as sleep } from "node:timers/promises";

type Body = Readonly<Record<string, unknown>>;

/** A request. One without a body is a GET. */
export interface SoakRequest {
  readonly path: string;
  readonly body?: Body;
  /**
   * The requests that one engine is asked in its place, as it serves one prompt and one choice at a
   * time.
   */
  readonly parts?: readonly Body[];
}

/** An answer, streamed or not. */
export interface Told {
  readonly status: number;
  /** The error, or the names of models. */
  readonly said: readonly string[];
  readonly choices: readonly Choice[];
  /** Tokens of the prompts and of the choices. A stream has them where they are asked for. */
  readonly usage: readonly number[];
}

interface Choice {
  readonly text: string;
  readonly tokens: readonly number[];
  readonly logprobs: readonly number[];
  readonly finish: readonly unknown[];
}

/**
 * Requests of every route that the demo's engine serves, and of routes and members that it refuses.
 */
export function soakRequests(prompts: readonly (readonly number[])[]): SoakRequest[] {
  const ids = { return_token_ids: true };
  return prompts.flatMap((prompt, at): SoakRequest[] => {
    const text = prompt.map((token) => `t${token}`).join(" ");
    const other = prompts[(at + 1) % prompts.length] ?? [];
    const greedy = { temperature: 0, ignore_eos: true, max_tokens: 16 };
    const seeded = { temperature: 0.8, top_k: 20, seed: 100 * at, max_tokens: 24 };
    const messages = [
      { role: "system", content: "t7 t8 t9" },
      { role: "user", content: [{ type: "text", text }] },
    ];
    const completions = (body: Body, parts?: readonly Body[]) => ({
      path: "/v1/completions",
      body: { prompt, ...ids, ...body },
      ...(parts && { parts: parts.map((part) => ({ prompt, ...ids, ...body, ...part })) }),
    });
    const chat = (body: Body, parts?: readonly Body[]) => ({
      path: "/v1/chat/completions",
      body: { messages, ...ids, ...body },
      ...(parts && { parts: parts.map((part) => ({ messages, ...ids, ...body, ...part })) }),
    });
    const copies = [
      { n: 1, seed: seeded.seed },
      { n: 1, seed: seeded.seed + 1 },
    ];
    return [
      completions({ ...greedy }),
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

/** What one engine answers, asked for each part alone. */
export async function askAlone(url: string, request: SoakRequest): Promise<Told> {
  const { path, body, parts } = request;
  const told: Told[] = [];
  for (const part of parts ?? [body])
    told.push(await ask(url, { path, ...(part && { body: part }) }));
  const [first, second] = told;
  if (first === undefined || second === undefined) return first as Told;
  const prompts = body?.["n"] === 2 ? [first] : told;
  const sum = (of: readonly Told[], at: 0 | 1) =>
    of.reduce((all, { usage }) => all + (usage[at] ?? 0), 0);
  const usage = [sum(prompts, 0), sum(told, 1)];
  return { ...first, choices: told.flatMap(({ choices }) => choices), usage };
}

/** So long a client reads slowly. */
const SLOW_MS = 3_000;

/** Thrown when an answer breaks off after its first byte. */
export class Cut extends Error {}

export interface AskOptions {
  readonly signal?: AbortSignal;
  readonly requestId?: string;
  /** Pause between two reads of the answer. */
  readonly pauseMs?: number;
}

/** Sends a request. Errors: `Cut`; others when no byte of an answer came. */
export async function ask(
  url: string,
  { path, body }: SoakRequest,
  { signal, requestId = "alone", pauseMs = 0 }: AskOptions = {},
): Promise<Told> {
  const post = { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(url + path, {
    ...(body === undefined ? {} : post),
    headers: { "content-type": "application/json", "x-request-id": requestId },
    signal: signal ?? null,
  });
  let text = "";
  try {
    const [decoder, slowUntilMs] = [new TextDecoder(), Date.now() + SLOW_MS];
    for await (const chunk of response.body ?? []) {
      text += decoder.decode(chunk as Uint8Array, { stream: true });
      if (pauseMs > 0 && Date.now() < slowUntilMs) await sleep(pauseMs);
    }
    return told(response.status, text);
  } catch (error) {
    throw new Cut(`after ${text.length} characters: ${String(error)}`);
  }
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

function told(status: number, text: string): Told {
  const isStream = text.startsWith("data: ");
  const events = isStream
    ? text.split("\n\n").flatMap((event) => (event === "" ? [] : [event.slice("data: ".length)]))
    : [text === "" ? "{}" : text];
  if (isStream && events.pop() !== "[DONE]") throw new Error("the stream has no [DONE]");
  const answers = events.map((event) => JSON.parse(event) as Answer);
  const error = answers.find((answer) => answer.error !== undefined)?.error;
  if (status === 200 && error !== undefined) throw new Error(error.message);
  const choices = new Map<number, Choice>();
  for (const one of answers.flatMap((answer) => answer.choices ?? [])) {
    const before = choices.get(one.index) ?? { text: "", tokens: [], logprobs: [], finish: [] };
    const { token_logprobs = [], content = [] } = one.logprobs ?? {};
    choices.set(one.index, {
      text: before.text + (one.text ?? one.message?.content ?? one.delta?.content ?? ""),
      tokens: [...before.tokens, ...(one.token_ids ?? [])],
      logprobs: [...before.logprobs, ...token_logprobs, ...content.map(({ logprob }) => logprob)],
      finish:
        one.finish_reason == null ? before.finish : [one.finish_reason, one.stop_reason ?? null],
    });
  }
  const usage = answers.find((answer) => answer.usage != null)?.usage;
  return {
    status,
    said: [
      ...(error ? [error.message] : []),
      ...answers.flatMap(({ data = [] }) => data.map(({ id }) => id)),
    ],
    choices: [...choices].sort(([a], [b]) => a - b).map(([, choice]) => choice),
    usage: usage == null ? [] : [usage.prompt_tokens, usage.completion_tokens],
  };
}

/**
 * Whether an answer is that of one engine. Its log probabilities may differ as results of other
 * batches do.
 */
export function sameAnswer(one: Told, wanted: Told): boolean {
  const exact = ({ choices, ...rest }: Told) =>
    JSON.stringify([
      rest.status,
      rest.said,
      choices.map(({ text, tokens, finish }) => [text, tokens, finish]),
    ]);
  const logprobs = ({ choices }: Told) => choices.flatMap((choice) => choice.logprobs);
  const [given, expected] = [logprobs(one), logprobs(wanted)];
  return (
    exact(one) === exact(wanted) &&
    (one.usage.length === 0 || String(one.usage) === String(wanted.usage)) &&
    given.length === expected.length &&
    given.every((value, at) => Math.abs(value - (expected[at] ?? 0)) < 1e-3)
  );
}
