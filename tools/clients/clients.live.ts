import { rmSync } from "node:fs";
import { startUpstream } from "@kv/testing/http/fake-upstream";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, onTestFinished, test } from "vitest";
import { withoutIdentity } from "../vllm/boundary-cases.js";
import { argumentsOf, proxyPair } from "../vllm/proxy-pair.js";
import { startVllm } from "../vllm/server.js";
import { askAll } from "./all-clients.js";
import { NOT_BEHIND_ENVOY, startEnvoyFront, startProxyFront, without } from "./fronts.js";
import { type LinePeer, startClients } from "./python.js";
import { RECORDED, Recordings } from "./recorded.js";

let python: LinePeer;
beforeAll(async () => {
  python = await startClients();
});
afterAll(() => python?.close());

/** `1`, or the URL of a server that runs with `argumentsOf`. */
const record = process.env["KV_RECORD"];
const isRecording = record !== undefined;

test.runIf(isRecording)("vLLM's answers are recorded", async () => {
  const folder = scratchFolder(onTestFinished);
  const kind = { version: "0.33", mode: "pull" } as const;
  const server =
    record === "1"
      ? await startVllm({ kind, name: "recorded", blocks: 800, args: argumentsOf(folder) })
      : { url: record ?? "", stop: async () => {} };
  rmSync(RECORDED, { force: true });
  const recordings = new Recordings();
  const recorder = await startUpstream(recordings.recorder(server.url));
  const front = await startProxyFront("pull", recorder.url, recorder.url);
  try {
    await askAll(recorder.url, python);
    await askAll(front.url, python);
  } finally {
    await front.close();
    await recorder.close();
    await server.stop();
  }
});

describe.skipIf(isRecording).each(["pull", "push"] as const)("vLLM 0.33, %s", (mode) => {
  const pair = proxyPair({ version: "0.33", mode }, { base: { mode } });

  test.each(["kv-proxy", "Envoy, kv-epp and a sidecar"])(
    "what clients make of answers through %s is what they make of those of vLLM alone",
    async (front) => {
      const isProxy = front === "kv-proxy";
      const open = await (isProxy ? pair.proxied() : startEnvoyFront(mode, pair.p.url, pair.d.url));
      pair.closing(open);
      const except = isProxy ? [] : NOT_BEHIND_ENVOY;
      const ours = without(except, await askAll(open.url, python));
      const alone = without(except, await askAll(pair.d.url, python));
      expect(undivided(withoutIdentity(ours))).toEqual(undivided(withoutIdentity(alone)));
      // All clients send the same prompts. In push, a D of vLLM that has one whole in its cache
      // cannot tell P so.
      await (mode === "push" ? pair.leaseEnded() : pair.freed());
    },
  );
});

const TEXTS = new Set(["text", "content", "arguments", "delta", "partial_json"]);
/**
 * `prompt_token_ids`: with a streamed echo vLLM names them unasked, and a D that does not echo does
 * not.
 */
const LEFT_OUT = new Set(["sequence_number", "prompt_token_ids"]);

type Members = Readonly<Record<string, unknown>>;
const isMembers = (value: unknown): value is Members => typeof value === "object" && value !== null;

/**
 * Events of a stream as one, as far as they are of one kind: how a server divides tokens into
 * events depends on its load.
 */
function undivided(value: unknown): unknown {
  if (Array.isArray(value)) {
    const kept: unknown[] = [];
    for (const one of value.map(undivided)) {
      const before = kept.at(-1);
      const isMore =
        isMembers(before) &&
        isMembers(one) &&
        kindOf(one) !== undefined &&
        kindOf(one) === kindOf(before);
      if (isMore) kept[kept.length - 1] = joined(before, one);
      else kept.push(one);
    }
    return kept;
  }
  if (!isMembers(value)) return value;
  const members = Object.entries(value).filter(([key]) => !LEFT_OUT.has(key));
  return Object.fromEntries(members.map(([key, each]) => [key, undivided(each)]));
}

/** `object` of chunks, `type` of events. */
const kindOf = ({ object, type }: Members): unknown =>
  object ?? (/delta/.test(String(type)) ? type : undefined);

function joined(before: unknown, after: unknown, key = ""): unknown {
  if (after === null || after === undefined) return before;
  if (typeof before === "string" && typeof after === "string" && TEXTS.has(key))
    return before + after;
  if (Array.isArray(before) && Array.isArray(after)) {
    if (!after.every((one) => isMembers(one) && "index" in one)) return [...before, ...after];
    const byIndex = new Map<unknown, unknown>();
    for (const one of [...before, ...after] as Members[])
      byIndex.set(
        one["index"],
        byIndex.has(one["index"]) ? joined(byIndex.get(one["index"]), one) : one,
      );
    return [...byIndex.values()];
  }
  if (!isMembers(before) || !isMembers(after)) return after;
  return Object.fromEntries(
    Object.keys({ ...before, ...after }).map((name) => [
      name,
      joined(before[name], after[name], name),
    ]),
  );
}
