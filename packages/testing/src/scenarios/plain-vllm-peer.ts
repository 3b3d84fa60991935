import type { SideChannel } from "@kv/interface";
import { decodeHandshakePayload, decodeHandshakeRequest, encodeHandshakePayload } from "@kv/protocol";

/** A side channel whose listener answers handshakes as vLLM does, without what only our own peers understand, and nothing else. */
export function plainSideChannel(sideChannel: SideChannel): SideChannel {
  return {
    ...sideChannel,
    listen: (options) =>
      sideChannel.listen({
        ...options,
        async answer(frames) {
          decodeHandshakeRequest(frames);
          const reply = await options.answer(frames);
          const [payload, clock] = reply ?? [];
          if (payload === undefined || clock === undefined) return undefined;
          const { compatibilityHash, agentMetadataBytes, rest } = decodeHandshakePayload(payload);
          return [encodeHandshakePayload({ compatibilityHash, agentMetadataBytes, rest }), clock];
        },
      }),
  };
}
