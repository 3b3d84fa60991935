import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import {
  compatibilityHash,
  decodeAgentMetadata,
  decodeHandshakeReply,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeReply,
} from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";

const fixture = (name: string) =>
  new Uint8Array(
    readFileSync(
      new URL(`../../../../packages/protocol/fixtures/wire/handshake/${name}.bin`, import.meta.url),
    ),
  );
/** The reply of a real vLLM 0.33 with TP 1: 4 regions, blocks of 32 tokens. */
export const RECORDED_REPLY = ["rep0", "rep1"].map((name) => fixture(`v33_pull_p1.pp0tp0.${name}`));
/** What that engine says of itself. */
export const RECORDED_METADATA = decodeAgentMetadata(
  decodeHandshakeReply(RECORDED_REPLY).payload.agentMetadataBytes,
);

interface AnnouncedEngine {
  readonly engineId: string;
  readonly vllmVersion: string;
  readonly mode?: "pull" | "push" | undefined;
  readonly blockSize?: number | undefined;
  readonly announcesFactors?: boolean | undefined;
}

export type FakeSideChannel = Awaited<ReturnType<typeof startSideChannel>>;

/** Answers handshakes as an engine does. */
export async function startSideChannel(engine: () => AnnouncedEngine, port = 0) {
  let asked = 0;
  // A process has a NIXL agent of its own.
  const agentMetadata = new TextEncoder().encode(randomUUID());
  const side = zmqSideChannel();
  const listener = await side.listen({
    host: "127.0.0.1",
    port,
    answer() {
      asked += 1;
      const { engineId, vllmVersion, mode = "pull", blockSize, announcesFactors = true } = engine();
      const factors = { model: "m", transfer_mode: mode, vllm_version: vllmVersion };
      const blocks = blockSize === undefined ? {} : blocksOf(blockSize);
      const payload = encodeHandshakePayload({
        compatibilityHash: compatibilityHash(factors),
        agentMetadataBytes: encodeAgentMetadata({
          ...RECORDED_METADATA,
          ...blocks,
          engineId,
          agentMetadata,
        }),
        extension: announcesFactors ? { version: 1, factors } : undefined,
        rest: {},
      });
      return encodeHandshakeReply(payload, 1);
    },
  });
  return {
    port: listener.port,
    get asked() {
      return asked;
    },
    close: () => side.close(),
  };
}

/** Of a backend whose blocks can be cut. */
function blocksOf(blockSize: number) {
  const lengths = RECORDED_METADATA.blockLengthsBytes.map(
    (bytes) => (bytes * blockSize) / RECORDED_METADATA.blockSize,
  );
  return {
    blockSize,
    blockLengthsBytes: lengths,
    blockStridesBytes: lengths,
    attentionBackend: "FLASH_ATTN",
  };
}
