import { performance } from "node:perf_hooks";
import { Agent } from "undici";

export interface LoadResult {
  readonly perSecond: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
  readonly failed: number;
  readonly requests: number;
}

const END = "data: [DONE]\n\n";

/** A loop that is closed: `concurrency` clients, each sends its next request when the last answer is complete. */
export async function load(
  url: string,
  concurrency: number,
  durationMs: number,
  { stream = true } = {},
): Promise<LoadResult> {
  const agent = new Agent({ connections: concurrency, pipelining: 1 });
  const body = JSON.stringify({
    model: "m",
    prompt: "a prompt of some words ".repeat(20),
    max_tokens: 16,
    stream: true,
  });
  const took: number[] = [];
  let failed = 0;
  const begun = performance.now();

  const once = () =>
    new Promise<boolean>((resolve) => {
      let tail = "";
      agent.dispatch(
        {
          origin: url,
          path: "/v1/completions",
          method: "POST",
          headers: { "content-type": "application/json" },
          body,
        },
        {
          onRequestStart() {},
          onResponseStart() {},
          onResponseData(_controller, chunk) {
            tail = chunk.toString("latin1", Math.max(0, chunk.length - END.length));
          },
          onResponseEnd: () => resolve(!stream || tail === END),
          onResponseError: () => resolve(false),
        },
      );
    });
  async function client(): Promise<void> {
    for (;;) {
      const from = performance.now();
      if (from - begun >= durationMs) return;
      if (await once()) took.push(performance.now() - from);
      else failed += 1;
    }
  }
  await Promise.all(Array.from({ length: concurrency }, client));
  const seconds = (performance.now() - begun) / 1000;
  await agent.close();
  took.sort((a, b) => a - b);
  const at = (share: number) =>
    took[Math.min(took.length - 1, Math.floor(took.length * share))] ?? Number.NaN;
  return { perSecond: took.length / seconds, p50Ms: at(0.5), p99Ms: at(0.99), failed, requests: took.length };
}
