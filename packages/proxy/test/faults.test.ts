import type { Clock, Random, Timer } from "@kv/interface";
import { expect, test } from "vitest";
import { createProxy } from "../src/index.js";
import { COMPLETION, decodeOk, prefillOk, sendJson } from "./fake-upstream.js";
import { createManualClock } from "./manual-clock.js";
import { errorOf, post, runProxy, upstream } from "./set-up.js";

/** A timer that only works as a method of its object, as a class's does. */
class ClassTimer implements Timer {
  readonly #handle: NodeJS.Timeout;

  constructor(run: () => void, delayMs: number) {
    this.#handle = setTimeout(run, delayMs).unref();
  }

  cancel(): void {
    clearTimeout(this.#handle);
  }
}

class ClassClock implements Clock {
  readonly #startedAtMs = performance.now();

  now(): number {
    return performance.now() - this.#startedAtMs;
  }

  setTimer(run: () => void, delayMs: number): Timer {
    return new ClassTimer(run, delayMs);
  }
}

class ClassRandom implements Random {
  #serial = 0;

  next(): number {
    return 0;
  }

  uuid(): string {
    this.#serial += 1;
    return `id-${this.#serial}`;
  }
}

test("serves with a random source that is an instance of a class", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  for (const mode of ["pull", "push", "auto"] as const) {
    const prefillers = [{ url: p.url, kv: { engineId: "e" } }];
    const { url } = await runProxy({ mode, prefillers, decoders: [d.url], random: new ClassRandom() });
    expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(200);
  }
});

test("close() resolves with a clock whose timers are instances of a class", async () => {
  const proxy = createProxy({ prefillers: ["p:1"], decoders: ["d:1"], clock: new ClassClock() });
  await proxy.listen({ port: 0 });
  await expect(proxy.close()).resolves.toBeUndefined();
});

test("of two data-parallel ranks on one URL, only the rank that failed counts a failure", async () => {
  const p = await upstream(prefillOk);
  const d = await upstream(({ json, response }) => {
    if (json.prompt === "good") sendJson(response, COMPLETION);
    else {
      // The begin of an answer, which is larger than what the proxy checks before it merges, and then a cut connection.
      response.writeHead(200, { "content-type": "application/json", "content-length": 1000 });
      response.write('{"id":"cmpl-1","choices":[{"text":"', () => setTimeout(() => response.destroy(), 20));
    }
  });
  const { url, proxy } = await runProxy({
    prefillers: [p.url],
    decoders: [`${d.url}@0`, `${d.url}@1`],
    createRouting: () => ({
      name: "by prompt",
      choose: (candidates, { request }) => candidates.at(request?.fields.prompt === "good" ? 0 : -1),
    }),
    limits: { heldAnswerLengthBytes: 10 },
  });
  const answer = await errorOf(await post(`${url}/v1/completions`, { prompt: ["good", "bad"] }));
  expect(answer).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
  expect(proxy.status().decoders).toMatchObject([
    { data_parallel_rank: 0, failures: 0, available: true },
    { data_parallel_rank: 1, failures: 1, available: false },
  ]);
});

test("the requests on the page begin when the proxy's clock says", async () => {
  const clock = createManualClock();
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const { url, adminUrl } = await runProxy({
    prefillers: [p.url],
    decoders: [d.url],
    clock,
    admin: { port: 0 },
  });
  await post(`${url}/v1/completions`, { prompt: "a" });
  clock.advance(60_000);
  await post(`${url}/v1/completions`, { prompt: "a" });
  const requests = (await (await fetch(`${adminUrl}/requests`)).json()) as { began_at: string }[];
  const [first = 0, second = 0] = requests.map(({ began_at: beganAt }) => Date.parse(beganAt));
  expect(second - first).toBe(60_000);
});
