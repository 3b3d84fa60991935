import { performance } from "node:perf_hooks";
import { Agent } from "undici";

export interface LoadResult {
  readonly perSecond: number;
  /** The duration of each complete request, in ms. */
  readonly tookMs: readonly number[];
  readonly failed: number;
}

/** A pool of connections to one server. Several loads can use it. */
export const connections = (most: number): Agent => new Agent({ connections: most, pipelining: 1 });

const END = "data: [DONE]\n\n";

const BODY = JSON.stringify({
  model: "m",
  prompt: "a prompt of some words ".repeat(20),
  max_tokens: 16,
  stream: true,
});

/** Sends one request. Resolves with whether its answer was complete. */
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

const result = (tookMs: number[], failed: number, begun: number): LoadResult => ({
  perSecond: tookMs.length / ((performance.now() - begun) / 1000),
  tookMs,
  failed,
});

/**
 * An open loop: sends requests at a fixed rate without waiting for answers, and times each from the moment when it was due. At the same rate
 * two routers can be compared by latency; a closed loop would measure their throughput again.
 */
export async function pacedLoad(
  agent: Agent,
  url: string,
  perSecond: number,
  durationMs: number,
): Promise<LoadResult> {
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
  return result(took, failed, begun);
}

/** A closed loop: each of `concurrency` clients sends its next request when the last answer is complete. */
export async function load(
  agent: Agent,
  url: string,
  concurrency: number,
  durationMs: number,
  { stream = true } = {},
): Promise<LoadResult> {
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
  return result(took, failed, begun);
}
