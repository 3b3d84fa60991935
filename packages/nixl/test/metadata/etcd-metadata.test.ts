import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { KvError } from "@kv/interface";
import {
  type EtcdMetadata,
  type EtcdTls,
  etcdMetadata,
  findLibrary,
  type NixlAgent,
  nixlTransport,
} from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, test, vi } from "vitest";
import { EtcdClient } from "../../src/metadata/etcd-client.js";
import { type Etcd, etcdMissing, skipsEtcd, startEtcd } from "../support/etcd.js";
import { startMetadataPeer } from "../support/metadata-peer.js";

const NAMESPACE = "/nixl/agents/";
const codeOf = async (promise: Promise<unknown>) => {
  const error = await promise.then(
    () => undefined,
    (reason: unknown) => reason,
  );
  return KvError.is(error) ? error.code : error;
};
const missing = nixlMissing ?? etcdMissing;

describe.skipIf(nixlMissing !== undefined || skipsEtcd)(
  `metadata by etcd (${missing ?? "found"})`,
  () => {
    const transport = nixlTransport({ backends: ["UCX"] });
    let etcd: Etcd;
    let client: EtcdClient;
    let one: NixlAgent;
    let two: NixlAgent;
    beforeAll(async () => {
      etcd = await startEtcd();
      client = new EtcdClient([new URL(etcd.url)]);
      one = await transport.createAgent({ name: "one" });
      two = await transport.createAgent({ name: "two" });
    }, 60_000);
    afterAll(async () => {
      await transport.close();
      await etcd?.end();
    });

    const open = (agent: NixlAgent, gone: [string, boolean][] = []): EtcdMetadata =>
      etcdMetadata(agent, {
        endpoints: [etcd.url],
        leaseSeconds: 2,
        onGone: (name, inUse) => gone.push([name, inUse]),
      });
    const keyOf = async (name: string, label: string) =>
      (await client.get(`${NAMESPACE}/${name}/${label}`)).value;

    test("an agent finds another, also one that publishes later, and forgets it when it closes", async () => {
      const gone: [string, boolean][] = [];
      await using mine = open(one, gone);
      const theirs = open(two);
      const waiting = mine.fetch("two");
      await theirs.publish();
      expect(await waiting).toBe("two");
      await one.notify("two", Buffer.from("found"));
      expect((await keyOf("two", "metadata"))?.length).toBeGreaterThan(100);
      await theirs.close();
      await expect.poll(() => gone).toEqual([["two", false]]);
      expect(await codeOf(one.notify("two", Buffer.from("gone")))).toBe("KV_AGENT_UNKNOWN_REMOTE");
      expect(await keyOf("two", "metadata")).toBeUndefined();
      expect(await codeOf(theirs.publish())).toBe("KV_SIDE_CHANNEL_CLOSED");
      expect(await codeOf(mine.fetch("two", { timeoutMs: 50 }))).toBe("KV_SIDE_CHANNEL_TIMEOUT");
    });

    test("a peer with prepared lists stays known, and `onGone` says so", async () => {
      const gone: [string, boolean][] = [];
      await using mine = open(one, gone);
      const theirs = open(two);
      const memory = transport.allocate(4096);
      const registration = await two.register(memory);
      await theirs.publish();
      await mine.fetch("two");
      const rows = Float64Array.of(memory.address, 4096, 0, 4096, 1);
      const list = await one.prepareRemote("two", { memoryType: "DRAM", rows });
      await theirs.close();
      await expect.poll(() => gone).toEqual([["two", true]]);
      await list.close();
      await one.removeRemote("two");
      await registration.close();
      memory.close();
    });

    test("metadata under another agent's name is not loaded", async () => {
      await using mine = open(one);
      const lease = await client.grantLease(10);
      await client.put(`${NAMESPACE}/three/metadata`, await two.localMetadata(), lease);
      expect(await codeOf(mine.fetch("three"))).toBe("KV_AGENT_METADATA_INVALID");
      expect(await codeOf(one.notify("two", Buffer.from("unknown")))).toBe(
        "KV_AGENT_UNKNOWN_REMOTE",
      );
      await client.revokeLease(lease);
    });

    test("a lease that was lost is granted anew, with all keys", async () => {
      const granted: string[] = [];
      const grant = EtcdClient.prototype.grantLease;
      vi.spyOn(EtcdClient.prototype, "grantLease").mockImplementation(async function (
        this: EtcdClient,
        seconds,
      ) {
        granted.push(await grant.call(this, seconds));
        return granted.at(-1) as string;
      });
      await using mine = open(one);
      await mine.publish();
      const before = await keyOf("one", "metadata");
      await client.revokeLease(granted.at(-1) as string);
      expect(await keyOf("one", "metadata")).toBeUndefined();
      await expect.poll(() => keyOf("one", ""), { timeout: 5000 }).toBeDefined();
      await expect.poll(() => keyOf("one", "metadata"), { timeout: 5000 }).toEqual(before);
      vi.restoreAllMocks();
    });

    test("an etcd that restarts loses no peer, and a peer that ends after that is noticed", async () => {
      const gone: [string, boolean][] = [];
      await using mine = open(one, gone);
      const theirs = open(two);
      await theirs.publish();
      await mine.fetch("two");
      await etcd.restart();
      await one.notify("two", Buffer.from("still known"));
      await theirs.publish();
      await theirs.close();
      await expect.poll(() => gone, { timeout: 10_000 }).toEqual([["two", false]]);
    }, 30_000);

    test("agents with NIXL's own etcd client are found, find this one, and notice its end", async () => {
      const gone: [string, boolean][] = [];
      const mine = open(one, gone);
      const env = { NIXL_ETCD_ENDPOINTS: etcd.url };
      const peer = await startMetadataPeer({
        library: await findLibrary(),
        name: "nixl-etcd",
        env,
      });
      expect(await peer.ask("send")).toBe(0);
      expect(await mine.fetch("nixl-etcd")).toBe("nixl-etcd");
      await mine.publish();
      expect(await peer.ask("fetch one")).toBe(0);
      expect(await peer.ask("wait one")).toBe(true);
      expect(await peer.ask("invalidate")).toBe(0);
      await expect.poll(() => gone).toEqual([["nixl-etcd", false]]);
      await mine.close();
      expect(await peer.ask("forgotten one")).toBe(true);
      await peer.end();
    }, 30_000);
  },
);

describe("etcd that cannot be used", () => {
  const nobody = { name: "one", addRemote: async () => "", removeRemote: async () => {} };
  const some = { ...nobody, localMetadata: async () => new Uint8Array(8) };

  test("no endpoint, a wrong one and a wrong lease are refused at once", () => {
    const code = "KV_CONFIG_INVALID";
    for (const options of [{}, { endpoints: [] }, { endpoints: ["localhost:2379"] }]) {
      expect(() => etcdMetadata(some, options, {})).toThrow(expect.objectContaining({ code }));
    }
    const endpoints = ["http://127.0.0.1:1"];
    expect(() => etcdMetadata(some, { endpoints, leaseSeconds: 0 })).toThrow(
      expect.objectContaining({ code }),
    );
    for (const tls of ["PEM", { ca: 7 }, { cert: "PEM" }, { key: "PEM" }]) {
      expect(() => etcdMetadata(some, { endpoints, tls: tls as EtcdTls })).toThrow(
        expect.objectContaining({ code }),
      );
    }
  });

  test("where nothing listens, the error names every endpoint", async () => {
    const variables = { NIXL_ETCD_ENDPOINTS: "http://127.0.0.1:1,http://127.0.0.1:2" };
    const error = await etcdMetadata(some, {}, variables)
      .publish()
      .catch((reason: unknown) => reason);
    expect(error).toMatchObject({ code: "KV_SIDE_CHANNEL_UNREACHABLE" });
    expect(String(error)).toMatch(/127\.0\.0\.1:1.*127\.0\.0\.1:2/);
  });

  test.each([
    ["hello", "KV_WIRE_MALFORMED"],
    ['{"header":{"revision":"-1"}}', "KV_WIRE_MALFORMED"],
    ["", "KV_WIRE_MALFORMED"],
  ])("an answer that is not etcd's is refused: %j", async (body, code) => {
    const server = createServer((_, response) => response.end(body)).listen(0, "127.0.0.1");
    await new Promise((resolve) => server.once("listening", resolve));
    const { port } = server.address() as AddressInfo;
    const client = new EtcdClient([new URL(`http://127.0.0.1:${port}`)]);
    expect(await codeOf(client.get("key"))).toBe(code);
    server.close();
  });
});
