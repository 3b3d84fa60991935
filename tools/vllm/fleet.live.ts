import type { LogFields } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { recordedLog } from "@kv/testing/recorded-log";
import { beforeAll, describe, expect, test } from "vitest";
import { words } from "./boundary-cases.js";
import { ask } from "./completion.js";
import { vllmServers } from "./server.js";
import { sleep, until } from "./until.js";

const REQUESTS = 1000;
const CLIENTS = 3;
/** P of 0.32 is restarted as 0.33 when so many requests have ended. */
const RESTART_AFTER = 300;
/** So many are left for the time after the restart. */
const AFTER_RESTART = 300;

/** One P and one D of vLLM 0.32 and of 0.33 behind one proxy; then P of 0.32 comes back as 0.33. */
describe("a mixed fleet", () => {
  const kindOf = (version: "0.32" | "0.33") => ({ version, mode: "pull" }) as const;
  const { of, start, restart } = vllmServers({ kind: kindOf("0.33"), blocks: 200 });
  const spec = (name: string) => ({
    url: of(name).url,
    kv: { host: "127.0.0.1", port: of(name).sideChannelPort },
  });

  beforeAll(async () => {
    const kind = kindOf("0.32");
    await Promise.all([start("p32", { kind }), start("d32", { kind })]);
    await Promise.all([start("p33"), start("d33")]);
  });

  test("1,000 requests: none on a pair that does not fit, none lost, and every unpaired instance is named with its factor", async () => {
    const { log, logged } = recordedLog();
    /**
     * While P restarts it may be the old one or the new one; its D would refuse what does not fit.
     */
    const versions = new Map(
      ["p32", "d32", "p33", "d33"].map((name) => [of(name).url, name.slice(1)]),
    );
    const records: LogFields[] = [];
    const info = (event: string, fields: LogFields = {}) => {
      log.info(event, fields);
      if (event !== "request-done") return;
      const { prefill, decode } = fields;
      const both = [prefill, decode].map((url) => versions.get(String(url)));
      records.push({ ...fields, versions: both });
    };
    const proxy = createProxy({
      prefillers: [spec("p32"), spec("p33")],
      decoders: [spec("d32"), spec("d33")],
      log: { ...log, info },
      health: { intervalMs: 1000 },
      routing: { prefill: "prefix-aware", decode: "prefix-aware" },
      disaggregateAbove: 40,
    });
    const { url } = await proxy.listen({ port: 0 });
    const states = () => {
      const { prefillers, decoders } = proxy.status();
      return [...prefillers, ...decoders].map(({ pairing }) => pairing);
    };
    expect(states().map((pairing) => [pairing?.state, pairing?.partners])).toEqual(
      Array(4).fill(["paired", 1]),
    );

    const outcomes: { status: number; text: string; at: number }[] = [];
    const misfits: string[] = [];
    let sent = 0;
    let isRestarted = false;
    async function client() {
      while (sent < REQUESTS) {
        if (!isRestarted && sent >= REQUESTS - AFTER_RESTART) {
          await sleep(500);
          continue;
        }
        sent += 1;
        const prompt = words(20 + (sent % 90), sent % 400);
        const answer = await ask(`${url}/v1/completions`, { model: "tiny", prompt, max_tokens: 3 });
        outcomes.push({ status: answer.status, text: await answer.text(), at: sent });
      }
    }
    const clients = Promise.all(Array.from({ length: CLIENTS }, client));

    await until(() => outcomes.length >= RESTART_AFTER, "the first requests", {
      timeoutMs: 400_000,
    });
    const p32 = of("p32").url;
    versions.set(p32, "restarting");
    const restartedAt = records.length;
    await restart("p32", { kind: kindOf("0.33") });
    versions.set(p32, "33");
    await until(() => states()[0]?.vllm_version === "0.33.0", "the restarted P is read", {
      timeoutMs: 60_000,
    });
    isRestarted = true;
    await clients;

    const lost = outcomes.filter(({ status }) => status !== 200);
    for (const { prefill, decode, versions: both } of records) {
      const [p, d] = both as readonly (string | undefined)[];
      if (prefill !== undefined && p !== "restarting" && p !== d)
        misfits.push(`${prefill} (${p}), ${decode} (${d})`);
    }
    const twoLegs = records.filter(({ prefill }) => prefill !== undefined).length;
    expect(lost.slice(0, 3)).toEqual([]);
    expect(misfits).toEqual([]);
    expect(outcomes).toHaveLength(REQUESTS);
    expect(twoLegs).toBeGreaterThan(REQUESTS / 2);
    expect(records.slice(restartedAt).some(({ prefill }) => prefill === p32)).toBe(true);
    expect(states()[2]).toMatchObject({
      state: "unpaired",
      differences: [{ factor: "vllm_version", decode: "0.32.0" }],
    });
    const unpaired = { instance: of("d32").url, reason: expect.stringContaining("vllm_version") };
    expect(logged("instance-unpaired")).toMatchObject([unpaired]);
    await proxy.close({ graceMs: 0 });
  });
});
