import { type FakeUpstream, startUpstream } from "@kv/testing/http/fake-upstream";
import { isLongRun } from "@kv/testing/long-run";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { expectAllIdle, startPair } from "../../apps/demo/test/support/matrix.js";
import { envoyMissing } from "../envoy/support/envoy-missing.js";
import { withoutIdentity } from "../vllm/boundary-cases.js";
import { askAll, type Outcomes } from "./all-clients.js";
import {
  type Front,
  NOT_BEHIND_ENVOY,
  startEnvoyFront,
  startProxyFront,
  without,
} from "./fronts.js";
import { hasClients, type LinePeer, startClients } from "./python.js";
import { Recordings } from "./recorded.js";
import { ASKED, type Outcome } from "./requests.js";

// Clients as their users have them, in front of kv-proxy and of Envoy. What they make of an answer
// must be what they make of one engine's.

const closers: { close(): Promise<void> }[] = [];
afterAll(async () => {
  for (const one of closers.splice(0).reverse()) await one.close();
});
function closing<T extends { close(): Promise<void> }>(one: T): T {
  closers.push(one);
  return one;
}

let python: LinePeer | undefined;
beforeAll(async () => {
  if (hasClients() || isLongRun) python = closing(await startClients());
}, 600_000);
const absent =
  hasClients() || isLongRun ? "" : ", without openai and litellm of Python: npm run test:clients";

const MODES = ["pull", "push"] as const;

describe(`in front of recorded answers of vLLM 0.33${absent}`, () => {
  const recordings = new Recordings();
  let alone: Outcomes = {};
  let p: FakeUpstream;
  let d: FakeUpstream;

  beforeAll(async () => {
    const engine = closing(await startUpstream(recordings.play));
    p = closing(await startUpstream(recordings.play));
    d = closing(await startUpstream(recordings.play));
    alone = await askAll(engine.url, python);
  }, 120_000);

  test("one engine refuses what it should, and answers all else", () => {
    const wrong = Object.entries(alone).flatMap(([client, outcomes]) =>
      Object.entries(outcomes)
        .filter(([name, outcome]) => {
          const text = JSON.stringify(outcome);
          const wanted = name.startsWith("tools") ? /arguments|"input"/ : /./;
          return (
            name.endsWith("refused") !== "error" in outcome ||
            /is recorded for/.test(text) ||
            !wanted.test(text)
          );
        })
        .map(([name, outcome]) => [client, name, outcome]),
    );
    expect(wrong).toEqual([]);
  });

  /**
   * With a streamed echo, vLLM names the ids of the prompt unasked. A D that does not echo does
   * not.
   */
  const compared = (all: Outcomes) =>
    withoutIdentity(
      JSON.parse(
        JSON.stringify(all, (name, value) => (name === "prompt_token_ids" ? null : value)),
      ),
    );

  async function expectAsAlone(front: Front, except: readonly string[] = []): Promise<void> {
    closing(front);
    const ours = without(except, await askAll(front.url, python));
    expect(compared(ours)).toEqual(compared(without(except, alone)));
    // Who left in the middle has left P, D and all between.
    await expect.poll(() => [front.inFlight(), recordings.streaming]).toEqual([0, 0]);
    expect(d.seen.some(({ json }) => json["kv_transfer_params"] != null)).toBe(true);
  }

  test.each(isLongRun ? MODES : ["pull" as const])(
    "kv-proxy, %s",
    async (mode) => expectAsAlone(await startProxyFront(mode, p.url, d.url)),
    120_000,
  );

  test.skipIf(envoyMissing !== undefined || !isLongRun).each(MODES)(
    "Envoy, kv-epp and a sidecar, %s",
    async (mode) => expectAsAlone(await startEnvoyFront(mode, p.url, d.url), NOT_BEHIND_ENVOY),
    120_000,
  );
});

/**
 * What one engine of the demo serves. It refuses several copies, for example, which kv-proxy makes
 * of one.
 */
const served = (all: Outcomes, alone: Outcomes) =>
  Object.entries(all).map(([client, outcomes]) => [
    client,
    Object.entries(outcomes).filter(([name]) => isServed(alone[client]?.[name])),
  ]);
function isServed(outcome: Outcome | undefined): boolean {
  if (outcome === undefined || "error" in outcome) return false;
  const { status = 200 } = (outcome.value ?? {}) as { readonly status?: unknown };
  return typeof status !== "number" || status === 200;
}

describe.runIf(isLongRun)("in front of the demo's engines", () => {
  test.each(["proxy", "envoy"] as const)(
    "%s",
    async (front) => {
      if (front === "envoy" && envoyMissing !== undefined) throw new Error(envoyMissing);
      const cluster = closing(await startPair({ instance: { servedModelName: ASKED.model } }));
      const except = front === "envoy" ? NOT_BEHIND_ENVOY : [];
      const [p = "", d = ""] = [...cluster.prefills, ...cluster.decodes].map(({ url }) => url);
      const alone = without(except, await askAll(d, python));
      const { url } =
        front === "envoy" ? closing(await startEnvoyFront("pull", p, d)) : cluster.proxy;
      const ours = await askAll(url, python);
      expect(withoutIdentity(served(ours, alone))).toEqual(withoutIdentity(served(alone, alone)));
      expect(served(alone, alone).flat(2).length).toBeGreaterThan(20);
      await expectAllIdle(cluster);
    },
    120_000,
  );
});
