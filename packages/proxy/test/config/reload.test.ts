import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { COMPLETION, decodeOk, prefillOk, type Seen } from "@kv/testing/http/fake-upstream";
import { expect, onTestFinished, test } from "vitest";
import { startCli } from "../support/run-cli.js";
import { post, runPair, runProxy, upstream } from "../support/set-up.js";

const QUIET = { pairing: { mode: "off" }, health: { intervalMs: 0 } } as const;

/** kv-proxy with a configuration file that a test may change. */
async function startWithFile(config: object, args = "") {
  const folder = mkdtempSync(join(tmpdir(), "kv-reload-"));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const file = join(folder, "config.json");
  const write = (text: string | object) =>
    writeFileSync(file, typeof text === "string" ? text : JSON.stringify(text));
  write({ ...QUIET, ...config });
  const running = startCli(`--config ${file} --port 0 --admin-port 0${args}`);
  const [, url = "", adminUrl = ""] =
    /^kv-proxy ready (\S+) .* admin (\S+)$/.exec(await running.line()) ?? [];
  const events = (event: string) =>
    running
      .stderr()
      .split("\n")
      .filter((line) => line.includes(`"event":"${event}"`))
      .map((line) => JSON.parse(line) as Record<string, unknown>);
  /** Resolves with the line that the reload logs. */
  const reload = async (text: string | object) => {
    write(text);
    const all = () => [...events("reloaded"), ...events("not-reloaded")].length;
    const before = all();
    running.child.kill("SIGHUP");
    await expect.poll(all).toBe(before + 1);
    return [...events("reloaded"), ...events("not-reloaded")].sort((a, b) =>
      String(a["time"]) < String(b["time"]) ? -1 : 1,
    )[before];
  };
  const decoders = async () => {
    const status = (await (await fetch(`${adminUrl}/status`)).json()) as {
      readonly decoders: readonly { readonly url: string }[];
    };
    return status.decoders.map((one) => one.url);
  };
  return { ...running, url, adminUrl, reload, events, decoders };
}

test.each([
  ["one process", ""],
  ["two workers", " --workers 2"],
] as const)(
  "first-contact.md 5: SIGHUP reads the configuration again: %s take instances, limits, routing and the log level, and the request in flight goes on",
  { timeout: 120_000 },
  async (_name, args) => {
    const p = await upstream(prefillOk);
    const held: Seen[] = [];
    const old = await upstream((seen) => void held.push(seen));
    const next = await upstream(decodeOk);
    const { url, reload, decoders, events, child, exited } = await startWithFile(
      { prefillers: [p.url], decoders: [old.url] },
      args,
    );
    const asked = post(`${url}/v1/completions`, { prompt: "a" });
    await expect.poll(() => held.length).toBe(1);

    const changed = {
      ...QUIET,
      prefillers: [p.url],
      decoders: [next.url],
      routing: { decode: "least-load" },
      limits: { bodyLengthBytes: 1_000, clientHeader: "x-client" },
      timeouts: { stallMs: 1_000 },
    };
    const first = await reload(changed);
    expect(first).toMatchObject({ level: "info", event: "reloaded" });
    expect(first?.["changed"]).toEqual(
      expect.arrayContaining(["decoders", "routing.decode", "limits.bodyLengthBytes"]),
    );
    expect(first?.["need_restart"]).toEqual(
      expect.arrayContaining(["timeouts.stallMs", "limits.clientHeader"]),
    );

    for (let count = 0; count < 4; count++)
      expect((await post(`${url}/v1/completions`, { prompt: "b" })).status).toBe(200);
    expect(next.seen.filter(({ path }) => path === "/v1/completions")).toHaveLength(4);
    const large = await post(`${url}/v1/completions`, { prompt: "a".repeat(2_000) });
    expect(large.status).toBe(413);

    for (const seen of held) void decodeOk(seen);
    expect(await (await asked).json()).toEqual(COMPLETION);
    await expect.poll(decoders).toEqual([next.url]);

    for (const wrong of ["{", { ...changed, decoders: [] }, { ...changed, lmits: {} }])
      expect(await reload(wrong)).toMatchObject({ level: "error", event: "not-reloaded" });
    expect(await decoders()).toEqual([next.url]);
    expect((await post(`${url}/v1/completions`, { prompt: "c" })).status).toBe(200);

    expect(await reload({ ...changed, decoders: [next.url, old.url] })).toMatchObject({
      changed: ["decoders"],
    });
    expect(await decoders()).toEqual([next.url, old.url]);
    child.kill("SIGTERM");
    expect(await exited).toBe(0);
    expect(events("closing")).toHaveLength(1);
  },
);

test("an instance that an operator has added stays; one that is named twice changes nothing", async () => {
  const { proxy, p, d } = await runPair();
  const [added, named] = [await upstream(decodeOk), await upstream(decodeOk)];
  proxy.instances.decode.add({ url: added.url });
  const settings = { ...QUIET, admin: { port: 0 }, prefillers: [p.url] };
  expect(proxy.reload({ ...settings, decoders: [named.url] })).toMatchObject({
    changed: ["decoders"],
  });
  const urls = () => proxy.instances.decode.list().map(({ url }) => url);
  await expect.poll(urls).toEqual([added.url, named.url]);

  const twice = { ...settings, decoders: [d.url, d.url] };
  expect(() => proxy.reload(twice)).toThrow("given twice");
  expect(() => proxy.reload({ ...settings, decoders: [] })).toThrow("no decode instance is given");
  expect(urls()).toEqual([added.url, named.url]);
  expect(proxy.reload({ ...settings, decoders: [named.url] })).toEqual({
    changed: [],
    needRestart: [],
  });
});

test("a limit below what is in use refuses what comes, and ends nothing", async () => {
  const p = await upstream(prefillOk);
  const held: Seen[] = [];
  const d = await upstream((seen) => void held.push(seen));
  const instances = { prefillers: [p.url], decoders: [d.url] };
  const { proxy, ask } = await runProxy(instances);
  const asked = [1, 2, 3].map(() => ask());
  await expect.poll(() => held.length).toBe(3);
  proxy.reload({ ...QUIET, ...instances, limits: { requestsInFlight: 2, requestsPerClient: 2 } });
  expect((await ask()).status).toBe(429);

  // Without the limit the default holds again.
  proxy.reload({ ...QUIET, ...instances });
  asked.push(ask());
  await expect.poll(() => held.length).toBe(4);
  for (const seen of held) void decodeOk(seen);
  for (const answer of asked) expect((await answer).status).toBe(200);
  const after = ask();
  await expect.poll(() => held.length).toBe(5);
  const last = held[4];
  if (last !== undefined) void decodeOk(last);
  expect((await after).status).toBe(200);
});
