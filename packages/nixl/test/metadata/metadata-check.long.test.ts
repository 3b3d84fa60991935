// A long suite: damaged metadata, in processes that may crash.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { type AddressInfo, connect, createServer, type Socket } from "node:net";
import { setTimeout as delay } from "node:timers/promises";
import { type Agent, KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { isLongRun } from "@kv/testing/long-run";
import { afterAll, beforeAll, describe, expect, onTestFinished, test } from "vitest";
import { BOTH_BACKENDS } from "../support/both-backends.js";
import { libfabricMissing } from "../support/libfabric-available.js";
import { mutations } from "../support/mutations.js";
import { type PeerProcess, startPeer } from "../support/peer-process.js";
import { refused } from "../support/refused.js";
import { runChild } from "../support/run-child.js";

/**
 * Damages metadata so that NIXL 1.5.0 crashes on it, or never returns. `port`: a port of this host
 * that never answers.
 */
const DEADLY = {
  // In the part that only UCX reads.
  UCX(bytes: Buffer) {
    const at = bytes.indexOf("UCX|c") + "UCX|c".length + 8;
    bytes[at] = (bytes[at] ?? 0) ^ 0xff;
  },
  // The endpoint, as a sockaddr_in.
  LIBFABRIC(bytes: Buffer, port: number) {
    const endpoint = bytes.indexOf("dest_data_ep_0") + "dest_data_ep_0".length + 8;
    bytes.writeUInt16BE(port, endpoint + 2);
    bytes.set([127, 0, 0, 1], endpoint + 4);
  },
} as const;

/** A port of this host whose process is stopped and whose backlog is full, until the test ends. */
async function deafPort(): Promise<number> {
  const listening =
    "require('net').createServer().listen({ port: 0, host: '127.0.0.1', backlog: 1 }, function () { process.send(this.address().port) })";
  const child = spawn(process.execPath, ["-e", listening], {
    stdio: ["ignore", "inherit", "inherit", "ipc"],
  });
  const waiting: Socket[] = [];
  onTestFinished(() => {
    for (const socket of waiting) socket.on("error", () => {}).destroy();
    child.kill("SIGKILL");
  });
  const [port] = (await once(child, "message")) as [number];
  child.kill("SIGSTOP");
  for (let answered = true; answered; ) {
    const socket = connect(port, "127.0.0.1");
    waiting.push(socket);
    answered = await Promise.race([once(socket, "connect").then(() => true), delay(300, false)]);
  }
  return port;
}

const notAdded = (agent: Agent, metadata: Uint8Array) =>
  refused(agent.addRemote(metadata), "KV_AGENT_METADATA_INVALID");

for (const { backend, missing } of BOTH_BACKENDS) {
  describe.skipIf(missing)(
    `metadata checked in another process over ${backend} (${missing ?? "found"})`,
    () => triedElsewhere(backend),
  );
}

describe.skipIf(libfabricMissing)(`over LIBFABRIC (${libfabricMissing ?? "found"})`, () => {
  const transport = nixlTransport({ backends: ["LIBFABRIC"] });
  let owner: PeerProcess;
  beforeAll(async () => {
    owner = await startPeer(1 << 20, 1, { backends: ["LIBFABRIC"] });
  });
  afterAll(async () => {
    await transport.close();
    await owner?.end();
  });

  test("an address of another kind is refused: NIXL would keep it and crash on the next call", async () => {
    const agent = await transport.createAgent();
    const other = Buffer.from(owner.metadata);
    const family = other.indexOf("dest_data_ep_0") + "dest_data_ep_0".length + 8;
    for (const at of [family, family + 1]) {
      other[at] = 77;
      const { message } = await notAdded(agent, other);
      expect(message).toContain("contains no TCP address");
    }
    expect(await agent.addRemote(owner.metadata)).toBe(owner.name);
  });

  test("an address that does not answer is refused in 4 s; the agent works on meanwhile", {
    timeout: 60_000,
  }, async () => {
    const agent = await transport.createAgent();
    const port = await deafPort();
    const deaf = Buffer.from(owner.metadata);
    DEADLY.LIBFABRIC(deaf, port);
    const order: string[] = [];
    const refusal = notAdded(agent, deaf).finally(() => order.push("refused"));
    order.push(await agent.addRemote(owner.metadata));
    expect((await refusal).message).toContain("nothing answers");
    expect(order).toEqual([owner.name, "refused"]);
    await agent.removeRemote(owner.name);
    const closed = refused(agent.addRemote(deaf), "KV_AGENT_CLOSED");
    await agent.close();
    await closed;
  });

  test("an agent that has used up NIXL's 255 peers reports it", { timeout: 120_000 }, async () => {
    const agent = await transport.createAgent();
    for (let count = 0; count < 255; count += 1)
      await agent.removeRemote(await agent.addRemote(owner.metadata));
    const { message, hint } = await notAdded(agent, owner.metadata);
    expect(message).toContain("at most 255 peers");
    expect(hint).toBe("create a new agent");
  });
});

function triedElsewhere(backend: "UCX" | "LIBFABRIC"): void {
  const transport = nixlTransport({ backends: [backend], checkMetadata: true });
  let owner: PeerProcess;
  let agent: Agent;

  beforeAll(async () => {
    owner = await startPeer(1 << 20, 1, { backends: [backend] });
    agent = await transport.createAgent();
  });
  afterAll(async () => {
    await transport.close();
    await owner?.end();
  });

  test("bytes on which NIXL crashes end the other process, those on which it would hang are refused; this one continues", async () => {
    const silent = createServer().listen(0, "127.0.0.1");
    await once(silent, "listening");
    const deadly = Buffer.from(owner.metadata);
    DEADLY[backend](deadly, (silent.address() as AddressInfo).port);
    const { message } = await notAdded(agent, deadly);
    const [ends, refuses] = [
      /^loading the metadata ends a process: SIG/,
      /^NIXL refused the metadata /,
    ];
    expect(message).toMatch(backend === "UCX" ? ends : refuses);
    expect(await agent.addRemote(owner.metadata)).toBe(owner.name);
    silent.close();
  });

  test("a check that is under way keeps the process alive", { timeout: 240_000 }, async () => {
    const end = await runChild("check-metadata.ts", [], { env: { NIXL_BACKEND: backend } });
    expect(end, end.stderr).toMatchObject({ code: 0, stdout: "added" });
  });

  test.skipIf(libfabricMissing)(
    `agents of one transport with different backends each accept their own peers (${libfabricMissing ?? "LIBFABRIC found"})`,
    async () => {
      const backends = [{ name: backend === "UCX" ? "LIBFABRIC" : "UCX" }];
      const other = await transport.createAgent({ backends });
      const peer = await transport.createAgent({ backends });
      expect(await other.addRemote(await peer.localMetadata())).toBe(peer.name);
      expect(await agent.addRemote(owner.metadata)).toBe(owner.name);
    },
  );

  test("damaged metadata gives a name or an error", { timeout: 14_400_000 }, async () => {
    const count = Number(process.env.KV_CHECKED_MUTATIONS ?? (isLongRun ? 5000 : 150));
    let refusals = 0;
    for (const bytes of mutations(owner.metadata, count, 7)) {
      try {
        await agent.removeRemote(await agent.addRemote(bytes));
      } catch (error) {
        if (!KvError.is(error, "KV_AGENT_METADATA_INVALID")) throw error;
        refusals++;
        if (error.hint !== "create a new agent") continue;
        await agent.close();
        agent = await transport.createAgent();
      }
    }
    expect(refusals).toBeGreaterThan(count / 2);
  });
}
