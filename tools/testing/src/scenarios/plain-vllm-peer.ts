import type { SideChannel } from "@kv/interface";
import {
  decodeHandshakePayload,
  decodeHandshakeRequest,
  encodeHandshakePayload,
} from "@kv/protocol";

/**
 * A side channel whose listener answers only handshakes, as vLLM does. Its replies leave out the
 * fields that only our peers understand.
 */
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
