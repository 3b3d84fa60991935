import { words } from "../vllm/boundary-cases.js";

/**
 * What all clients ask about. The tiny model of tools/vllm knows the words, and those of a call of
 * `f` or `g` with the schema.
 */
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

/** Tokens of an answer that its client leaves in the middle. */
export const LONG_ANSWER = 500;

/** What a client made of a case: what it returned, or the error that it raised. */
export type Outcome =
  | { readonly value: unknown }
  | {
      readonly error: { readonly kind: string; readonly status: unknown; readonly message: string };
    };

/**
 * A client at one server: each case by its name. Names that end with `refused` are those of cases
 * that end with an error.
 */
export type Cases = Readonly<Record<string, () => Promise<unknown>>>;

/** Runs all cases, one after another. */
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

/** Reads the first piece of a stream, then leaves. */
export async function first<T>(stream: AsyncIterable<T>): Promise<T | undefined> {
  for await (const piece of stream) return piece;
  return undefined;
}
