import { words } from "../vllm/boundary-cases.js";

/** The tiny model of tools/vllm knows the words, and those of a call of `f` or `g`. */
export const ASKED = {
  model: "tiny",
  prompt: words(40, 21),
  other: words(45, 22),
  /** Longer than the model's context. */
  long: words(1100, 23),
  image: "http://127.0.0.1:9/cat.png",
  schema: {
    type: "object",
    properties: { a: { type: "string", enum: ["x", "y", "z"] } },
    required: ["a"],
    additionalProperties: false,
  },
};

export const LONG_ANSWER = 500;

/** What the client returned, or raised. */
export type Outcome =
  | { readonly value: unknown }
  | {
      readonly error: { readonly kind: string; readonly status: unknown; readonly message: string };
    };

/** By name. Those that end with `refused` end with an error. */
export type Cases = Readonly<Record<string, () => Promise<unknown>>>;

export async function outcomesOf(cases: Cases): Promise<Record<string, Outcome>> {
  const outcomes: Record<string, Outcome> = {};
  for (const [name, ask] of Object.entries(cases)) outcomes[name] = await outcome(ask);
  return outcomes;
}

async function outcome(ask: () => Promise<unknown>): Promise<Outcome> {
  try {
    return { value: JSON.parse(JSON.stringify(await ask())) };
  } catch (thrown) {
    const error = thrown as Error & { readonly status?: unknown; readonly statusCode?: unknown };
    const status = error.status ?? error.statusCode ?? null;
    return { error: { kind: error.constructor.name, status, message: error.message } };
  }
}

export async function first<T>(stream: AsyncIterable<T>): Promise<T | undefined> {
  for await (const piece of stream) return piece;
  return undefined;
}
