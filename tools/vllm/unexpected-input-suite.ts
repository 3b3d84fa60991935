import { nixlTransport } from "@kv/nixl";
import { decodeAgentMetadata, decodeHandshakeReply, encodeHandshakeRequest } from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import { expect, test } from "vitest";
import { freshId, ONE_USE } from "./completion.js";
import type { VllmServer } from "./server.js";

const UNKNOWN_RANK = 99;
const TIMEOUT_MS = 5000;
const text = new TextEncoder();

/** An empty frame, invalid msgpack, another type, another marker, an additional frame. */
const INVALID_FRAMES = [
  [new Uint8Array()],
  [Uint8Array.of(0xc1)],
  [text.encode("get_meta_msg")],
  [Uint8Array.of(0x93, 0xa1, 0x78, 0x00, 0x00)],
  [encodeHandshakeRequest({ ppRank: 0, tpRank: 0 }), Uint8Array.of(1)],
];

/** The first ones end the engine step of a vLLM worker. */
const INVALID_NOTIFICATIONS = [
  text.encode("no colon"),
  text.encode("request:many"),
  Uint8Array.of(0xff, 0xfe, 0x3a, 0x31),
  text.encode("PUSH_REG:"),
  text.encode("PUSH_REG:\xc1"),
  text.encode("HB:"),
  new Uint8Array(1),
];

/** Afterwards a valid handshake must succeed. */
export async function sendInvalidInput(host: string, port: number): Promise<void> {
  const sideChannel = zmqSideChannel();
  const transport = nixlTransport();
  try {
    const ask = (frames: readonly Uint8Array[], timeoutMs: number) =>
      sideChannel.request({ host, port, frames, timeoutMs });
    for (const frames of [
      ...INVALID_FRAMES,
      [encodeHandshakeRequest({ ppRank: 0, tpRank: UNKNOWN_RANK })],
      [encodeHandshakeRequest({ ppRank: UNKNOWN_RANK, tpRank: 0 })],
    ]) {
      await ask(frames, 500).catch(() => {});
    }
    const { frames } = await ask([encodeHandshakeRequest({ ppRank: 0, tpRank: 0 })], TIMEOUT_MS);
    const { agentMetadata } = decodeAgentMetadata(
      decodeHandshakeReply(frames).payload.agentMetadataBytes,
    );
    const agent = await transport.createAgent({ name: `stranger-${freshId()}` });
    const remote = await agent.addRemote(agentMetadata);
    for (const payload of INVALID_NOTIFICATIONS) await agent.notify(remote, payload);
    await agent.close();
  } finally {
    await transport.close();
    await sideChannel.close();
  }
}

export function unexpectedInputSuite(server: () => VllmServer): void {
  // The last one: the server answers no handshake after it.
  test("a handshake for an unknown rank ends vLLM's listener, while /health stays 200", async () => {
    const { url, sideChannelPort: port } = server();
    const sideChannel = zmqSideChannel();
    const ask = (tpRank: number) =>
      sideChannel.request({
        host: "127.0.0.1",
        port,
        timeoutMs: TIMEOUT_MS,
        frames: [encodeHandshakeRequest({ ppRank: 0, tpRank })],
      });
    try {
      await ask(0);
      const noAnswer = { code: expect.stringMatching(/^KV_SIDE_CHANNEL_(TIMEOUT|UNREACHABLE)$/) };
      await expect(ask(UNKNOWN_RANK)).rejects.toMatchObject(noAnswer);
      await expect(ask(0)).rejects.toMatchObject(noAnswer);
      expect((await fetch(`${url}/health`, { headers: ONE_USE })).status).toBe(200);
    } finally {
      await sideChannel.close();
    }
  });
}
