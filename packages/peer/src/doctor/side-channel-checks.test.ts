import { KvError, type SideChannel } from "@kv/interface";
import { encodeMsgpack } from "@kv/protocol";
import { expect, test } from "vitest";
import { METADATA, REPLY } from "../../test/sample-recording.js";
import { readSideChannel, type SideChannelReading } from "./side-channel-checks.js";

/** Answers at one host with these frames; every other host is unreachable. */
function answering(
  at: string,
  frames: readonly Uint8Array[] = REPLY,
): SideChannel & { asked: Uint8Array[] } {
  const asked: Uint8Array[] = [];
  return {
    asked,
    listen: () => Promise.reject(new Error("not used")),
    async request({ host, frames: [frame] }) {
      if (frame !== undefined) asked.push(frame);
      if (host !== at)
        throw new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `${host} cannot be reached`);
      return { frames, sentAtMs: 1, receivedAtMs: 2 };
    },
    close: async () => {},
  };
}

const look = (sideChannel: SideChannel, more: Partial<SideChannelReading> = {}) =>
  readSideChannel({
    role: "prefill",
    sideChannel,
    timeoutMs: 100,
    address: { host: "10.0.0.7", port: 5600, source: "server" },
    serverHost: "10.0.0.7",
    peerIsElsewhere: false,
    expectedEngineId: METADATA.engineId,
    ...more,
  }).then((facts) => ({
    facts,
    by: Object.fromEntries(facts.reading.map((check) => [check.id.slice(8), check])),
  }));

test("a correct server passes all checks, and only rank (0, 0) is asked", async () => {
  const sideChannel = answering("10.0.0.7");
  const { facts, by } = await look(sideChannel);
  expect(Object.values(by).map(({ status }) => status)).toEqual(["ok", "ok", "ok", "ok"]);
  expect(facts.metadata?.engineId).toBe(METADATA.engineId);
  const rank00 = Buffer.from("93c40c6765745f6d6574615f6d73670000", "hex");
  expect(sideChannel.asked.map((frame) => Buffer.from(frame))).toEqual([rank00, rank00]);
});

test("a remote server that announces localhost fails, with the address at which it answers", async () => {
  const { by } = await look(answering("10.0.0.7"), {
    address: { host: "localhost", port: 5600, source: "server" },
  });
  expect(by["side-channel-host"]).toMatchObject({
    status: "fail",
    fix: "set VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7 on that server and restart it",
  });
  expect(by["side-channel"]?.found).toContain("it answers at 10.0.0.7:5600");
});

test("localhost is ok for a pair on one host and fails when the peer is on another host", async () => {
  const here = {
    address: { host: "localhost", port: 5600, source: "server" as const },
    serverHost: "127.0.0.1",
  };
  expect((await look(answering("localhost"), here)).by["side-channel-host"]?.status).toBe("ok");
  const { by } = await look(answering("localhost"), { ...here, peerIsElsewhere: true });
  expect(by["side-channel-host"]?.status).toBe("fail");
});

test.each([
  [
    "no answer at the default port names the flag for another port",
    "elsewhere",
    "10.0.0.7",
    "default",
    "side-channel",
    "--prefill-side-channel sets another",
  ],
  [
    "a wildcard address must not be announced",
    "0.0.0.0",
    "0.0.0.0",
    "server",
    "side-channel-host",
    "peers cannot connect to it",
  ],
] as const)("%s", async (_, at, host, source, id, found) => {
  const { by } = await look(answering(at), { address: { host, port: 5600, source } });
  expect(by[id]?.found).toContain(found);
});

test("an engine id that differs from the one over HTTP fails", async () => {
  const { by } = await look(answering("10.0.0.7"), { expectedEngineId: "restarted" });
  expect(by["engine-id"]).toMatchObject({
    status: "fail",
    found: expect.stringContaining(METADATA.engineId),
  });
});

test("metadata that cannot be decoded is a failed check with the field, not an exception", async () => {
  const payload = encodeMsgpack({
    compatibility_hash: "ab",
    agent_metadata_bytes: encodeMsgpack({ engine_id: 7 }),
  });
  const { facts, by } = await look(answering("10.0.0.7", [payload, REPLY[1]]));
  expect(by["metadata"]?.found).toMatch(/agent metadata: kv_caches_base_addr/);
  expect(facts.metadata).toBeUndefined();
});
