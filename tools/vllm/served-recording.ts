import type { SideChannel, Transport } from "@kv/interface";
import { openHeadlessPrefill, openRecording } from "@kv/peer";
import { decode, freshId, type Tokens } from "./completion.js";
import { handshakeTimedOut, retryAfterTimeout } from "./until.js";

/** Serves the recording of a folder to a vLLM D. */
export async function servedRecording(
  folder: string,
  use: {
    readonly transport: Transport;
    readonly sideChannel: SideChannel;
    readonly numBlocks: number;
  },
) {
  const served = await openHeadlessPrefill({
    ...use,
    recording: await openRecording(folder),
    sideChannelHost: "127.0.0.1",
    sideChannelPort: 0,
    leaseMs: 600_000,
  });
  return {
    blocks: served.blocks,
    [Symbol.asyncDispose]: () => served.close(),
    /** D's tokens, also after a handshake timeout. */
    decodedBy: (
      d: { readonly url: string; log(): string },
      tokens: Tokens,
      maxTokens: number,
      beforeDecode = () => {},
    ): Promise<Tokens> =>
      retryAfterTimeout(async () => {
        const id = freshId();
        const params = await served.prefill(`cmpl-${id}-0-${id.slice(0, 8)}`, tokens);
        beforeDecode();
        // D would not read blocks that are in its prefix cache.
        return decode(d.url, tokens, maxTokens, params, { id, salt: id });
      }, handshakeTimedOut(d)),
  };
}
