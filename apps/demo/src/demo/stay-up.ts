/** Resolves at SIGINT or SIGTERM. */
export function untilAskedToEnd(): Promise<NodeJS.Signals> {
  return new Promise((resolve) => {
    for (const signal of ["SIGINT", "SIGTERM"] as const) process.once(signal, () => resolve(signal));
  });
}

/** A line to paste. */
export function curlLine(url: string, model: string): string {
  const body = JSON.stringify({
    model,
    prompt: [21, 31, 55, 93],
    max_tokens: 16,
    temperature: 0,
    ignore_eos: true,
  });
  return `curl ${url}/v1/completions -H 'content-type: application/json' -d '${body}'`;
}
