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
const METADATA = decodeAgentMetadata(
  decodeHandshakeReply([fixture("v33_pull_p1.pp0tp0.rep0"), fixture("v33_pull_p1.pp0tp0.rep1")])
    .payload.agentMetadataBytes,
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
          ...METADATA,
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
  const lengths = METADATA.blockLengthsBytes.map(
    (bytes) => (bytes * blockSize) / METADATA.blockSize,
  );
  return {
    blockSize,
    blockLengthsBytes: lengths,
    blockStridesBytes: lengths,
    attentionBackend: "FLASH_ATTN",
  };
}
