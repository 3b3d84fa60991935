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

const BODY = JSON.stringify({
  model: "m",
  prompt: "a prompt of some words ".repeat(20),
  max_tokens: 16,
  stream: true,
});

/** One request; whether its answer is complete. */
function ask(agent: Agent, url: string, stream: boolean): Promise<boolean> {
  return new Promise((resolve) => {
    let tail = "";
    agent.dispatch(
      {
        origin: url,
        path: "/v1/completions",
        method: "POST",
        headers: { "content-type": "application/json" },
        body: BODY,
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
}

function result(took: number[], failed: number, begun: number): LoadResult {
  const seconds = (performance.now() - begun) / 1000;
  took.sort((a, b) => a - b);
  const at = (share: number) =>
    took[Math.min(took.length - 1, Math.floor(took.length * share))] ?? Number.NaN;
  return { perSecond: took.length / seconds, p50Ms: at(0.5), p99Ms: at(0.99), failed, requests: took.length };
}

/**
 * A loop that is open: requests leave at a fixed rate, whether answers have come or not, and each is timed from when it was to leave. Two
 * routers under the same rate show their latency; in a closed loop each would show its throughput a second time.
 */
export async function pacedLoad(url: string, perSecond: number, durationMs: number): Promise<LoadResult> {
  const agent = new Agent({ connections: 256, pipelining: 1 });
  const took: number[] = [];
  const pending: Promise<void>[] = [];
  let failed = 0;
  const begun = performance.now();
  const count = Math.floor((perSecond * durationMs) / 1000);
  for (let at = 0; at < count; ) {
    const due = Math.min(count, Math.ceil(((performance.now() - begun) * perSecond) / 1000));
    for (; at < due; at += 1) {
      const from = begun + (at * 1000) / perSecond;
      pending.push(
        ask(agent, url, true).then((complete) => {
          if (complete) took.push(performance.now() - from);
          else failed += 1;
        }),
      );
    }
    await new Promise((resolve) => setTimeout(resolve, 1));
  }
  await Promise.all(pending);
  const all = result(took, failed, begun);
  await agent.close();
  return all;
}

/** A loop that is closed: `concurrency` clients, each sends its next request when the last answer is complete. */
export async function load(
  url: string,
  concurrency: number,
  durationMs: number,
  { stream = true } = {},
): Promise<LoadResult> {
  const agent = new Agent({ connections: concurrency, pipelining: 1 });
  const took: number[] = [];
  let failed = 0;
  const begun = performance.now();

  async function client(): Promise<void> {
    for (;;) {
      const from = performance.now();
      if (from - begun >= durationMs) return;
      if (await ask(agent, url, stream)) took.push(performance.now() - from);
      else failed += 1;
    }
  }
  await Promise.all(Array.from({ length: concurrency }, client));
  const all = result(took, failed, begun);
  await agent.close();
  return all;
}
