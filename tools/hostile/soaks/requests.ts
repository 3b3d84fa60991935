// The requests of engines.ts.
import { type SendOptions, send } from "./soak.js";

type Body = Readonly<Record<string, unknown>>;

export interface SoakRequest {
  readonly path: string;
  readonly body?: Body;
  /** What one engine is asked in its place. */
  readonly parts?: readonly Body[];
}

export interface Told {
  readonly status: number;
  /** The error, or the names of models. */
  readonly said: readonly string[];
  readonly choices: readonly Choice[];
  /** A stream has them where they are asked for. */
  readonly usage: readonly number[];
}

interface Choice {
  text: string;
  readonly tokens: number[];
  finish: string;
}

/** Also of routes and members that the demo's engine refuses. */
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
      completions({ ...seeded, prompt: text, stop_token_ids: [5, 9] }),
      completions({ ...seeded, n: 2 }, copies),
      completions({ ...greedy, prompt: [prompt, other] }, [{ prompt }, { prompt: other }]),
      completions({ ...greedy, prompt: text, return_token_ids: false }),
      chat({ ...seeded, top_p: 0.9 }),
      chat({ ...seeded, n: 2 }, copies),
      // Much to read.
      chat({ ...greedy, max_tokens: 100 }),
      completions({ ...greedy, logit_bias: { 5: 100 } }),
      chat({ ...greedy, logprobs: true }),
      { path: "/v1/responses", body: { input: text } },
      { path: "/v1/messages", body: { messages, max_tokens: 9 } },
      { path: "/tokenize", body: { prompt: text } },
      { path: "/v1/embeddings", body: { input: text } },
      { path: "/v1/models" },
      { path: "/health" },
    ];
  });
}

export async function ask(
  url: string,
  { path, body }: SoakRequest,
  options?: SendOptions,
): Promise<Told> {
  const { status, text } = await send(url + path, body, options);
  return told(status, text);
}

export async function askAlone(url: string, request: SoakRequest): Promise<Told> {
  const { path, body, parts } = request;
  if (parts === undefined) return ask(url, request);
  const each: Told[] = [];
  for (const part of parts) each.push(await ask(url, { path, body: part }));

  const sum = (of: readonly Told[], at: 0 | 1) =>
    of.reduce((all, { usage }) => all + (usage[at] ?? 0), 0);
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
  readonly finish_reason?: string | null;
}

/** Throws for a stream without an end, or with an error. */
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
    choices[one.index] ??= { text: "", tokens: [], finish: "" };
    const choice = choices[one.index] as Choice;
    choice.text += one.text ?? one.message?.content ?? one.delta?.content ?? "";
    choice.tokens.push(...(one.token_ids ?? []));
    if (one.finish_reason != null) choice.finish = one.finish_reason;
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

export function sameAnswer(one: Told, wanted: Told): boolean {
  const exact = ({ status, said, choices }: Told) => JSON.stringify([status, said, choices]);
  const hasUsage = one.usage.length > 0;
  return exact(one) === exact(wanted) && (!hasUsage || String(one.usage) === String(wanted.usage));
}
