import type { GenerationRequest } from "@kv/fleet/front-end";

type Fields = Record<string, unknown>;

/**
 * Puts the prompt's log probabilities, from the prefill answer `prompt`, into a decode worker's
 * complete answer.
 */
export function mergePromptLogprobs(
  request: GenerationRequest,
  body: Fields,
  prompt: Readonly<Fields> | undefined,
): Fields {
  if (prompt === undefined) return body;
  const source = firstChoice(prompt);
  switch (request.promptFields) {
    case "prompt-logprobs":
      if (request.endpoint === "/v1/chat/completions")
        return { ...body, prompt_logprobs: prompt.prompt_logprobs ?? null };
      return mapChoices(body, (choice) => ({
        ...choice,
        prompt_logprobs: source.prompt_logprobs ?? null,
      }));
    case "echo":
      return mapChoices(body, (choice) => ({
        ...withPrompt(choice, source),
        prompt_logprobs: source.prompt_logprobs ?? null,
      }));
    default:
      return body;
  }
}

/**
 * The same for each chunk of a stream: the prompt goes before the first chunk's text, and its
 * length is added to all text offsets.
 */
export function promptLogprobsMerger(
  request: GenerationRequest,
  prompt: Readonly<Fields> | undefined,
): (chunk: Fields) => Fields {
  if (prompt === undefined || request.promptFields !== "echo") return (chunk) => chunk;
  const source = firstChoice(prompt);
  let first = true;
  return (chunk) =>
    mapChoices(chunk, (choice) => {
      if (!first) return { ...choice, logprobs: shifted(choice.logprobs, promptLength(source)) };
      first = false;
      return withPrompt(choice, source);
    });
}

function firstChoice(answer: Readonly<Fields>): Fields {
  return ((answer.choices as Fields[] | undefined)?.[0] ?? {}) as Fields;
}

function mapChoices(body: Fields, change: (choice: Fields) => Fields): Fields {
  return Array.isArray(body.choices)
    ? { ...body, choices: (body.choices as Fields[]).map(change) }
    : body;
}

interface Logprobs {
  readonly text_offset: readonly number[];
  readonly tokens: readonly string[];
  readonly token_logprobs: readonly unknown[];
  readonly top_logprobs: readonly unknown[];
}

function withPrompt(choice: Fields, source: Fields): Fields {
  const before = source.logprobs as Logprobs | null | undefined;
  const after = shifted(choice.logprobs, promptLength(source)) as Logprobs | null | undefined;
  const text = `${String(source.text ?? "")}${String(choice.text ?? "")}`;
  if (before == null || after == null)
    return { ...choice, text, logprobs: after ?? before ?? null };
  const logprobs = {
    ...after,
    text_offset: [...before.text_offset, ...after.text_offset],
    tokens: [...before.tokens, ...after.tokens],
    token_logprobs: [...before.token_logprobs, ...after.token_logprobs],
    top_logprobs: [...(before.top_logprobs ?? []), ...(after.top_logprobs ?? [])],
  };
  return { ...choice, text, logprobs };
}

/** Length of the prompt's text in code points, the unit of vLLM's offsets. */
function promptLength(source: Fields): number {
  const { text_offset: offsets = [], tokens = [] } = (source.logprobs ?? {}) as Partial<Logprobs>;
  return (offsets.at(-1) ?? 0) + [...(tokens.at(-1) ?? "")].length;
}

function shifted(logprobs: unknown, by: number): unknown {
  if (typeof logprobs !== "object" || logprobs === null || !("text_offset" in logprobs))
    return logprobs;
  return {
    ...logprobs,
    text_offset: (logprobs.text_offset as number[]).map((offset) => offset + by),
  };
}
