import { KvError, type SideChannel } from "@kv/interface";
import { encodeMsgpack } from "@kv/protocol";
import { expect, test } from "vitest";
import { METADATA, REPLY } from "../../test/sample-recording.js";
import { type LookSideChannelOptions, lookSideChannel } from "./look-side-channel.js";

/** Answers at one host with these frames; every other one is unreachable. */
function answering(at: string, frames: readonly Uint8Array[] = REPLY): SideChannel & { asked: Uint8Array[] } {
  const asked: Uint8Array[] = [];
  return {
    asked,
    listen: () => Promise.reject(new Error("not used")),
    async request({ host, frames: [frame] }) {
      if (frame !== undefined) asked.push(frame);
      if (host !== at) throw new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `${host} cannot be reached`);
      return { frames, sentAtMs: 1, receivedAtMs: 2 };
    },
    close: async () => {},
  };
}

const look = (sideChannel: SideChannel, more: Partial<LookSideChannelOptions> = {}) =>
  lookSideChannel({
    role: "prefill",
    sideChannel,
    timeoutMs: 100,
    address: { host: "10.0.0.7", port: 5600, from: "told" },
    serverHost: "10.0.0.7",
    peerIsElsewhere: false,
    toldEngineId: METADATA.engineId,
    ...more,
  }).then(({ found, checks }) => ({
    found,
    by: Object.fromEntries(checks.map((check) => [check.id.slice(8), check])),
  }));

test("a server as it should be: rank (0, 0) is asked, and no other", async () => {
  const sideChannel = answering("10.0.0.7");
  const { found, by } = await look(sideChannel);
  expect(Object.values(by).map(({ status }) => status)).toEqual(["ok", "ok", "ok", "ok"]);
  expect(found.metadata?.engineId).toBe(METADATA.engineId);
  const rank00 = Buffer.from("93c40c6765745f6d6574615f6d73670000", "hex");
  expect(sideChannel.asked.map((frame) => Buffer.from(frame))).toEqual([rank00, rank00]);
});

test("localhost announced by a server that is elsewhere: said, and where it does answer", async () => {
  const { by } = await look(answering("10.0.0.7"), {
    address: { host: "localhost", port: 5600, from: "told" },
  });
  expect(by["side-channel-host"]).toMatchObject({
    status: "fail",
    fix: "set VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7 on that server and restart it",
  });
  expect(by["side-channel"]?.found).toContain("it answers at 10.0.0.7:5600");
});

test("localhost is right for a pair on this host, and wrong as soon as the peer is elsewhere", async () => {
  const here = { address: { host: "localhost", port: 5600, from: "told" as const }, serverHost: "127.0.0.1" };
  expect((await look(answering("localhost"), here)).by["side-channel-host"]?.status).toBe("ok");
  const { by } = await look(answering("localhost"), { ...here, peerIsElsewhere: true });
  expect(by["side-channel-host"]?.status).toBe("fail");
});

test("nobody at the default port: the flag that gives another one", async () => {
  const { by } = await look(answering("elsewhere"), {
    address: { host: "10.0.0.7", port: 5600, from: "default" },
  });
  expect(by["side-channel"]?.found).toContain("--prefill-side-channel gives another");
});

test("an address to listen on is none to announce", async () => {
  const { by } = await look(answering("0.0.0.0"), { address: { host: "0.0.0.0", port: 5600, from: "told" } });
  expect(by["side-channel-host"]?.found).toContain("not one to connect to");
});

test("another engine than the one that HTTP named", async () => {
  const { by } = await look(answering("10.0.0.7"), { toldEngineId: "restarted" });
  expect(by["engine-id"]).toMatchObject({ status: "fail" });
  expect(by["engine-id"]?.found).toContain(METADATA.engineId);
});

test("metadata of another form: what could not be read is named, and nothing is thrown", async () => {
  const payload = encodeMsgpack({
    compatibility_hash: "ab",
    agent_metadata_bytes: encodeMsgpack({ engine_id: 7 }),
  });
  const { found, by } = await look(answering("10.0.0.7", [payload, REPLY[1]]));
  expect(by["metadata"]?.found).toMatch(/agent metadata: kv_caches_base_addr/);
  expect(found.metadata).toBeUndefined();
});
