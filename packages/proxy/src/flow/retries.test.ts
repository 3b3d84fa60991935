import { type Role, roundRobin } from "@kv/fleet";
import { Deadline, Fleet, parseGenerationRequest } from "@kv/fleet/front-end";
import { ambient as fillAmbient } from "@kv/interface";
import { KV_PARAMS_TEXT, startUpstream } from "@kv/testing/http/fake-upstream";
import { afterEach, expect, test } from "vitest";
import { readSettings } from "../config/settings.js";
import type { Part } from "../legs/client-request.js";
import { Legs, newAttempts } from "../legs/legs.js";
import { RequestRecord } from "../telemetry/request-record.js";
import { PrefillEngines, PullStrategy } from "./pull-strategy.js";
import { PushConcurrentStrategy } from "./push-concurrent.js";
import { PushSequentialStrategy } from "./push-sequential.js";

const open: { close(): Promise<void> }[] = [];

afterEach(async () => {
  for (const one of open.splice(0).reverse()) await one.close();
});

/** Six instances of each role; by default they close the connection. */
async function setUp({ prefillWorks = false, decodeHangs = false }) {
  const legsSent: Role[] = [];
  const start = async (role: Role) => {
    const server = await startUpstream(({ response }) => {
      legsSent.push(role);
      if (role === "decode" && decodeHangs) return;
      if (role === "decode" || !prefillWorks) response.destroy();
      else response.end(`{"choices":[{"text":"x"}],"kv_transfer_params":${KV_PARAMS_TEXT}}`);
    });
    open.push(server);
    return server.url;
  };
  const ambient = fillAmbient();
  const instancesOf = async (role: Role) => {
    const urls = await Promise.all(Array.from({ length: 6 }, () => start(role)));
    return urls.map((url) => ({ url, kv: { engineId: "e" } }));
  };
  const settings = readSettings({
    prefillers: await instancesOf("prefill"),
    decoders: await instancesOf("decode"),
    pairing: { mode: "off" },
    health: { intervalMs: 0 },
  });
  const fleet = new Fleet({ ...ambient, settings, createRouting: roundRobin });
  open.push(fleet);
  const legs = new Legs(fleet, settings);
  const engines = new PrefillEngines();
  const pull = new PullStrategy(legs, engines);
  const sequential = new PushSequentialStrategy(pull, ambient.random);
  const push = new PushConcurrentStrategy(legs, engines, sequential);
  const part = (record: RequestRecord): Part => ({
    requestId: "r",
    request: parseGenerationRequest("/v1/completions", Buffer.from('{"prompt":"a"}')),
    headers: {},
    deadline: new Deadline(ambient),
    attempts: newAttempts(),
    record,
  });
  return { pull, push, part, legsSent };
}

/** A record that ignores later changes. */
function frozenRecord(values: Partial<RequestRecord>): RequestRecord {
  const record = Object.assign(new RequestRecord(), values);
  return new Proxy(record, { set: () => true, deleteProperty: () => true });
}

test("pull: a failed prefill leg is retried once, though the record has a decode leg", async () => {
  const { pull, part, legsSent } = await setUp({});
  await expect(pull.run(part(frozenRecord({ decodeStartedAtMs: 5 })))).rejects.toThrow(
    "closed the connection",
  );
  expect(legsSent).toEqual(["prefill", "prefill"]);
});

test("pull: a failed decode leg begins again with prefill, though the record has no decode leg", async () => {
  const { pull, part, legsSent } = await setUp({ prefillWorks: true });
  await expect(pull.run(part(frozenRecord({})))).rejects.toThrow("closed the connection");
  expect(legsSent).toEqual(["prefill", "decode", "prefill", "decode"]);
});

test("push: the prefill leg is retried once, though the record keeps the first decode leg", async () => {
  const { push, part, legsSent } = await setUp({ decodeHangs: true });
  await expect(push.run(part(frozenRecord({ decodeStartedAtMs: 5 })))).rejects.toThrow(
    "closed the connection",
  );
  expect(legsSent.filter((role) => role === "prefill")).toHaveLength(2);
});
