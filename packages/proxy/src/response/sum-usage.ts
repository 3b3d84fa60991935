/** The `usage` member of an answer. */
export type Usage = Record<string, unknown>;

/**
 * The usage of a merged answer, as vLLM counts it: the tokens of a prompt (cached ones included)
 * once for all its copies, the tokens of each completion.
 */
export function sumUsage(
  parts: readonly { readonly usage: Usage; readonly copy: number }[],
): Usage {
  const firstCopies = parts.filter(({ copy }) => copy === 0).map(({ usage }) => usage);
  const all = parts.map(({ usage }) => usage);
  const sum: Usage = { ...all[0] };
  for (const key of Object.keys(sum)) {
    const source = key.startsWith("prompt") ? firstCopies : all;
    sum[key] = total(source.map((usage) => usage[key]));
  }
  if ("total_tokens" in sum)
    sum.total_tokens = Number(sum.prompt_tokens ?? 0) + Number(sum.completion_tokens ?? 0);
  return sum;
}

/** Adds numbers, and numbers inside of objects. Of other values the first is kept. */
function total(values: readonly unknown[]): unknown {
  const [first] = values;
  if (typeof first === "number")
    return values.reduce((sum: number, value) => sum + Number(value ?? 0), 0);
  if (typeof first !== "object" || first === null)
    return values.find((value) => value != null) ?? first;
  const objects = values.filter(
    (value): value is Usage => typeof value === "object" && value !== null,
  );
  return Object.fromEntries(
    Object.keys(first).map((key) => [key, total(objects.map((value) => value[key]))]),
  );
}
