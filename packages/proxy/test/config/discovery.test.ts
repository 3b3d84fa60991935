import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { dnsDiscovery, fileDiscovery } from "@kv/fleet";
import { decodeOk, prefillOk } from "@kv/testing/http/fake-upstream";
import { after, manualClock } from "@kv/testing/manual-clock";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, test } from "vitest";
import { discoveryByHand } from "../support/discovery-by-hand.js";
import { runProxy, upstreams } from "../support/set-up.js";

const folder = scratchFolder();

test("instances follow a file; those of the settings stay, and an invalid file changes nothing", async () => {
  const clock = manualClock();
  const [p, d1, d2] = await upstreams(prefillOk, decodeOk, decodeOk);
  const file = join(folder, "instances.json");
  const write = (value: unknown) =>
    writeFile(file, typeof value === "string" ? value : JSON.stringify(value));
  await write({ decoders: [d1.url] });
  const { ask, proxy } = await runProxy({ prefillers: [p.url], discovery: { file }, clock });
  const decoders = () => proxy.status().decoders.map((one) => one.url);
  await expect.poll(decoders).toEqual([d1.url]);
  await write({ decoders: [{ url: d2.url, dataParallelRank: 1 }] });
  await expect.poll(after(clock, 5000, decoders)).toEqual([d2.url]);
  await write("{");
  clock.advance(5000);
  expect((await ask()).status).toBe(200);
  expect(d2.seen[0]?.headers["x-data-parallel-rank"]).toBe("1");
  expect(proxy.status().prefillers).toHaveLength(1);
});

test("an unknown key of the file is told with the nearest one", async () => {
  const file = join(folder, "misspelt.json");
  await writeFile(file, JSON.stringify({ prefillers: ["p:1"], decoder: ["d:1"] }));
  const error = await new Promise((failed) => {
    const { close } = fileDiscovery(file, { clock: manualClock(), intervalMs: 100 }).watch(
      () => {},
      (thrown) => {
        failed(thrown);
        close();
      },
    );
  });
  expect(error).toMatchObject({
    code: "KV_CONFIG_UNKNOWN_KEY",
    message: `${file} is not valid: settings: there is no key "decoder", did you mean decoders?`,
  });
});

test("ranks of a data-parallel server in a file are added and removed one by one", async () => {
  const clock = manualClock();
  const file = join(folder, "ranks.json");
  const write = (prefillers: readonly string[]) =>
    writeFile(file, JSON.stringify({ prefillers, decoders: ["d:1"] }));
  await write(["p:1@0", "p:1@1"]);
  const { proxy } = await runProxy({ discovery: { file }, clock });
  const ranks = () => proxy.status().prefillers.map((one) => one.data_parallel_rank);
  await expect.poll(ranks).toEqual([0, 1]);
  await write(["p:1@1", "p:1"]);
  await expect.poll(after(clock, 5000, ranks)).toEqual([1, null]);
});

test("instances follow DNS: all addresses of a host, or SRV records with their ports", async () => {
  const clock = manualClock();
  let addresses = ["10.0.0.2", "10.0.0.1"];
  const resolver = {
    addresses: async () => addresses,
    services: async () => [{ name: "d1.example", port: 8200 }],
  };
  const names = { prefill: "prefill.svc:8100", decode: "_http._tcp.decode.svc" };
  const { proxy } = await runProxy({
    clock,
    createDiscovery: () => dnsDiscovery(names, { clock, intervalMs: 100 }, resolver),
  });
  const urls = () =>
    [...proxy.status().prefillers, ...proxy.status().decoders].map((one) => one.url);
  await expect
    .poll(urls)
    .toEqual(["http://10.0.0.1:8100", "http://10.0.0.2:8100", "http://d1.example:8200"]);
  addresses = ["10.0.0.2", "fd00::1"];
  await expect
    .poll(after(clock, 100, urls))
    .toEqual(["http://10.0.0.2:8100", "http://[fd00::1]:8100", "http://d1.example:8200"]);
});

test("while the discovery cannot be read, the last instances stay, and a metric says so", async () => {
  const [p, d] = await upstreams(prefillOk, decodeOk);
  const discovery = discoveryByHand();
  const { ask, metrics } = await runProxy({ createDiscovery: discovery.create });
  const current = async () => /^kv_proxy_discovery_current (\d)$/m.exec(await metrics())?.[1];
  expect(await current()).toBe("0");
  const all = { prefillers: [{ url: p.url }], decoders: [{ url: d.url }] };
  discovery.found(all);
  expect(await current()).toBe("1");
  discovery.failed(new Error("the API server is away"));
  expect(await current()).toBe("0");
  expect((await ask()).status).toBe(200);
  discovery.found(all);
  expect(await current()).toBe("1");
});

test("discovery.kubernetes is the program's: createProxy says what to pass", async () => {
  const discovery = { kubernetes: { podSelector: "app=vllm" } };
  await expect(runProxy({ discovery })).rejects.toThrow(
    "discovery.kubernetes is a setting of the program",
  );
});
